"""What the doctor has found: a sentence that can be acted on, whose it is, and both sides as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

# What is looked for, in the order of the verdict; each is a check of the run, which holds where nothing was found.
MATCH, HANG, END = "calls match", "nothing hangs", "the script ends well"
WAITED, AT_REST = "handles are waited for", "tensors are at rest in flight"
REPLICAS, DATA, DROPOUT, DEVICES = (
    "replicas agree",
    "ranks train on their own data",
    "dropout agrees",
    "a device a rank",
)
CHECKS = (MATCH, HANG, END, WAITED, AT_REST, REPLICAS, DATA, DROPOUT, DEVICES)


@dataclass(frozen=True)
class Finding:
    """`ends` is whether the run can only go wrong from here on, so that it is ended."""

    check: str
    sentence: str
    ranks: tuple[int, ...] = ()
    rows: Sequence[Sequence[str]] = field(default=())  # rank, where it is, in which call, since when
    ends: bool = False
    traceback: str = ""
