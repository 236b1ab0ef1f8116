"""LAB_MESH of experts: how many copies of them there are (dp), over how many ranks a copy's experts lie (ep), and over
how many each expert is cut (tp).

Rank = (dp·ep + place)·tp + part: tp sends most, so its ranks are neighbours. All else of the model is whole on every
rank, which has tokens of its own, whatever the grid of the experts is.
"""

import math
import re

from workers.config import Config

AXES = ("dp", "ep", "tp")
GRIDS = {"ep": {"ep"}, "ep_dp": {"dp", "ep"}, "ep_tp": {"ep", "tp"}, "ep_dp_tp": {"dp", "ep", "tp"}}  # the long axes


def proper_divisor(number: int) -> int:
    """The largest one below it; 1 of a prime."""
    return max((each for each in range(1, number) if number % each == 0), default=1)


def grids(config: Config) -> dict[str, dict[str, int]]:
    """Ranks along each axis in each variant: by LAB_MESH in that whose axes it names, in all others by WORLD_SIZE."""
    ranks, named = config.world_size, sizes_of(mesh_of(config))
    inner = proper_divisor(ranks)
    middle = proper_divisor(inner)
    found = {
        "naive": (ranks, 1, 1),
        "ep": (1, ranks, 1),
        "ep_dp": (ranks // inner, inner, 1),
        "ep_tp": (1, inner, ranks // inner),
        "ep_dp_tp": (ranks // inner, middle, inner // middle),
        "ep_torch": (1, ranks, 1),
    }
    made = {name: dict(zip(AXES, sizes, strict=True)) for name, sizes in found.items()}
    return made | {name: named for name, axes in GRIDS.items() if axes == long(named)}


def mesh_of(config: Config) -> str:
    """LAB_MESH; empty where it is unset, or a strategy of one's own is run beside another mode's."""
    named: str = getattr(config.options, "mesh", "")
    return named


def sizes_of(mesh: str) -> dict[str, int]:
    """Ranks along each axis; one where it is not named."""
    return dict.fromkeys(AXES, 1) | {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}


def long(sizes: dict[str, int]) -> set[str]:
    """The axes of more than one rank."""
    return {axis for axis, ranks in sizes.items() if ranks > 1}


def misfit(mesh: str, world_size: int) -> list[str]:
    """Sentences why LAB_MESH is no grid of experts on WORLD_SIZE ranks."""
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d{0,4})", part.strip()) for part in mesh.split(",")] if mesh else []
    names = [match[1] for match in parts if match]
    if None in parts or names != [axis for axis in AXES if axis in names]:
        return [
            f"LAB_MESH={mesh!r} is no grid of experts: allowed are dp, ep and tp, in this order, each once and with its"
            " ranks, as dp2,ep2; pp and cp are axes of RUN_MODE=mesh"
        ]
    sizes = sizes_of(mesh)
    if mesh and math.prod(sizes.values()) != world_size:
        product = math.prod(sizes.values())
        return [f"LAB_MESH={mesh!r} takes {product} ranks, and WORLD_SIZE={world_size}: set WORLD_SIZE={product}"]
    if sizes["tp"] > 1 and sizes["ep"] == 1:
        return [f"LAB_MESH={mesh!r} cuts experts that lie on no ranks: give it an ep of 2 or more"]
    return []


def off_grid(config: Config) -> dict[str, str]:
    """The variants that have no grid here, each with the reason."""
    mesh, found = mesh_of(config), grids(config)
    made = {name: sizes_of(mesh) if mesh else found[name] for name in GRIDS}
    return {
        name: another(mesh, axes) if mesh else f"WORLD_SIZE={config.world_size} is no product of {len(axes)} factors"
        for name, axes in GRIDS.items()
        if axes != long(made[name]) and name != "ep"  # which takes all ranks, however many they are
    }


def another(mesh: str, axes: set[str]) -> str:
    """Why LAB_MESH is no grid of a variant with these axes."""
    wanted = " and ".join(axis for axis in AXES if axis in axes)
    return f"LAB_MESH={mesh} is another grid than it takes: {wanted} of two ranks or more, and nothing else"
