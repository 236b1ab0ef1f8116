"""The classic mistakes of context parallelism, made by LAB_BUG: positions and masks of the part for those of the whole,
parts that are put together wrongly, and gradients that stay where the keys were."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.blocks import Part
from workers.parallel.context_ring import RingAttention, arrived
from workers.parallel.positions import Positions, contiguous
from workers.parallel.ulysses import Swap, UlyssesAttention
from workers.strategies.context import ContextParallel, OwnRows, place
from workers.workload.model import Attend, Model

BY_HAND = ("gathered", "ring", "zigzag", "ulysses")


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


def too_short(config: Config) -> str:
    """Where a rank has a handful of rows, one more or less is as much as the fold is worth."""
    return "" if config.seq >= 8 * config.world_size else f"LAB_SEQ={config.seq}: it takes 8 positions a rank"


def one_head_each(config: Config) -> str:
    """Of rows and heads that no other rank has any, the order does not matter."""
    few = min(config.seq, config.heads)
    return "" if few > 1 else "one head or one position: nothing can be in the wrong order"


MISTAKES = {
    "local_positions": Mistake(
        "every rank looks up position embeddings from 0 on: a part in the middle is taken for a beginning",
        "losses",
        Instead(BY_HAND, {"steps": by_local_positions}),
    ),
    "local_mask": Mistake(
        "the mask of a folded part is made as if it were one run: its early rows see nothing of later ranks' early keys"
        " and its late rows too little",
        "losses",
        Instead(("zigzag",), {"attention": local_mask}),
    ),
    "shifted_after_cut": Mistake(
        "targets are made by shifting tokens after the sequence was cut: the last of each part has a wrong one",
        "losses",
        Instead(BY_HAND, {"steps": partial(ContextParallel, rows=ShiftedRows)}),
    ),
    "loss_times_cp": Mistake(
        "the loss is multiplied by the ranks along cp, and the gradients are summed over them all the same: c times too"
        " large (Megatron-LM issue 906)",
        "gradients",
        Instead(BY_HAND, {"steps": loss_times_ranks}),
    ),
    "no_lse": Mistake(
        "what two blocks of keys give is averaged, without their log-sum-exp: each weighs as much as the other",
        "losses",
        Instead(("ring", "zigzag"), {"attention": PlainMean}),
    ),
    "stray_gradients": Mistake(
        "dK and dV stay on the rank that computed them: keys learn from their own rank's rows alone",
        "gradients",
        Instead(("ring", "zigzag"), {"attention": StrayGradients}),
    ),
    "by_arrival": Mistake(
        "the parts of an all-to-all are put together as they come, and not by rank: positions and heads change places",
        "losses",
        Instead(("ulysses",), {"attention": ByArrival}),
        Needs(unless=one_head_each),
    ),
    "unfolded": Mistake(
        "zigzag holds contiguous parts: every number is right, and the last rank does (2c-1)/c of the mean",
        "balance",
        Instead(("zigzag",), {"cut": contiguous}),
        Needs(proof=False, unless=too_short),
    ),
    "asks_late": Mistake(
        "a rank asks for the next keys when it is done with those that it has: nothing travels while it computes",
        "keys ahead",
        Instead(("ring", "zigzag"), {"attention": AsksLate}),
        Needs(proof=False),
    ),
    "kept_blocks": Mistake(
        "a ring keeps all keys and values that came by for its backward pass: as much as if they had been gathered",
        "activation bytes",
        Instead(("ring", "zigzag"), {"attention": KeptBlocks}),
        Needs(proof=False),
    ),
}
