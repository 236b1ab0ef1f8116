"""LAB_MESH: the axes of the grid, from the outermost to the innermost, and how many ranks lie along each."""

import math
import re
from itertools import cycle

from workers.config import Config

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
