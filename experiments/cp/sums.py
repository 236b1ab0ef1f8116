"""What a ring adds up in: partial results of 16-bit rows in float32, which no proof in float64 and no loss shows.

A row's result is merged from what it has of each rank's keys, and the gradient of its query is the sum of as many
parts. Each rounding to 16 bits on the way is within what a timed loss may be off. So one attention in bfloat16 is run
on purpose, and the additions to rows in it are heard from torch's dispatcher: as many as there are ranks whose keys
these rows see, forward and back, each in float32 at least.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.contract import Strategy
from workers.lab import Lab
from workers.parallel.context_ring import RingAttention
from workers.parallel.positions import Positions

ADDITIONS = ("aten::add_", "aten::addcmul_")
ROWS = 4  # dims of [B, heads, rows, head_dim]; keys, values and their gradients travel as [2, B, heads, rows, head_dim]
CONTROL = "tests/experiments/test_cp.py::test_a_ring_that_adds_up_in_16_bits_is_seen"


class Additions(TorchDispatchMode):
    """The types of what is added to in place inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: list[torch.dtype] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in ADDITIONS and args[0].dim() == ROWS:
            self.types.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def check_sums(lab: Lab, name: str, strategy: Strategy) -> None:
    """One attention of a variant that merges, forward and back, in bfloat16."""
    attend = getattr(strategy.model.layers[1], "attention", None)  # type: ignore[attr-defined]
    if attend is None or not isinstance(attend.attend, RingAttention):
        return
    ring = attend.attend
    shape = (1, 2, ring.positions.num_rows[ring.peers.rank], 8)
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, device=lab.device, requires_grad=True) for _ in range(3))
    with Additions() as seen:
        ring(q, k, v).sum().backward()
    wanted = 2 * merged(ring.positions, ring.peers.rank)
    exact = sum(each.itemsize >= 4 for each in seen.types)
    detail = f"of {wanted} additions to rows of bfloat16, {exact} in float32 and {len(seen.types) - exact} in 16 bits"
    off = abs(wanted - exact) + len(seen.types) - exact
    lab.check("sums of rows", off, 0, variant=name, detail=detail, control=CONTROL)


def merged(positions: Positions, rank: int) -> int:
    """The other ranks some of whose positions are before one of this rank's."""
    own = positions.of(rank)
    others = [positions.of(each) for each in range(len(positions.num_rows)) if each != rank]
    return sum(bool(len(own) and len(each) and own.max() > each.min()) for each in others)
