"""Six classic faults of torch's own libraries, each a change of a right job, and what has to be said of it."""

from collections.abc import Iterator
from typing import NamedTuple


class Fault(NamedTuple):
    """What is put in the place of a text of the job's, and what has to be said."""

    old: str
    new: str
    says: tuple[str, ...]


SKIPS = (
    "        optimizer.zero_grad()\n",
    "        if rank == 1 and step == 2:\n            continue\n        optimizer.zero_grad()\n",
)
STOPS = (
    "        optimizer.step()\n",
    "        optimizer.step()\n        if rank == 1 and step == 2:\n            break\n",
)
UNEVEN = "TensorDataset(samples)", "TensorDataset(samples[: len(samples) - 6 * rank])"
SAVES = "if step == 1:", "if step == 1 and rank == 0:"
METRIC = "    dist.all_reduce(", "    if rank == 0:\n        dist.all_reduce("
EVALUATES = '    print(f"rank {rank}: {evaluate(model):.3f}")', "    if rank == 0:\n        print(evaluate(model))"
RUNS = "    run(evaluation, samples[:6], rank)", "    if rank == 0:\n        run(evaluation, samples[:6], rank)"

AS_MANY = "give all ranks as many batches, and let them stop, evaluate and save at the same steps"
SKIPPED = "rank 1's loop ended after 3 optimizer steps / 4 batches", "a batch that rank 1 skips", AS_MANY
STOPPED = (
    "rank 1 went on after 3 optimizer steps / 3 batches of its DataLoader, and rank 0 has taken 4 batches",
    AS_MANY,
)
FEWER = (
    "rank 1's loop ended after 2 optimizer steps / 2 batches of its DataLoader, and rank 0 has taken 3 batches",
    AS_MANY,
)
ON_0 = "it stands under `if rank == 0`"
STEP = "torch.distributed.pipelining.PipelineScheduleSingle.step"
FAULTS = {
    ("dcp_job", "skips"): Fault(*SKIPS, ("dcp_job.py:35", *SKIPPED)),
    ("dcp_job", "stops"): Fault(*STOPS, ("dcp_job.py:33", *STOPPED)),
    ("dcp_job", "uneven"): Fault(*UNEVEN, ("dcp_job.py:33", *FEWER)),
    ("dcp_job", "saves"): Fault(
        *SAVES,
        (
            "let all ranks call torch.distributed.checkpoint.save at dcp_job.py:37, or none",
            "it stands under `if step == 1 and rank == 0` (dcp_job.py:36)",
        ),
    ),
    ("dcp_job", "metric"): Fault(*METRIC, ("let all ranks make the all_reduce of dcp_job.py:40, or none", ON_0)),
    ("dcp_job", "evaluates"): Fault(
        *EVALUATES,
        ("torch.distributed.checkpoint.load", "let all ranks make the all_gather of dcp_job.py:18, or none", ON_0),
    ),
    ("pipeline_job", "skips"): Fault(*SKIPS, (f"send #9 to rank 1 at pipeline_job.py:20 in {STEP}", *SKIPPED)),
    ("pipeline_job", "stops"): Fault(*STOPS, (f"send #9 to rank 1 at pipeline_job.py:20 in {STEP}", *STOPPED)),
    ("pipeline_job", "uneven"): Fault(
        *UNEVEN,
        (STEP, "rank 1's loop ended after 3 optimizer steps / 3 batches", "rank 0 has taken 4 batches", AS_MANY),
    ),
    ("pipeline_job", "saves"): Fault(
        *SAVES,
        (
            "let all ranks call torch.distributed.checkpoint.save at pipeline_job.py:42, or none",
            "it stands under `if step == 1 and rank == 0`",
        ),
    ),
    ("pipeline_job", "metric"): Fault(*METRIC, ("let all ranks make the all_reduce of pipeline_job.py:44", ON_0)),
    ("pipeline_job", "evaluates"): Fault(
        *RUNS, (f"let all ranks call {STEP} at pipeline_job.py:20, or none (called at pipeline_job.py:47)",)
    ),
    ("dtensor_job", "skips"): Fault(*SKIPS, ("dtensor_job.py:35", *SKIPPED)),
    ("dtensor_job", "stops"): Fault(*STOPS, ("dtensor_job.py:33 in torch.distributed.tensor.", *STOPPED)),
    ("dtensor_job", "uneven"): Fault(*UNEVEN, ("dtensor_job.py:33 in torch.distributed.tensor.", *FEWER)),
    ("dtensor_job", "saves"): Fault(
        *SAVES,
        (
            "let all ranks call torch.distributed.tensor.DTensor.full_tensor at dtensor_job.py:37",
            "it stands under `if step == 1 and rank == 0`",
        ),
    ),
    ("dtensor_job", "metric"): Fault(*METRIC, ("let all ranks make the all_reduce of dtensor_job.py:40", ON_0)),
    ("dtensor_job", "evaluates"): Fault(
        *EVALUATES,
        (
            "torch.distributed.tensor.distribute_tensor",
            "let all ranks call torch.distributed.tensor.DTensor.redistribute",
            ON_0,
        ),
    ),
}

# The job's library, and the fault in words, as docs/check.md has them.
LIBRARIES = {
    "dcp_job": "torch.distributed.checkpoint", "pipeline_job": "torch.distributed.pipelining",
    "dtensor_job": "torch.distributed.tensor",
}  # fmt: skip
IN_WORDS = {
    "skips": "a rank skips a batch", "evaluates": "evaluation on rank 0 alone", "stops": "an early stop on one rank",
    "saves": "a save around a collective on one rank", "uneven": "an uneven data set", "metric": "a metric on one rank",
}  # fmt: skip


def rows() -> Iterator[str]:
    """Those of docs/check.md's table."""
    for job, library in LIBRARIES.items():
        yield f"| {library} | right | nothing |"
        for fault, words in IN_WORDS.items():
            yield f"| | {words} | {' … '.join(FAULTS[job, fault].says)} |"
