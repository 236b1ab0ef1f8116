"""What the columns of a report's tables mean, by title: under the pointer on the page, in its glossary, and in
docs/glossary.md."""

from distlab.lab.report.units import BYTE_UNITS

COLUMNS = {
    "variant": "one implementation of the mode's technique",
    "predicted": "by the formula, before the run",
    "formula": "how the prediction was computed",
    "per rank and step": "bytes that one rank sends in one step",
    "calls": "collectives and messages of a step",
    "called": "bytes of the calls' tensors, times the factor of each operation's algorithm",
    "wire": "bytes that the sockets counted, with headers and acknowledgements",
    "measured": "measured on the rank that is farthest from its prediction",
    "on rank": "the rank that is farthest from its prediction",
    "allowed ±": "how far measured may be from predicted; a reason if the comparison is informational",
    "gradients": "in a proof the largest difference of any gradient from the reference; in memory their bytes",
    "weights": "the largest difference of any updated weight from the reference",
    "losses": "the largest difference of any loss from the reference",
    "largest difference": "of all values that the check compared, on the rank where it is largest",
    "tolerance": "the largest difference with which the check passes",
    "ms per step": "median of the timed steps, on the slowest rank",
    "x ...": "the time of a step divided by that of PyTorch's own variant",
    "CPU ms, all ranks": "CPU time of a step, summed over all ranks",
    "parameters": "bytes of the model's weights on the fullest rank: at rest / at the peak",
    "optimizer": "in memory the bytes of the optimizer's state, such as moments; in a profile the time of the update",
    "activations": "bytes that the forward pass keeps for the backward pass, and of temporaries",
    "communication": "in memory the bytes of the calls' tensors; in a profile the time in calls",
    "total": "bytes of all classes together",
    "rest by formula": "bytes between two steps that the formula predicts",
    "process": "bytes of the whole process, as the kernel counts them",
    "container": "bytes of the whole container, as the kernel counts them",
    "data": "time to make the rank's part of the batch",
    "forward": "time of the forward pass",
    "backward": "time of the backward pass",
    "waiting": "time in which the rank waited for a message",
    "slowest": "the rank with the most work of its own, divided by that of the rank with the least",
    "rank": "a process of the run, counted from 0",
    "place on the mesh": "the rank's index along each axis: dp1 is the second replica, pp0 the first stage",
    "host": "the machine or container of the rank",
    "duration": "from the start of the rank's program to its end",
    "ended": "how the rank ended",
    "steps": "how many steps were timed",
    "first loss": "loss of the first step, of the whole batch",
    "last loss": "loss of the last step, of the whole batch",
    "fault": "the fault that LAB_FAULTS injects",
    "expected": "the effect that the fault must have",
    "observed": "the effect that it had",
}


def meaning(title: str) -> str:
    """Return what the column of this title shows; empty if the title says it."""
    if title.startswith("x "):
        return COLUMNS["x ..."]
    unit, _, rest = title.partition(" ")
    return COLUMNS.get(rest if unit in BYTE_UNITS else title, "")
