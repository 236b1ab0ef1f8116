"""Predict the bytes that sharded data parallelism sends and holds, and its calls."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from distlab.contract import Measured
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.verify.counted import predicted_peaks
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import (
    Cost,
    algorithmic_factor,
    gloo_all_reduce_messages,
    norm_cost,
)
from distlab.techniques.data_parallel.costs import gradients_cost
from distlab.techniques.sharded import costs as sharded_costs
from distlab.techniques.sharded.costs import (
    PassEvent,
    Replicated,
    Sharding,
    Units,
    adamw_scratch_bytes,
    fully_shard_bytes,
    pass_peak,
    rest_bytes,
    whole_rest,
    whole_rest_bytes,
    zero_bytes,
)
from distlab.techniques.sharded.flat_parameter import pad_microbatches

BY_HAND = {"dp": 0, "zero3_blocking": 3, "zero1": 1, "zero2": 2, "zero3": 3}  # by stage
BLOCKING = ("zero3_blocking", "plain")  # a layer at a time


def tied(config: Config) -> bool:
    """Whether the first and the last layer share a weight, and therefore are one unit."""
    return config.tie and config.model == "gpt"


def flat_units(config: Config) -> Units:
    """Return the flat units: one per layer, and one for both ends where LAB_TIE makes them share a weight."""
    layers = outline(config).layers
    found, seen = Units([], {}, {}), set[nn.Parameter]()
    for index, layer in enumerate(layers):
        is_tied = tied(config) and index == len(layers) - 1
        unit = found.of_layer[index] = 0 if is_tied else index
        found.numels.extend([] if is_tied else [0])
        for name, parameter in layer.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                found.numels[unit] += parameter.numel()
                found.of_name[f"{index}.{name}"] = unit
    return found


def units(config: Config) -> tuple[int, ...]:
    """Return the number of parameters of each unit."""
    return tuple(flat_units(config).numels)


def chunks(config: Config) -> list[int]:
    """Return the size of a rank's chunk of each unit, with padding: all ranks send equally many numbers."""
    return flat_units(config).chunks(config.world_size)


def owned(config: Config, rank: int) -> int:
    """Count the parameters that `rank` owns in all units."""
    return sum(flat_units(config).own(rank, config.world_size))


CALLS = "gathers and sums of all units, or buckets"


def predict(config: Config, *, reshard: bool) -> list[Prediction]:
    """Predict bytes and calls of one step of each variant, and the memory between two steps, per rank."""
    named, parts = list(BY_HAND), config.num_microbatches
    gathers, found = 2 if reshard else 1, list[Prediction]()
    for name in named:
        if name == "dp":  # an all_reduce of each bucket; every rank has all gradients, and so their norm
            cost, moves = gradients_cost(config), 2
        else:
            cost = blocking_cost(config) if name == "zero3_blocking" else by_stage(config, BY_HAND[name], gathers)
            moves = 4 * parts if name == "zero3_blocking" else count_moves(BY_HAND[name], parts, gathers)
        found += of_a_step(name, f"{moves}(N-1)/N x S", [cost] * config.world_size, of_calls=CALLS)
    found += of_a_step("plain", f"{3 * parts}(N-1)/N x S", [plain_cost(config)] * config.world_size, of_calls=CALLS)
    return [*found, by_torch(config, gathers), *(at_rest(config, name) for name in [*named, "fsdp2"])]


