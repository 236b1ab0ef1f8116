"""Classic bugs of context parallelism, injected by LAB_BUG: local positions in place of global ones, parts merged
wrongly, and bugs that cost time or memory while every number is right."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Mistakes, Needs, replaced
from distlab.lab.config import Config
from distlab.lab.workload.model import Attend, Model
from distlab.techniques.context_parallel import ring
from distlab.techniques.context_parallel.ring import Part, RingAttention, wait_for
from distlab.techniques.context_parallel.strategy import ContextParallel, Positions, contiguous, set_positions

from .predictions import BY_HAND

RINGS = ("ring", "zigzag", "shift")
mistake = Mistakes()


# --- settings that hide a bug ---


def too_few(config: Config) -> str:
    """With one position per rank there is no second run, and no key that a later turn sees."""
    few = config.world_size + 2
    return "" if config.seq >= few else f"LAB_SEQ={config.seq}: it takes {few} positions"


def too_short(config: Config) -> str:
    """With few rows per rank one row more or less matters as much as the zig-zag."""
    return "" if config.seq >= 8 * config.world_size else f"LAB_SEQ={config.seq}: it takes 8 positions per rank"


LONG, LONG_TIMED = Needs(unless=too_few), Needs(proof=False, unless=too_few)


# --- the bugs ---

Step: TypeAlias = Callable[..., ContextParallel]


def with_attention(attention: Callable[[dist.ProcessGroup, Positions], Attend]) -> Step:
    """Return a step that uses this attention in place of the variant's."""

    def step(model: Model, positions: Positions, _: Attend, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return ContextParallel(model, positions, attention(group, positions), group, *args, **kwargs)

    return step


wrong_step = partial(mistake, part="ContextParallel", of=BY_HAND)
wrong_attention = partial(mistake, part="ContextParallel", of=RINGS, put=with_attention)


@wrong_step("local_positions", check="losses", needs=LONG)
def by_local_positions(model: Model, positions: Positions, attend: Attend, *args: Any, rank: int) -> ContextParallel:
    """Every rank looks up position embeddings from 0 on: its part of the sequence is treated as the beginning."""
    strategy = ContextParallel(model, positions, attend, *args, rank=rank)
    set_positions(model, Positions(tuple((range(rows),) for rows in positions.num_rows)), rank)
    return strategy


@wrong_step("loss_times_cp", check="gradients")
def loss_times_ranks(*args: Any, rank: int) -> ContextParallel:
    """The loss is multiplied by the ranks along cp, but the gradients are summed over them too: c times too large
    (Megatron-LM issue 906)."""
    strategy = ContextParallel(*args, rank=rank)
    strategy.scale = len(strategy.positions.runs)
    return strategy


def average(part: Part, other: Part) -> None:
    part.out.add_(other.out).mul_(0.5)


@wrong_attention("no_lse", check="losses", needs=LONG)
class PlainMean(RingAttention):
    """Results of two blocks of keys are averaged without log-sum-exp: both have equal weight."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with replaced(vars(ring), {"merge": average}):
            return super().__call__(q, k, v)


@mistake(
    "unfolded", check="balance", part="ContextParallel", of=("zigzag",), needs=Needs(proof=False, unless=too_short)
)
def by_contiguous_parts(
    model: Model, positions: Positions, _: Attend, group: dist.ProcessGroup, *args: Any, rank: int
) -> ContextParallel:
    """zigzag has contiguous parts: every number is right, but the last rank does (2c-1)/c of the mean work."""
    parts = contiguous(positions.length, group.size())
    return ContextParallel(model, parts, RingAttention(group, parts), group, *args, rank=rank)


@wrong_attention("asks_late", check="keys ahead", needs=LONG_TIMED)
class LateRequests(RingAttention):
    """A rank requests the next keys after it has computed with the current ones: nothing travels while it computes."""

    def receive_keys(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        tag, source, keys_values = self.peers.new_tag(), self.peers.rank, mine
        for distance in range(1, self.peers.world_size):
            keys_values, messages = self.pass_on(tag, keys_values, source)
            wait_for(messages)
            source = self.peers.after(-distance)
            yield source, keys_values


class Keep(torch.autograd.Function):
    """Returns its first argument, and keeps the others for the backward pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *[None] * len(ctx.saved_tensors)


@wrong_attention("kept_blocks", check="activation bytes", needs=LONG_TIMED)
class KeptBlocks(RingAttention):
    """A ring keeps all received keys and values for its backward pass: as much as if they had been gathered."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.received: list[Tensor] = []
        out = super().__call__(q, k, v)
        return Keep.apply(out, *self.received)  # type: ignore[no-any-return, no-untyped-call]

    def receive_keys(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        others = super().receive_keys(mine)

        def noted() -> Iterator[tuple[int, Tensor]]:
            for source, keys_values in others:
                self.received.append(keys_values)
                yield source, keys_values

        return noted()
