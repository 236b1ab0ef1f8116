"""What a rank of the mesh holds, on paper: its place in the grid, its stages, and of each parameter its slice.

Derived from the dense model's outline and the rules of the papers alone, and not from what slices and cuts it in a run.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from workers.config import Config
from workers.parallel.positions import contiguous, zigzag
from workers.parallel.slices import shares
from workers.strategies.pipelined import runs_of
from workers.workload.data import shard_sizes
from workers.workload.model import VOCABULARY, outline

BY_HEADS = ("attention.q.weight", "attention.q.bias", "attention.k.weight", "attention.k.bias", "attention.v.weight",
            "attention.v.bias", "attention.o.weight")  # fmt: skip
BY_UNITS = ("mlp.up.weight", "mlp.up.bias", "mlp.down.weight")
BY_VOCABULARY = ("token.weight", "project.weight")
REPLICATED = ("dp", "cp")  # the axes along which all ranks hold the same


class How(NamedTuple):
    """What a variant is made of."""

    schedule: str = "1f1b"
    rows: bool = False  # sequence parallelism, where there is a text and a tp
    zero: int = 0
    one_by_one: bool = False  # gradients, not in buckets
    swaps: bool = False  # positions for heads along cp (Ulysses), where others send keys round

    def in_two(self, ranks: int, *, recompute: bool) -> bool:
        """Whether a stage of so many sends the gradient of its input before it computes those of its weights.

        ZeRO sums a layer's gradients and lets them go as the pass leaves it, and a layer that is computed again would
        be kept until the second part: of both the pass stays in one.
        """
        return self.schedule != "gpipe" and ranks > 1 and not (self.zero or recompute)


HOW = {
    "naive": How("gpipe", one_by_one=True),
    "gpipe": How("gpipe"),
    "1f1b": How(),
    "interleaved": How("interleaved"),
    "zb_h1": How("zb_h1"),
    "sequence": How(rows=True),
    "zero1": How(rows=True, zero=1),
    "zero2": How(rows=True, zero=2),
    "zero3": How(rows=True, zero=3),
    "ulysses": How(swaps=True),
}


class Local(NamedTuple):
    """A parameter on a rank."""

    name: str
    numel: int  # of this rank's slice
    whole: bool  # every rank of a slice has all of it
    shared: bool  # by the first and the last stage, which are not the same


class Rank:
    """Rank `rank` of a grid of `sizes`, in a variant that is made as `how` says."""

    def __init__(self, config: Config, sizes: Mapping[str, int], rank: int, how: How, chunks: int) -> None:
        self.config, self.sizes, self.how = config, sizes, how
        self.at = at(rank, sizes)
        self.t, self.p, self.d, self.c = sizes["tp"], sizes["pp"], sizes["dp"], sizes["cp"]
        self.chunks = chunks if how.schedule == "interleaved" else 1
        self.is_gpt = config.model == "gpt"
        self.rows = how.rows and self.is_gpt and self.t > 1
        self.drops: bool = getattr(config.options, "dropout", 0) > 0
        self.itemsize: int = getattr(torch, config.dtype).itemsize
        self.microbatches = shard_sizes(shard_sizes(config.batch, self.d)[self.at["dp"]], config.num_microbatches)
        cut = (contiguous if how.swaps else zigzag)(config.seq if self.is_gpt else 1, self.c)
        self.positions = cut.num_rows  # of each rank along cp
        self.seq = self.positions[self.at["cp"]]

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """The layers of each of this rank's stages."""
        runs = runs_of(self.config.model, len(outline(self.config).layers), self.p * self.chunks)
        return {stage: list(runs[stage]) for stage in range(self.at["pp"], len(runs), self.p)}

    @property
    def replicas(self) -> int:
        """Ranks that hold the same of the model: with other samples, or with other positions of the same."""
        return self.d * self.c

    @property
    def replica(self) -> int:
        """This one's place among them, in the order of the grid."""
        place = 0
        for axis in (axis for axis in self.sizes if axis in REPLICATED):
            place = place * self.sizes[axis] + self.at[axis]
        return place

    @property
    def replicated(self) -> str:
        """The axis, or both, along which they lie: the name of their group."""
        return "_".join(axis for axis in REPLICATED if self.sizes[axis] > 1) or "dp"

    @property
    def num_blocks(self) -> int:
        """Layers of this rank that are no ends of gpt."""
        layers = sum(len(run) for run in self.stages.values())
        return layers - (self.is_first + self.is_last) * self.is_gpt

    @property
    def is_first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def is_last(self) -> bool:
        return self.at["pp"] == self.p - 1

    def own_rows(self) -> int:
        """Positions that this rank has of each sample between two slices, of those along cp."""
        return shares(self.seq, self.t)[self.at["tp"]] if self.rows else self.seq

    def units(self, stage: int) -> list[list[Local]]:
        """The parameters of a stage, a layer each: one of both ends of gpt that share a weight, which between two
        stages is one by itself."""
        layers = outline(self.config).layers
        tied = self.config.tie and self.is_gpt
        found = {index: list(self.of_layer(layers[index])) for index in self.stages[stage]}
        if tied and self.p == 1:
            last = found.pop(len(layers) - 1)
            found[0] += [local for local in last if local.name != "project.weight"]
        alone = [local for of_layer in found.values() for local in of_layer if local.shared]
        return [[local for local in of_layer if not local.shared] for of_layer in found.values()] + [alone] * bool(
            alone
        )

    def of_layer(self, layer: nn.Module) -> Iterator[Local]:
        """Of one layer, in the order of the model."""
        shared = self.config.tie and self.is_gpt and self.p > 1
        for name, parameter in layer.named_parameters():
            share, of = self.share(name)
            numel = parameter.numel() * share // of
            yield Local(name, numel, share == of, shared and name in BY_VOCABULARY)

    def share(self, name: str) -> tuple[int, int]:
        """How many units of a parameter this rank has, and of how many: heads, hidden units or bytes of a text."""
        units = {BY_HEADS: self.config.heads, BY_UNITS: 4 * self.config.width, BY_VOCABULARY: VOCABULARY}
        count = next((units[names] for names in units if name in names), 1)
        return (shares(count, self.t)[self.at["tp"]] if count > 1 else 1), count


def at(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The place of a rank along each axis; the last axis is the innermost."""
    place = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place
