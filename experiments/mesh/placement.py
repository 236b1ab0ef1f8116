"""What a rank of the mesh holds, on paper: its place in the grid, its stage, and of each parameter its slice.

Derived from the dense model's outline and the rules of the papers alone, and not from what slices and cuts it in a run.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import cycle
from typing import NamedTuple

from torch import nn

from distlab.lab.config import Config
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import VOCABULARY, outline
from distlab.techniques.context_parallel.strategy import Positions, contiguous, zigzag
from distlab.techniques.pipeline_parallel.strategy import runs_of
from distlab.techniques.tensor_parallel.layers import partition_sizes

BY_HEADS = ("attention.q.weight", "attention.q.bias", "attention.k.weight", "attention.k.bias", "attention.v.weight",
            "attention.v.bias", "attention.o.weight")  # fmt: skip
BY_UNITS = ("mlp.up.weight", "mlp.up.bias", "mlp.down.weight")
BY_VOCABULARY = ("token.weight", "project.weight")
REPLICATED = ("dp", "cp")  # the axes along which all ranks hold the same


class How(NamedTuple):
    """What a variant is made of, and a sentence on it."""

    sentence: str
    rows: bool = False  # sequence parallelism, where there is a text and a tp
    zero: int = 0
    plain: bool = False  # gpt's ends whole on every rank of a slice, and gradients summed one by one
    swaps: bool = False  # positions for heads along cp (Ulysses), where others send keys round

    @property
    def cut(self) -> Callable[[int, int], Positions]:
        """Which rank along cp holds which positions."""
        return contiguous if self.swaps else zigzag


HOW = {
    "1f1b": How("A stage a rank, a backward as soon as there can be one, and gradients in buckets."),
    "sequence": How("Rows between the slices, and between the stages.", rows=True),
    "zero1": How("Optimizer state in shards.", rows=True, zero=1),
    "zero2": How("Optimizer state and gradients in shards.", rows=True, zero=2),
    "zero3": How("Optimizer state, gradients and weights in shards.", rows=True, zero=3),
    "ulysses": How("Heads for positions, and back.", swaps=True),
    "plain": How("The lesson on one page: 1f1b by plain messages, both ends of the model whole.", plain=True),
}


class Local(NamedTuple):
    """A parameter on a rank."""

    name: str
    numel: int  # of this rank's slice
    whole: bool  # every rank of a slice has all of it
    shared: bool  # by the first and the last stage, which are not the same


class Rank:
    """Rank `rank` of a grid of `sizes`, in a variant that is made as `how` says."""

    def __init__(self, config: Config, sizes: Mapping[str, int], rank: int, how: How) -> None:
        self.config, self.sizes, self.how = config, sizes, how
        self.at = at(rank, sizes)
        self.t, self.p, self.d, self.c = sizes["tp"], sizes["pp"], sizes["dp"], sizes["cp"]
        self.is_gpt = config.model == "gpt"
        self.rows = how.rows and self.is_gpt and self.t > 1
        self.drops: bool = getattr(config.options, "dropout", 0) > 0
        self.itemsize = config.itemsize
        self.microbatches = shard_sizes(shard_sizes(config.batch, self.d)[self.at["dp"]], config.num_microbatches)
        self.positions = how.cut(config.seq if self.is_gpt else 1, self.c).num_rows  # of each rank along cp
        self.seq = self.positions[self.at["cp"]]

    @cached_property
    def layers(self) -> range:
        """The layers of this rank's stage."""
        return runs_of(self.config.model, len(outline(self.config).layers), self.p)[self.at["pp"]]

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
        return len(self.layers) - (self.is_first + self.is_last) * self.is_gpt

    @property
    def is_first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def is_last(self) -> bool:
        return self.at["pp"] == self.p - 1

    def own_rows(self) -> int:
        """Positions that this rank has of each sample between two slices, of those along cp."""
        return partition_sizes(self.seq, self.t)[self.at["tp"]] if self.rows else self.seq

    @cached_property
    def units(self) -> list[list[Local]]:
        """The parameters of its stage by layer; tied ends are one, and between two stages one by itself."""
        layers = outline(self.config).layers
        tied = self.config.tie and self.is_gpt
        found = {index: list(self.of_layer(layers[index])) for index in self.layers}
        if tied and self.p == 1:
            last = found.pop(len(layers) - 1)
            found[0] += [local for local in last if local.name != "project.weight"]
        alone = [local for of_layer in found.values() for local in of_layer if local.shared]
        return [[local for local in of_layer if not local.shared] for of_layer in found.values()] + [alone] * bool(
            alone
        )

    @property
    def uneven(self) -> bool:
        """Whether ranks of a slice have parameters of other sizes."""
        names = [name for name, _ in outline(self.config).named_parameters()]
        counts = {self.share(name.split(".", 2)[-1])[1] for name in names}
        return any(count > 1 and count % self.t for count in counts)

    def of_layer(self, layer: nn.Module) -> Iterator[Local]:
        """Of one layer, in the order of the model."""
        shared = self.config.tie and self.is_gpt and self.p > 1
        for name, parameter in layer.named_parameters():
            share, of = self.share(name)
            numel = parameter.numel() * share // of
            yield Local(name, numel, share == of, shared and name in BY_VOCABULARY)

    def share(self, name: str) -> tuple[int, int]:
        """How many units of a parameter this rank has, and of how many: heads, hidden units or bytes of a text."""
        units = {BY_HEADS: self.config.heads, BY_UNITS: 4 * self.config.width}
        units |= {} if self.how.plain else {BY_VOCABULARY: VOCABULARY}
        count = next((units[names] for names in units if name in names), 1)
        return (partition_sizes(count, self.t)[self.at["tp"]] if count > 1 else 1), count


