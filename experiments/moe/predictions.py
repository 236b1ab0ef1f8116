"""Predict the bytes and calls of a mixture of experts from what was routed, and the memory between two steps.

The number of rows that travel is known once they are routed. Before a run the prediction assumes even routing, and is
only shown; after the run each rank's prediction uses the routing of the counted step.
"""

import math
import re
from collections.abc import Mapping, Sequence

from distlab.contract import ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload.experts import Mixing, MixtureModel, outline_mixture
from distlab.lab.workload.user_model import is_own, is_step
from distlab.techniques.collectives.costs import (
    Cost,
    all_gather_bytes,
    all_reduce_cost,
    half_messages,
    total_cost,
)
from distlab.techniques.data_parallel.costs import bucket_bytes
from distlab.techniques.expert_parallel.layer import Placement
from distlab.techniques.sharded import costs as sharded_costs
from distlab.techniques.sharded.costs import whole_rest

# LAB_MESH of experts: the number of copies (dp), of ranks that share out a copy's experts (ep), and of ranks that each
# hold a part of an expert (tp).
#
# Rank = (dp·ep + place)·tp + part: tp sends most, so its ranks are neighbours. Whatever the grid, every rank holds the
# rest of the model whole, and has its own tokens.

AXES = ("dp", "ep", "tp")
GRIDS = {"ep": {"ep"}, "ep_dp": {"dp", "ep"}, "ep_tp": {"ep", "tp"}, "ep_dp_tp": {"dp", "ep", "tp"}}  # the long axes


def proper_divisor(number: int) -> int:
    """Return the largest divisor below `number`; 1 for a prime."""
    return max((each for each in range(1, number) if number % each == 0), default=1)


