"""The predicted contents of a rank of the mesh: its position in the grid, its stage, and its slice of each parameter.

This uses only the dense model's outline and the papers' rules, not the code that slices and cuts in a run.
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
REPLICATED = ("dp", "cp")  # along these all ranks have the same parameters


class How(NamedTuple):
    """The techniques that a variant combines, and a sentence on it."""

    sentence: str
    rows: bool = False  # sequence parallelism, if there is a text and a tp
    zero: int = 0
    plain: bool = False  # gpt's ends on every rank of a slice, and gradients summed one by one
    swaps: bool = False  # exchanges positions for heads along cp (Ulysses), instead of passing keys around

    @property
    def cut(self) -> Callable[[int, int], Positions]:
        """Return the rule for which rank along cp has which positions."""
        return contiguous if self.swaps else zigzag


HOW = {
    "1f1b": How("One stage per rank, backward passes as early as possible, and gradients in buckets."),
    "sequence": How(
        "Sequence parallelism: each rank has its rows between the slices, and between the stages.", rows=True
    ),
    "zero1": How("Optimizer state is sharded.", rows=True, zero=1),
    "zero2": How("Optimizer state and gradients are sharded.", rows=True, zero=2),
    "zero3": How("Optimizer state, gradients and weights are sharded.", rows=True, zero=3),
    "ulysses": How("Ranks along cp exchange positions for heads, and back.", swaps=True),
    "plain": How(
        "The lesson on one page: 1f1b with plain messages, and both ends of the model on every rank of a slice.",
        plain=True,
    ),
}


class Local(NamedTuple):
    """A parameter on a rank."""

    name: str
    numel: int  # of this rank's slice
    whole: bool  # every rank of a slice has all of it
    shared: bool  # by the first and the last stage, if they differ


class Rank:
    """Rank `rank` of a grid of `sizes`, in a variant built as `how` describes."""

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
        """Return the number of ranks with the same part of the model, but other samples or positions."""
        return self.d * self.c

    @property
    def replica(self) -> int:
        """Return this rank's index among them, in the order of the grid."""
        place = 0
        for axis in (axis for axis in self.sizes if axis in REPLICATED):
            place = place * self.sizes[axis] + self.at[axis]
        return place

    @property
    def replicated(self) -> str:
        """Return the axis or axes along which they differ: the name of their group."""
        return "_".join(axis for axis in REPLICATED if self.sizes[axis] > 1) or "dp"

    @property
    def num_blocks(self) -> int:
        """Return the number of this rank's layers that are not gpt's ends."""
        return len(self.layers) - (self.is_first + self.is_last) * self.is_gpt

    @property
    def is_first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def is_last(self) -> bool:
        return self.at["pp"] == self.p - 1

    def own_rows(self) -> int:
        """Return the positions that this rank has of each sample between two slices, of its part along cp."""
        return partition_sizes(self.seq, self.t)[self.at["tp"]] if self.rows else self.seq

    @cached_property
    def units(self) -> list[list[Local]]:
        """Return the parameters of its stage by layer; tied ends are one unit, and a separate one if on two stages."""
        layers = outline(self.config).layers
        tied = self.config.tie and self.is_gpt
        found = {index: list(self.layer_parameters(layers[index])) for index in self.layers}
        if tied and self.p == 1:
            last = found.pop(len(layers) - 1)
            found[0] += [local for local in last if local.name != "project.weight"]
        shared = [local for parameters in found.values() for local in parameters if local.shared]
        return [[local for local in parameters if not local.shared] for parameters in found.values()] + [shared] * bool(
            shared
        )

    @property
    def uneven(self) -> bool:
        """Return whether ranks of a slice have different numbers of parameters."""
        names = [name for name, _ in outline(self.config).named_parameters()]
        counts = {self.units_of(name.split(".", 2)[-1])[1] for name in names}
        return any(count > 1 and count % self.t for count in counts)

    def layer_parameters(self, layer: nn.Module) -> Iterator[Local]:
        """Yield the parameters of one layer, in the order of the model."""
        shared = self.config.tie and self.is_gpt and self.p > 1
        for name, parameter in layer.named_parameters():
            count, total = self.units_of(name)
            numel = parameter.numel() * count // total
            yield Local(name, numel, count == total, shared and name in BY_VOCABULARY)

    def units_of(self, name: str) -> tuple[int, int]:
        """Return this rank's units of a parameter, and the total: heads, hidden units or vocabulary rows."""
        units = {BY_HEADS: self.config.heads, BY_UNITS: 4 * self.config.width}
        units |= {} if self.how.plain else {BY_VOCABULARY: VOCABULARY}
        count = next((units[names] for names in units if name in names), 1)
        return (partition_sizes(count, self.t)[self.at["tp"]] if count > 1 else 1), count