def at(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The place of a rank along each axis; the last axis is the innermost."""
    place = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


# LAB_MESH: the axes of the grid, from the outermost to the innermost, and how many ranks lie along each.

AXES = ("pp", "dp", "cp", "tp")  # as ranks are laid out by default: tp sends most, so its ranks are neighbours
HANDED = ("dp", "tp", "pp")  # who gets the next factor of WORLD_SIZE where LAB_MESH is unset; cp takes a text


def sizes_of(mesh: str, world_size: int) -> dict[str, int]:
    """Ranks along each axis, in the order of the grid; an axis that is not named is one rank long."""
    if not mesh:
        return default(world_size)
    named = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}
    return named | {axis: 1 for axis in AXES if axis not in named}


def default(world_size: int) -> dict[str, int]:
    """The prime factors of WORLD_SIZE, the largest first, handed out in turn: 8 is dp2, tp2, pp2."""
    sizes = dict.fromkeys(AXES, 1)
    for axis, factor in zip(cycle(HANDED), sorted(factors(world_size), reverse=True), strict=False):
        sizes[axis] *= factor
    return sizes


def factors(number: int) -> list[int]:
    """Its prime factors; none of 1."""
    for divisor in range(2, math.isqrt(number) + 1):
        if number % divisor == 0:
            return [divisor, *factors(number // divisor)]
    return [number] if number > 1 else []


def misfit(mesh: str, world_size: int) -> list[str]:
    """Sentences why LAB_MESH is no grid of WORLD_SIZE ranks."""
    parts = mesh.split(",") if mesh else []
    found = [re.fullmatch(r"([a-z]+)([1-9]\d{0,4})", part.strip()) for part in parts]
    names = [match[1] for match in found if match]
    if "ep" in names:
        return [f"LAB_MESH={mesh!r}: the model of a mesh has no experts, that of RUN_MODE=moe has: {of_experts(mesh)}"]
    if None in found or not set(names) <= set(AXES) or len(set(names)) < len(names):
        return [
            f"LAB_MESH={mesh!r} is no mesh: allowed are dp, cp, tp and pp, each once and with its ranks, as dp2,tp2,pp2"
        ]
    product = math.prod(sizes_of(mesh, world_size).values())
    if product == world_size:
        return []
    shown = ",".join(f"{axis}{size}" for axis, size in default(world_size).items() if size > 1) or "dp1"
    return [
        f"LAB_MESH={mesh!r} takes {product} ranks, and WORLD_SIZE={world_size}: set WORLD_SIZE={product}, or {shown}"
    ]


def of_experts(mesh: str) -> str:
    """The run that shows the axes of experts in LAB_MESH: it knows no stages and no positions."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}
    grid = {axis: sizes[axis] for axis in ("dp", "ep", "tp") if axis in sizes}
    named = ",".join(f"{axis}{ranks}" for axis, ranks in grid.items())
    return f"RUN_MODE=moe WORLD_SIZE={math.prod(grid.values())} LAB_MESH={named} make run"


def axes(config: Config) -> dict[str, int]:
    """Ranks along each axis of these settings, the innermost last."""
    return sizes_of(getattr(config.options, "mesh", ""), config.world_size)
