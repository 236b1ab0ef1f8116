"""What the mistakes of context parallelism put in the place of the right parts, each wrong in one line."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.parallel.blocks import Part
from workers.parallel.context_ring import RingAttention, arrived
from workers.parallel.positions import Positions
from workers.parallel.ulysses import Swap, UlyssesAttention
from workers.strategies.context import ContextParallel, OwnRows, place
from workers.workload.model import Attend, Model


def by_local_positions(
    model: Model, positions: Positions, attend: Attend, group: dist.ProcessGroup, config: Config, *, rank: int
) -> ContextParallel:
    """Every rank's first row stands at position 0."""
    strategy = ContextParallel(model, positions, attend, group, config, rank=rank)
    place(model, Positions(tuple((range(rows),) for rows in positions.num_rows)), rank)
    return strategy


def loss_times_ranks(
    model: Model, positions: Positions, attend: Attend, group: dist.ProcessGroup, config: Config, *, rank: int
) -> ContextParallel:
    """As if the gradients were averaged over the ranks, and not summed."""
    return ContextParallel(model, positions, attend, group, config, rank=rank, scale=group.size())


class ShiftedRows(OwnRows):
    """Makes the targets of its own tokens: the next one that it has."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        own = self.own(inputs)
        loss: Tensor = self.model(own, own.roll(-1, 1))
        return loss


def local_mask(group: dist.ProcessGroup, positions: Positions) -> Attend:
    """Takes a rank's rows for one run that follows those of the ranks before it."""
    ends = list(accumulate(positions.num_rows, initial=0))
    return RingAttention(group, Positions(tuple((range(*ends[rank : rank + 2]),) for rank in range(group.size()))))


class PlainMean(RingAttention):
    """Takes two softmaxes for two halves of one."""

    @staticmethod
    def merge(part: Part, more: Part) -> None:
        part.out.add_(more.out).mul_(0.5)


class StrayGradients(RingAttention):
    """Leaves what it finds for another rank's keys where it found it."""

    def hand_home(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        for _ in parts:
            pass
        return own


class AsksLate(RingAttention):
    """Asks for the next keys when it is done with those that it has."""

    def around(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        tag, source, there = self.peers.new_tag(), self.peers.rank, mine
        for distance in range(1, self.peers.world_size):
            there, messages = self.pass_on(tag, there, source)
            arrived(messages)
            source = self.peers.after(-distance)
            yield source, there


class KeptBlocks(RingAttention):
    """Keeps all keys and values that came by, to have them in the backward pass."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.came: list[Tensor] = []
        out = super().__call__(q, k, v)
        return Keep.apply(out, *self.came)  # type: ignore[no-any-return, no-untyped-call]

    def around(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        others = super().around(mine)

        def noted() -> Iterator[tuple[int, Tensor]]:
            for source, there in others:
                self.came.append(there)
                yield source, there

        return noted()


class Keep(torch.autograd.Function):
    """Its first argument; the others wait for the backward pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *[None] * len(ctx.saved_tensors)


class ByArrival(UlyssesAttention):
    """Puts the parts together as they come: its own, then those of the ranks behind it."""

    class InTurn(Swap):
        def exchange(self, parts: tuple[Tensor, ...], shapes: list[tuple[int, int]]) -> list[Tensor]:
            got = super().exchange(parts, shapes)
            return got[self.peers.rank :] + got[: self.peers.rank]

    swap = InTurn