def at(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the index of a rank along each axis; the last axis is the innermost."""
    place = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


# LAB_MESH: the axes of the grid, from outermost to innermost, and the ranks along each.

AXES = ("pp", "dp", "cp", "tp")  # the default order; tp sends most, so its ranks are neighbours
DEFAULT_AXES = ("dp", "tp", "pp")  # receive the factors of WORLD_SIZE in turn if LAB_MESH is unset; cp needs a text


def sizes_of(mesh: str, world_size: int) -> dict[str, int]:
    """Return the ranks along each axis, in grid order; a missing axis is one rank long."""
    if not mesh:
        return default(world_size)
    named = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}
    return named | {axis: 1 for axis in AXES if axis not in named}


def default(world_size: int) -> dict[str, int]:
    """Distribute the prime factors of WORLD_SIZE over the axes in turn, largest first: 8 is dp2, tp2, pp2."""
    sizes = dict.fromkeys(AXES, 1)
    for axis, factor in zip(cycle(DEFAULT_AXES), sorted(factors(world_size), reverse=True), strict=False):
        sizes[axis] *= factor
    return sizes


def factors(number: int) -> list[int]:
    """Return its prime factors; none for 1."""
    for divisor in range(2, math.isqrt(number) + 1):
        if number % divisor == 0:
            return [divisor, *factors(number // divisor)]
    return [number] if number > 1 else []


def misfit(mesh: str, world_size: int) -> list[str]:
    """Return errors if LAB_MESH is no grid of WORLD_SIZE ranks."""
    parts = mesh.split(",") if mesh else []
    found = [re.fullmatch(r"([a-z]+)([1-9]\d{0,4})", part.strip()) for part in parts]
    names = [match[1] for match in found if match]
    if "ep" in names:
        return [f"LAB_MESH={mesh!r}: a mesh has no experts, RUN_MODE=moe has: {experts_command(mesh)}"]
    if None in found or not set(names) <= set(AXES) or len(set(names)) < len(names):
        return [
            f"LAB_MESH={mesh!r} is no mesh, allowed: dp, cp, tp and pp, each once and with its number of ranks, as"
            " dp2,tp2,pp2"
        ]
    product = math.prod(sizes_of(mesh, world_size).values())
    if product == world_size:
        return []
    shown = ",".join(f"{axis}{size}" for axis, size in default(world_size).items() if size > 1) or "dp1"
    return [
        f"LAB_MESH={mesh!r} takes {product} ranks, but WORLD_SIZE={world_size}: set WORLD_SIZE={product}, or {shown}"
    ]


def experts_command(mesh: str) -> str:
    """Return the command that shows LAB_MESH's axes of experts: without stages and positions."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}
    grid = {axis: sizes[axis] for axis in ("dp", "ep", "tp") if axis in sizes}
    named = ",".join(f"{axis}{ranks}" for axis, ranks in grid.items())
    return f"RUN_MODE=moe WORLD_SIZE={math.prod(grid.values())} LAB_MESH={named} make run"


def axes(config: Config) -> dict[str, int]:
    """Return the ranks along each axis of these settings, the innermost last."""
    return sizes_of(getattr(config.options, "mesh", ""), config.world_size)
