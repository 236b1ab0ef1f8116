"""Buffers of a model of one's own in the proof: what one process leaves as it was stays so on every rank, to the bit.

What a forward pass writes, a count or a running mean, comes from the samples that it saw, and ranks see others: that
differs by design. It is said, and not compared; `ranklab prove` holds it against what one process makes of the rank's
own samples.
"""

import torch
from torch import nn

from workers.lab import Lab
from workers.measure.hashing import hash_of
from workers.workload.own import is_own

BUFFERS = "buffers"
CONTROL = "tests/workers/workload/test_own.py::test_a_buffer_that_a_step_writes_fails_by_name"

Hashes = dict[str, int]


def carried(model: nn.Module) -> Hashes:
    """A hash of each buffer, by name."""
    return {name: hash_of(buffer) for name, buffer in model.named_buffers()}


def changed(before: Hashes, after: Hashes) -> set[str]:
    """The names of those that are others."""
    return {name for name, value in after.items() if before.get(name) != value}


class Carried:
    """What one process writes, which all ranks know; `start` is what every model of LAB_SEED begins with."""

    def __init__(self, lab: Lab, dense: nn.Module | None) -> None:
        """By all ranks, after one process has taken its steps on `dense`, which rank 0 has."""
        self.lab = lab
        self.start = carried(lab.model(torch.float64)) if is_own(lab.config.model) else {}
        self.written = set[str]()
        if self.start:
            mine = sorted(changed(self.start, carried(dense))) if dense is not None else []
            self.written.update(lab.exchange.everyone("buffers that one process writes", mine)[0])
        for name in sorted(self.written):
            lab.say(
                f"{name} is written by the steps, on each rank from the samples that it sees: it differs by design, and"
                " `ranklab prove` compares it",
                BUFFERS,
            )

    def hold(self, name: str, model: nn.Module) -> None:
        """After a variant's steps on `model`: what one process leaves as it was has to be as it was here."""
        if not self.start:
            return
        moved = sorted(changed(self.start, carried(model)) - self.written)
        kept = len(self.start) - len(self.written)
        detail = ", ".join(moved) if moved else f"{kept} of {len(self.start)} that one process leaves as they were"
        self.lab.check(BUFFERS, len(moved), 0, variant=name, detail=detail, control=CONTROL)