def grids(config: Config) -> dict[str, dict[str, int]]:
    """Return the ranks along each axis in each variant: LAB_MESH's where it fits, in all others from WORLD_SIZE."""
    ranks, named = config.world_size, sizes_of(mesh_of(config))
    inner = proper_divisor(ranks)
    middle = proper_divisor(inner)
    found = {
        "replicated": (ranks, 1, 1),
        "ep": (1, ranks, 1),
        "ep_dp": (ranks // inner, inner, 1),
        "ep_tp": (1, inner, ranks // inner),
        "ep_dp_tp": (ranks // inner, middle, inner // middle),
        "ep_torch": (1, ranks, 1),
        "plain": (1, ranks, 1),
    }
    by_axis = {name: dict(zip(AXES, sizes, strict=True)) for name, sizes in found.items()}
    return by_axis | {name: named for name, axes in GRIDS.items() if axes == long(named)}


def mesh_of(config: Config) -> str:
    """Return LAB_MESH; empty where it is unset, or where a user's strategy runs beside another mode's."""
    named: str = getattr(config.options, "mesh", "")
    return named


def sizes_of(mesh: str) -> dict[str, int]:
    """Return the ranks along each axis; 1 where it is not named."""
    return dict.fromkeys(AXES, 1) | {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", mesh)}


def long(sizes: dict[str, int]) -> set[str]:
    return {axis for axis, ranks in sizes.items() if ranks > 1}


def misfit(mesh: str, world_size: int) -> list[str]:
    """Say why LAB_MESH is no grid of experts on WORLD_SIZE ranks; empty if it is one."""
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d{0,4})", part.strip()) for part in mesh.split(",")] if mesh else []
    names = [match[1] for match in parts if match]
    if None in parts or names != [axis for axis in AXES if axis in names]:
        return [
            f"LAB_MESH={mesh!r} is no grid of experts, allowed: dp, ep and tp in this order, each once and with its"
            " number of ranks, as dp2,ep2; pp and cp are axes of RUN_MODE=mesh"
        ]
    sizes = sizes_of(mesh)
    if mesh and math.prod(sizes.values()) != world_size:
        product = math.prod(sizes.values())
        return [f"LAB_MESH={mesh!r} takes {product} ranks, but WORLD_SIZE={world_size}: set WORLD_SIZE={product}"]
    if sizes["tp"] > 1 and sizes["ep"] == 1:
        return [f"LAB_MESH={mesh!r} cuts experts over tp without spreading them over ep: add an ep of 2 or more"]
    return []


def without_grid(config: Config) -> dict[str, str]:
    """Return the variants that have no grid with these settings, each with the reason."""
    mesh, found = mesh_of(config), grids(config)
    grid_of = {name: sizes_of(mesh) if mesh else found[name] for name in GRIDS}
    return {
        name: other_grid(mesh, axes)
        if mesh
        else f"WORLD_SIZE={config.world_size} is not a product of {len(axes)} factors"
        for name, axes in GRIDS.items()
        if axes != long(grid_of[name]) and name != "ep"  # which takes any number of ranks
    }


def other_grid(mesh: str, axes: set[str]) -> str:
    """Say why LAB_MESH is no grid of a variant with these axes."""
    wanted = " and ".join(axis for axis in AXES if axis in axes)
    return f"LAB_MESH={mesh} does not fit this variant: it takes {wanted} of two ranks or more, and no other axis"


# The places of experts, and the bytes of tokens that travel to experts and back.
#
# A batch has T tokens on all N ranks. Each chooses k of E experts, and is a row of D numbers. Sources: Lepikhin et al.
# 2020, "GShard", section 2.2 (places); Fedus et al. 2021, "Switch Transformers", section 5.5 (bytes).


def expert_places(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Return C = ceil(factor·k·T/E), the choices that an expert takes; with factor 0 one of every token."""
    if not factor:
        return num_tokens
    return math.ceil(factor * top_k * num_tokens / num_experts)


def row_bytes(sent: int, received: int, width: int, itemsize: int = 4) -> int:
    """Return what a rank sends for rows that it gives to other ranks and takes from them: 2D(given + taken) numbers.

    Forward it sends the rows that it gives, and the results of those that it took; backward the gradients of both.
    """
    return 2 * (sent + received) * width * itemsize


def even_row_bytes(world_size: int, num_tokens: int, top_k: int, width: int, itemsize: int = 4) -> float:
    """Return the same for even routing and equally many experts per rank: 4(N-1)/N x k·T/N·D numbers."""
    away = top_k * num_tokens / world_size * (world_size - 1) / world_size
    return 4 * away * width * itemsize


Admitted = Sequence[Sequence[int]]  # [n][E]: the rows of each rank for each expert
NUMBER_BYTES = 8  # of one in the table of what is wanted, and of the norm


def placements(config: Config, mixing: Mixing) -> dict[str, Placement]:
    """Return which rank holds which experts in each variant."""
    return {
        name: Placement.spread(mixing.num_experts, 4 * config.width, copies=sizes["dp"], ep=sizes["ep"], tp=sizes["tp"])
        for name, sizes in grids(config).items()
    }


def predict(config: Config, mixing: Mixing, routed: Mapping[str, Sequence[Admitted]] | None = None) -> list[Prediction]:
    """Predict bytes and calls of one step of each variant, and bytes between two steps, per rank.

    `routed` has what each layer admitted of each microbatch in a variant's step; without it routing is taken as even.
    """
    model = outline_mixture(config, mixing)
    predictions = []
    for name, placement in placements(config, mixing).items():
        layers = routed.get(name) if routed is not None else None
        shown = PYTORCHS if name == "ep_torch" else ""
        reason = "" if layers is not None or name == "replicated" else "assumes even routing"
        if routed is None or layers is not None:
            admitted = layers or [evenly(config, mixing)] * len(model.mixtures) * config.num_microbatches
            predictions += traffic(name, config, mixing, placement, model, admitted, shown or reason)
        predictions.append(at_rest(name, config, placement, model, shown))
    return predictions


def evenly(config: Config, mixing: Mixing) -> list[list[int]]:
    """Return the rows of each rank for each expert in a microbatch, with even routing."""
    tokens = config.batch // config.num_microbatches * (config.seq if config.model == "gpt" else 1)
    each = tokens * mixing.top_k // (config.world_size * mixing.num_experts)
    return [[each] * mixing.num_experts for _ in range(config.world_size)]


def traffic(
    name: str, config: Config, mixing: Mixing, placement: Placement, model: MixtureModel, layers: Sequence[Admitted],
    shown: str,
) -> list[Prediction]:  # fmt: skip
    """Predict the traffic: rows there and back, forward and backward, routing tables, and gradients that are summed."""
    ranks, itemsize = config.world_size, config.itemsize
    table = ranks * mixing.top_k * mixing.num_experts * NUMBER_BYTES
    costs = []
    for rank in range(ranks):
        sums = summed_buckets(name, config, placement, model, rank)
        if config.clip is not None and name != "replicated":  # where every rank has all gradients, and so their norm
            sums.append((ranks, NUMBER_BYTES))
        sent, received, sends = map(sum, zip(*(travels(placement, rank, admitted) for admitted in layers), strict=True))
        table_cost = all_gather_bytes("gloo", ranks, table), 1, half_messages("gloo", "all_gather", ranks, table)
        calls = 4 * len(layers) if name == "plain" else 2 * sends  # an all_to_all each way, or a message per rank
        rows = Cost(row_bytes(sent, received, config.width, itemsize), calls, 2 * sends)
        reduced = (all_reduce_cost(number, size) for number, size in sums)
        costs.append(total_cost(rows, Cost(*table_cost).times(len(layers)), *reduced))
    formula = "2(N-1)/N x S" if name == "replicated" else "2(N-1)/N x S' + 2D(rows sent + received)"
    return of_a_step(name, formula, costs, shown, "" if shown else "messages, tables, buckets")


def summed_buckets(
    name: str, config: Config, placement: Placement, model: MixtureModel, rank: int
) -> list[tuple[int, int]]:
    """Return (number of ranks, bytes) of each bucket of gradients that is summed."""
    ranks = config.world_size
    if name == "replicated":  # everything in the same buckets
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return [(ranks, size) for size in bucket_bytes(config, sizes)]
    sums = [(ranks, size) for size in bucket_bytes(config, dense_sizes(model))]
    if placement.copies > 1:
        own_sizes = [size for size in expert_sizes(placement, model, rank) if size]
        sums += [(placement.copies, size) for size in bucket_bytes(config, own_sizes)]
    return sums


def travels(placement: Placement, rank: int, admitted: Admitted) -> tuple[int, int, int]:
    """Count the rows that `rank` gives to and takes from other ranks in one layer, and the messages for them."""
    others = [member for member in placement.members(rank) if member != rank]
    sent = [sum(admitted[rank][expert] for expert in placement.experts_of(other)) for other in others]
    received = [sum(admitted[other][expert] for expert in placement.experts_of(rank)) for other in others]
    return sum(sent), sum(received), sum(rows > 0 for rows in sent + received)


def dense_sizes(model: MixtureModel) -> list[int]:
    """Return the size of each trained parameter that every rank holds whole, in the order of the model."""
    return [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".experts." not in name and parameter.requires_grad
    ]


def expert_sizes(placement: Placement, model: MixtureModel, rank: int) -> list[int]:
    """Return the size of the part that `rank` holds of each parameter of experts."""
    return [
        dense[placement.box(name.rpartition(".")[2], rank)].numel()
        for name, dense in model.named_parameters()
        if ".experts." in name
    ]


def more_parameters(config: Config, experts: int) -> float:
    """Count the parameters that experts and routers add in place of the layers' MLPs."""
    width, layers = float(config.width), float(config.depth)
    return layers * (experts * (8 * width**2 + width) - 8 * width**2 - 5 * width)


def at_rest(name: str, config: Config, placement: Placement, model: MixtureModel, shown: str) -> Prediction:
    """Predict the bytes at rest: weights, gradients and optimizer state of a rank's experts and of everything else."""
    untrained = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    value = []
    for rank in range(config.world_size):
        sizes = dense_sizes(model) + expert_sizes(placement, model, rank)
        nbytes, each = whole_rest(config, sizes)
        value.append(nbytes + untrained * config.itemsize)
    parameters = "P" if name == "replicated" else "parameters of the rank"
    return sharded_costs.at_rest(name, config, f"{each} x {parameters}", value, shown)


# Settings that a mixture of experts cannot run.


def refuse(config: Config, experts: int, top_k: int) -> list[str]:
    """Refuse models without an MLP of the lab's, more choices than experts, and settings that make no batch."""
    if config.model == "line" or is_own(config.model):
        hint = "; a model with its own experts runs in dp and fsdp, and `distlab prove` checks how you distribute them"
        where = hint if is_own(config.model) else ""
        return [
            f"LAB_MODEL={config.model!r} has no MLP of the lab that experts could replace, allowed: mlp, gpt{where}"
        ]
    faults = misfit(mesh_of(config), config.world_size)
    if top_k > experts:
        faults.append(f"LAB_TOP_K={top_k} is more than LAB_EXPERTS={experts}, allowed: 1 to {experts}")
    faults += [
        f"LAB_VARIANT={name!r} is a step of one replica, which would route its tokens without those of other ranks:"
        " write a strategy of (model, mesh, config) that calls distribute() of"
        " distlab/techniques/expert_parallel/strategy.py first"
        for name in filter(is_own, config.variant)
        if is_step(name)
    ]
    return faults + untrainable(config)


def cannot(config: Config) -> dict[str, str]:
    """Return the variants that cannot run with these ranks or this backend, and why."""
    reason = "gloo cannot send rows from a GPU: set LAB_BACKEND=nccl"
    return without_grid(config) | ruled_out(((*GRIDS, "ep_torch"), config.gloo_on_gpus, reason))