def count_moves(stage: int, microbatches: int, gathers: int) -> int:
    """Count how often all parameters are summed or gathered in a step."""
    return {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[stage]


def blocking_cost(config: Config) -> Cost:
    """Return the cost of two gathers and an all_reduce, which moves as much as two more, per layer and microbatch."""
    ranks, parts, norm = config.world_size, config.num_microbatches, norm_cost(config.world_size, config.clip)
    moved = chunks(config)
    moved += moved[:1] * tied(config)  # both ends move their shared unit
    total = 4 * parts * algorithmic_factor("all_gather", ranks) * ranks * sum(moved) * config.itemsize + norm.nbytes
    gathered = 2 * 2 * (ranks - 1) * len(moved)
    summed = sum(gloo_all_reduce_messages(ranks, ranks * chunk * config.itemsize) for chunk in moved)
    return Cost(total, 3 * parts * len(moved) + norm.calls, parts * (gathered + summed) + norm.messages)


def plain_cost(config: Config) -> Cost:
    """Return the cost with reduce_scatters in place of all_reduces."""
    ranks, parts, norm = config.world_size, config.num_microbatches, norm_cost(config.world_size, config.clip)
    moved, calls = ranks * sum(chunks(config)) * config.itemsize, 3 * parts * len(chunks(config))
    total = 3 * parts * algorithmic_factor("all_gather", ranks) * moved + norm.nbytes
    return Cost(total, calls + norm.calls, 2 * (ranks - 1) * calls + norm.messages)


def by_stage(config: Config, stage: int, gathers: int) -> Cost:
    """Return the cost of a stage of ours; every rank sends the same."""
    ranks, parts = config.world_size, config.num_microbatches
    total, calls, messages = norm_cost(ranks, config.clip)
    for index, chunk in enumerate(chunks(config)):
        gathers_of_unit = (
            1 if index == 0 and tied(config) else gathers
        )  # a shared unit stays gathered from its first use to its last
        total += zero_bytes(stage, ranks, ranks * chunk * config.itemsize, parts, gathers_of_unit)
        moves = count_moves(stage, parts, gathers_of_unit)
        calls += moves * min(ranks - 1, 1 if config.backend == "nccl" else ranks)
        messages += moves * (ranks - 1)
    return Cost(total, calls, messages)


def by_torch(config: Config, gathers: int) -> Prediction:
    """Predict fully_shard's bytes: it gathers as zero3 does, and sums by the backend's reduce_scatter."""
    ranks, parts = config.world_size, config.num_microbatches
    total = fully_shard_bytes(ranks, sum(units(config)) * config.itemsize, parts, gathers, config.backend)
    moves = parts * (gathers + (2 if config.backend == "gloo" else 1))
    wrapped = len(outline(config).layers) - (config.model == "gpt")  # both ends are one unit
    calls = parts * (gathers + 1) * wrapped
    return Prediction("fsdp2", "wire bytes", "B", f"{moves}(N-1)/N x S", (total,) * ranks, calls, PYTORCHS)


def at_rest(config: Config, name: str) -> Prediction:
    """Predict the bytes at rest: weights, gradients and optimizer state; whole units and chunks include padding."""
    ranks, stage, total = config.world_size, BY_HAND.get(name, 3), sum(units(config))
    if name == "dp":
        whole, each = whole_rest(config)
        return sharded_costs.at_rest(name, config, f"{each} x P", [whole])
    adam, masters = config.optimizer == "adamw", config.dtype == "bfloat16" and name in BY_HAND
    itemsize = 4 if config.dtype == "bfloat16" and name == "fsdp2" else config.itemsize
    like: dict[str, Any] = {
        "itemsize": itemsize,
        "moments": 2 * adam,
        "masters": masters,
        "num_tensors": adam * len(units(config)),
    }
    chunk = sum(chunks(config))
    padded = rest_bytes(stage, ranks * chunk, chunk, **like)
    owns = [rest_bytes(stage, total, owned(config, rank), **like) for rank in range(ranks)]
    gradients = [(padded if stage == 1 else own)["gradients"] for own in owns]
    value = [padded["parameters"] + gradients[rank] + owns[rank]["optimizer"] for rank in range(ranks)]
    state_bytes = 2 * adam * (4 if masters else itemsize) + 4 * masters
    formula = {
        1: f"({2 * itemsize} + {state_bytes}/N) x P" if state_bytes else f"{2 * itemsize} x P",
        2: f"({itemsize} + {itemsize + state_bytes}/N) x P",
        3: f"{2 * itemsize + state_bytes}/N x P",
    }[stage]
    return sharded_costs.at_rest(name, config, formula, value, "" if name in BY_HAND else PYTORCHS)


def summary(config: Config) -> str:
    total, zero3 = outline(config).num_parameters(), at_rest(config, "zero3")
    everything = at_rest(config.model_copy(update={"world_size": 1}), "zero3").value[0]
    return (
        f"{total / 1e6:.3g}M parameters: at rest dp would store {everything / 1e6:.3g} MB on every rank, zero3 stores "
        f"{zero3.formula} = {max(zero3.value) / 1e6:.3g} MB"
    )


def owned_parameters(config: Config, rank: int) -> str:
    """Describe what a rank owns, for its own log."""
    return f"{owned(config, rank)} of {outline(config).num_parameters()} parameters"


def published() -> tuple[str, list[str], list[list[str]]]:
    """Return the table of the ZeRO paper (figure 1), in half precision, in GB per rank; and the same for 7 billion."""
    columns = ["", "GB of 7.5B parameters on 64 ranks", "of 7B parameters on 1, 8, 64"]
    rows = []
    for stage, name in enumerate(["dp", "zero1", "zero2", "zero3"]):
        cases = [(7.5e9, 64), (7e9, 1), (7e9, 8), (7e9, 64)]
        sizes = [sum(rest_bytes(stage, p, p / n, itemsize=2, masters=True).values()) / 1e9 for p, n in cases]
        rows.append([name, f"{sizes[0]:.3g}", ", ".join(f"{size:.3g}" for size in sizes[1:])])
    return "Adam in mixed precision: 2 + 2 + 4 + 4 + 4 = 16 bytes per parameter", columns, rows


# Predict the most that a rank holds in a step: the rules of ZeRO, applied to one process's passes.
#
# zero1 to 3      by distlab/techniques/sharded/costs.py
# zero3_blocking  as stage 3, with nothing gathered ahead: a layer is recomputed, and its gradients are in memory twice
#                 while they are summed
# optimizer       of the rank's shards; in 16 bits with float32 masters, whose float32 gradients exist in the update

ONE = "a layer whole, its gradients whole while they are summed, a layer of scratch"
TWO = f"two layers whole{ONE.removeprefix('a layer whole')}"
TERMS = {
    "dp": "weights + gradients + optimizer",
    **dict.fromkeys(BLOCKING, f"shards + {ONE.rpartition(',')[0]}"),
    "zero1": "weights + gradients + a shard of the optimizer + a layer of scratch",
    "zero2": f"weights + shards{ONE.removeprefix('a layer whole')}",
    "zero3": f"shards + {TWO}",
}


def memory_of(name: str, config: Config, rank: int, *, reshard: bool) -> Sharding:
    """Return what a rank of variant `name` holds in addition to the working memory of the passes."""
    stage, layout, ranks = BY_HAND.get(name, 3), flat_units(config), config.world_size
    constant_numel = sum(layout.chunks(ranks)) * (ranks if stage < 3 else 1)
    constant_numel += sum(layout.chunks(ranks)) * ranks if stage == 1 else 0  # gradients
    constant = constant_numel * config.itemsize + optimizer_bytes(config, rank)
    kind = {"zero3_blocking": BlockingSharding, "plain": PlainSharding}.get(name, Sharding)
    microbatches = config.num_microbatches
    return kind(stage, layout, rank, ranks, config.itemsize, constant, microbatches=microbatches, reshard=reshard)


class BlockingSharding(Sharding):
    """A layer is whole while it computes forward, and again while it is recomputed and summed."""

    fresh = 0  # numbers of a layer's gradients that are still autograd's own tensors
    flats = 1  # vectors of a layer's gradients in memory beside the shard's sum

    def after(self, event: PassEvent) -> Iterator[float]:
        kind, unit = event.kind, self.unit_of.get(event.layer, -1)
        if kind == "batch":
            self.summed = set()
        elif kind in ("layer", "output"):
            self.whole = {unit}
        elif kind == "layer_end":
            self.whole = set()
        elif kind == "delivered":
            self.fresh += event.numel
        elif kind == "layer_gradients":
            # The flat gradients too, then the shard's.
            yield self.stored_bytes() + (self.chunks[unit] * self.ranks + self.fresh) * self.itemsize
            self.fresh = 0
            self.summed.add(unit)
            yield self.stored_bytes() + self.flats * self.chunks[unit] * self.ranks * self.itemsize
            self.whole = set()
        yield self.stored_bytes() + self.fresh * self.itemsize


class PlainSharding(BlockingSharding):
    """The same where an all_to_all needs one vector to send and one to receive."""

    flats = 2


def optimizer_bytes(config: Config, rank: int) -> float:
    """Return the bytes of optimizer state and master weights."""
    masters, adam = config.dtype == "bfloat16", config.optimizer == "adamw"
    number = (2 * adam * (4 if masters else config.itemsize) + 4 * masters) * owned(config, rank)
    return number + 4.0 * adam * len(units(config))


def peak_bytes(config: Config, rank: int, name: str, passes: list[PassEvent], *, reshard: bool) -> float:
    """Return the peak of variant `name`: the highest moment of its passes, or its update if that holds more."""
    if name == "dp":
        sizes = outline(config).sizes
        whole, adam = whole_rest_bytes(sizes, config), config.optimizer == "adamw"
        constant = whole["parameters"] + whole["optimizer"]
        replicated = Replicated(constant, whole["gradients"], config.itemsize, in_buckets=True)
        return max(
            pass_peak(passes, replicated), sum(whole.values()) + adam * adamw_scratch_bytes(sizes, config.itemsize)
        )
    memory = memory_of(name, config, rank, reshard=reshard)
    masters, adam = config.dtype == "bfloat16", config.optimizer == "adamw"
    update = at_rest(config, name).value[rank] + 4 * masters * owned(config, rank)
    update += adam * adamw_scratch_bytes(memory.own, 4 if masters else config.itemsize)
    return max(pass_peak(passes, memory), update)


def predict_peaks(lab: Lab, measured: Mapping[str, Measured], *, reshard: bool) -> list[Prediction]:
    """Predict the peak of each variant of ours; those in BLOCKING always recompute their layers."""
    return predicted_peaks(
        lab, measured, partial(peak_bytes, lab.config, lab.rank, reshard=reshard), TERMS.__getitem__,
        recompute=dict.fromkeys(BLOCKING, True), assign=partial(pad_microbatches, config=lab.config),
    )  # fmt: skip
