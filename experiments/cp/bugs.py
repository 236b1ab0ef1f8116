"""The classic mistakes of context parallelism, made by LAB_BUG: positions of a part for those of the whole, blocks that
are put together wrongly, and what costs time or memory while every number is right."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.lab.workload.model import Attend, Model
from distlab.techniques.context_parallel.ring import Part, RingAttention, arrived
from distlab.techniques.context_parallel.strategy import ContextParallel, Positions, contiguous, set_positions

from .predictions import BY_HAND

RINGS = ("ring", "zigzag", "shift")
mistake = Mistakes()


# --- the settings that hide one ---


def too_few(config: Config) -> str:
    """A position a rank is a part that no other one is folded with, or looks at twice."""
    few = config.world_size + 2
    return "" if config.seq >= few else f"LAB_SEQ={config.seq}: it takes {few} positions"


def too_short(config: Config) -> str:
    """Where a rank has a handful of rows, one more or less is as much as the fold is worth."""
    return "" if config.seq >= 8 * config.world_size else f"LAB_SEQ={config.seq}: it takes 8 positions a rank"


LONG, LONG_TIMED = Needs(unless=too_few), Needs(proof=False, unless=too_few)


# --- the mistakes ---


@mistake("local_positions", check="losses", part="steps", of=BY_HAND, needs=LONG)
def by_local_positions(
    model: Model, positions: Positions, attend: Attend, group: dist.ProcessGroup, config: Config, *, rank: int
) -> ContextParallel:
    """Every rank looks up position embeddings from 0 on: a part in the middle is taken for a beginning."""
    strategy = ContextParallel(model, positions, attend, group, config, rank=rank)
    set_positions(model, Positions(tuple((range(rows),) for rows in positions.num_rows)), rank)
    return strategy


@mistake("loss_times_cp", check="gradients", part="steps", of=BY_HAND)
def loss_times_ranks(
    model: Model, positions: Positions, attend: Attend, group: dist.ProcessGroup, config: Config, *, rank: int
) -> ContextParallel:
    """The loss is multiplied by the ranks along cp, and the gradients are summed over them all the same: c times
    too large (Megatron-LM issue 906)."""
    return ContextParallel(model, positions, attend, group, config, rank=rank, scale=group.size())


@mistake("no_lse", check="losses", part="attention", of=RINGS, needs=LONG)
class PlainMean(RingAttention):
    """What two blocks of keys give is averaged, without their log-sum-exp: each weighs as much as the other."""

    @staticmethod
    def merge(part: Part, more: Part) -> None:
        part.out.add_(more.out).mul_(0.5)


@mistake("unfolded", check="balance", part="cut", of=("zigzag",), needs=Needs(proof=False, unless=too_short))
def contiguous_parts(num_positions: int, num_ranks: int) -> Positions:
    """zigzag holds contiguous parts: every number is right, and the last rank does (2c-1)/c of the mean."""
    return contiguous(num_positions, num_ranks)


@mistake("asks_late", check="keys ahead", part="attention", of=RINGS, needs=LONG_TIMED)
class AsksLate(RingAttention):
    """A rank asks for the next keys when it is done with those that it has: nothing travels while it computes."""

    def around(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        tag, source, there = self.peers.new_tag(), self.peers.rank, mine
        for distance in range(1, self.peers.world_size):
            there, messages = self.pass_on(tag, there, source)
            arrived(messages)
            source = self.peers.after(-distance)
            yield source, there


class Keep(torch.autograd.Function):
    """Its first argument; the others wait for the backward pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *[None] * len(ctx.saved_tensors)


@mistake("kept_blocks", check="activation bytes", part="attention", of=RINGS, needs=LONG_TIMED)
class KeptBlocks(RingAttention):
    """A ring keeps all keys and values that came by for its backward pass: as much as if they had been gathered."""

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
