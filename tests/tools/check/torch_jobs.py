"""Six classic faults of torch's own libraries, each a change of a right job, and the words of its diagnosis."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of the job, its faulty replacement, and the words of the diagnosis."""

    old: str
    new: str
    says: tuple[str, ...]


STEP = "torch.distributed.pipelining.PipelineScheduleSingle.step"
PIPE = f"send #9 to rank 1 at pipeline_job.py:20 in {STEP}"
TENSOR = "torch.distributed.tensor"
AS_MANY = "give all ranks the same number of batches, and let them stop, evaluate and save at the same steps"
SKIPPED = (
    "rank 1's loop ended after 3 optimizer steps / 4 batches",
    "rank 1 skipped a batch, or only rank 0 makes a call",
    AS_MANY,
)
WENT_ON = "rank 1 went on after 3 optimizer steps / 3 batches of its DataLoader, and rank 0 has read 4 batches"
FEWER = "rank 1's loop ended after 2 optimizer steps / 2 batches of its DataLoader, and rank 0 has read 3 batches"
ON_0 = "it is under `if rank == 0`"
OF_SAVE = "it is under `if step == 1 and rank == 0`"
SAVE = "torch.distributed.checkpoint.save"

ZERO = "        optimizer.zero_grad()\n"
STEPS = "        optimizer.step()\n"
EVALUATES = '    print(f"rank {rank}: {evaluate(model):.3f}")', "    if rank == 0:\n        print(evaluate(model))"
CHANGES = {  # by fault: text and replacement; by job where its text is different
    "skips": (ZERO, f"        if rank == 1 and step == 2:\n            continue\n{ZERO}"),
    "stops": (STEPS, f"{STEPS}        if rank == 1 and step == 2:\n            break\n"),
    "uneven": ("TensorDataset(samples)", "TensorDataset(samples[: len(samples) - 6 * rank])"),
    "saves": ("if step == 1:", "if step == 1 and rank == 0:"),
    "metric": ("    dist.all_reduce(", "    if rank == 0:\n        dist.all_reduce("),
    "evaluates": EVALUATES,
    "evaluates pipeline_job": (
        "    run(evaluation, samples[:6], rank)", "    if rank == 0:\n        run(evaluation, samples[:6], rank)"
    ),
}  # fmt: skip
SAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "dcp_job": {
        "skips": ("dcp_job.py:35", *SKIPPED),
        "stops": ("dcp_job.py:33", WENT_ON, AS_MANY),
        "uneven": ("dcp_job.py:33", FEWER, AS_MANY),
        "saves": (f"let all ranks call {SAVE} at dcp_job.py:37, or none", f"{OF_SAVE} (dcp_job.py:36)"),
        "metric": ("let all ranks make the all_reduce at dcp_job.py:40, or none", ON_0),
        "evaluates": (
            "torch.distributed.checkpoint.load", "let all ranks make the all_gather at dcp_job.py:18, or none", ON_0
        ),
    },
    "pipeline_job": {
        "skips": (PIPE, *SKIPPED),
        "stops": (PIPE, WENT_ON, AS_MANY),
        "uneven": (
            STEP, "rank 1's loop ended after 3 optimizer steps / 3 batches", "rank 0 has read 4 batches", AS_MANY
        ),
        "saves": (f"let all ranks call {SAVE} at pipeline_job.py:42, or none", OF_SAVE),
        "metric": ("let all ranks make the all_reduce at pipeline_job.py:44", ON_0),
        "evaluates": (f"let all ranks call {STEP} at pipeline_job.py:20, or none (called at pipeline_job.py:47)",),
    },
    "dtensor_job": {
        "skips": ("dtensor_job.py:35", *SKIPPED),
        "stops": (f"dtensor_job.py:33 in {TENSOR}.", WENT_ON, AS_MANY),
        "uneven": (f"dtensor_job.py:33 in {TENSOR}.", FEWER, AS_MANY),
        "saves": (f"let all ranks call {TENSOR}.DTensor.full_tensor at dtensor_job.py:37", OF_SAVE),
        "metric": ("let all ranks make the all_reduce at dtensor_job.py:40", ON_0),
        "evaluates": (
            f"{TENSOR}.distribute_tensor", f"let all ranks call {TENSOR}.DTensor.redistribute", ON_0
        ),
    },
}  # fmt: skip
FAULTS = {
    (job, fault): Fault(*CHANGES.get(f"{fault} {job}", CHANGES[fault]), says)
    for job, faults in SAYS.items() for fault, says in faults.items()
}  # fmt: skip
