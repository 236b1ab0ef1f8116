"""What sharded data parallelism predicts before it runs: bytes sent and held, and calls."""

from typing import Any

import torch

from workers.config import Config
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.collectives import algorithmic_factor, all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.sharding import fully_shard_bytes, rest_bytes, zero_bytes
from workers.workload.model import outline

BY_HAND = {"naive": 3, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_kept": 3}  # by stage


def tied(config: Config) -> bool:
    """Whether the first and the last layer share a weight, and so are one unit."""
    return config.tie and config.model == "gpt"


def units(config: Config) -> tuple[int, ...]:
    """Parameters of each flat unit: a layer, and one of both ends where LAB_TIE makes them share a weight."""
    layers = list(outline(config).layers)
    if tied(config):
        first, *blocks, last = layers
        groups = [[first, last], *([block] for block in blocks)]
    else:
        groups = [[layer] for layer in layers]
    return tuple(sum(p.numel() for p in {p for layer in group for p in layer.parameters()}) for group in groups)


def chunks(config: Config) -> list[int]:
    """Parameters in a rank's chunk of each unit, padding included: what is sent is of one size."""
    return [-(-numel // config.world_size) for numel in units(config)]


def owned(config: Config, rank: int) -> int:
    """Parameters that `rank` owns of all units."""
    return sum(
        max(0, min(chunk, numel - rank * chunk)) for numel, chunk in zip(units(config), chunks(config), strict=True)
    )


def predict(config: Config, *, reshard: bool) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    named = [name for name in BY_HAND if name != "zero3_kept" or config.recompute]
    staged = [by_stage(config, name, gathers=2 if reshard else 1) for name in named if name != "naive"]
    sent = [naively(config), *staged, by_torch(config, gathers=2 if reshard else 1)]
    return sent + [at_rest(config, name) for name in [*named, "fsdp2"]]


def naively(config: Config) -> Prediction:
    """Of every layer two gathers and an all_reduce, which moves as much as two more, in each microbatch."""
    ranks, parts = config.world_size, config.num_microbatches
    itemsize: int = getattr(torch, config.dtype).itemsize
    moved = chunks(config)
    moved += moved[:1] * tied(config)  # both ends move the unit that they share
    norm_bytes, norm_messages, norm_calls = clipping(config)
    total = 4 * parts * algorithmic_factor("all_gather", ranks) * ranks * sum(moved) * itemsize + norm_bytes
    calls = 3 * parts * len(moved) + norm_calls
    gathered = 2 * 2 * (ranks - 1) * len(moved)
    summed = sum(gloo_all_reduce_messages(ranks, ranks * chunk * itemsize) for chunk in moved)
    messages = (parts * (gathered + summed) + norm_messages,) * ranks
    formula = f"{4 * parts}(N-1)/N x S"
    return Prediction("naive", "wire bytes", "B", formula, (total,) * ranks, calls, messages=messages)


def clipping(config: Config) -> tuple[float, int, int]:
    """Bytes, messages and calls of the global norm, with LAB_CLIP: one number in float64."""
    if config.clip is None:
        return 0.0, 0, 0
    ranks = config.world_size
    return all_reduce_bytes("gloo", ranks, 8), gloo_all_reduce_messages(ranks, 8), 1


def by_stage(config: Config, name: str, gathers: int) -> Prediction:
    """The moves of ours: every rank sends the same."""
    ranks, parts, stage = config.world_size, config.num_microbatches, BY_HAND[name]
    itemsize: int = getattr(torch, config.dtype).itemsize
    total, messages, calls = clipping(config)
    for index, chunk in enumerate(chunks(config)):
        times = 1 if index == 0 and tied(config) else gathers  # a shared unit stays from its first use to its last
        total += zero_bytes(stage, ranks, ranks * chunk * itemsize, parts, times)
        moves = {1: 2, 2: parts + 1, 3: parts * (times + 1)}[stage]
        calls += moves * (1 if config.backend == "nccl" else ranks - 1)
        messages += moves * (ranks - 1)
    times = {1: 2, 2: parts + 1, 3: parts * (gathers + 1)}[stage]
    formula = f"{times}(N-1)/N x S"
    return Prediction(name, "wire bytes", "B", formula, (total,) * ranks, calls, messages=(messages,) * ranks)


def by_torch(config: Config, gathers: int) -> Prediction:
    """fully_shard's: gathers as zero3's, and sums as the backend has them."""
    ranks, parts = config.world_size, config.num_microbatches
    itemsize: int = getattr(torch, config.dtype).itemsize
    total = fully_shard_bytes(ranks, sum(units(config)) * itemsize, parts, gathers, config.backend)
    moves = parts * (gathers + (2 if config.backend == "gloo" else 1))
    wrapped = len(outline(config).layers) - (config.model == "gpt")  # both ends are one unit
    calls = parts * (gathers + 1) * wrapped
    return Prediction("fsdp2", "wire bytes", "B", f"{moves}(N-1)/N x S", (total,) * ranks, calls, PYTORCHS)


def at_rest(config: Config, name: str) -> Prediction:
    """Weights, gradients and optimizer state of what a rank owns; whole units and chunks have their padding too."""
    ranks, stage, total = config.world_size, BY_HAND.get(name, 3), sum(units(config))
    adam, masters = config.optimizer == "adamw", config.dtype == "bfloat16" and name in BY_HAND
    itemsize = 4 if config.dtype == "bfloat16" and name == "fsdp2" else getattr(torch, config.dtype).itemsize
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
    value = tuple(padded["parameters"] + gradients[rank] + owns[rank]["optimizer"] for rank in range(ranks))
    remembered = 2 * adam * (4 if masters else itemsize) + 4 * masters
    formula = {
        1: f"({2 * itemsize} + {remembered}/N) x P" if remembered else f"{2 * itemsize} x P",
        2: f"({itemsize} + {itemsize + remembered}/N) x P",
        3: f"{2 * itemsize + remembered}/N x P",
    }[stage]
    return Prediction(name, "rest bytes", "B", formula, value, 0, "" if name in BY_HAND else PYTORCHS)


def summary(config: Config) -> str:
    """One line of what is kept."""
    total, zero3 = outline(config).num_parameters(), at_rest(config, "zero3")
    everything = at_rest(config.model_copy(update={"world_size": 1}), "zero3").value[0]
    return (
        f"{total / 1e6:.3g}M parameters: dp would hold {everything / 1e6:.3g} MB on every rank at rest, zero3 holds "
        f"{zero3.formula} = {max(zero3.value) / 1e6:.3g} MB"
    )


def holds(config: Config, rank: int) -> str:
    """What a rank owns, for its own log."""
    return f"holds      {owned(config, rank)} of {outline(config).num_parameters()} parameters"


def published() -> tuple[str, list[str], list[list[str]]]:
    """The table of the ZeRO paper (figure 1), which holds for half precision, in GB a rank; and what 7 billion take."""
    columns = ["", "GB of 7.5B parameters on 64 ranks", "of 7B parameters on 1, 8, 64"]
    rows = []
    for stage, name in enumerate(["dp", "zero1", "zero2", "zero3"]):
        cases = [(7.5e9, 64), (7e9, 1), (7e9, 8), (7e9, 64)]
        sizes = [sum(rest_bytes(stage, p, p / n, itemsize=2, masters=True).values()) / 1e9 for p, n in cases]
        rows.append([name, f"{sizes[0]:.3g}", ", ".join(f"{size:.3g}" for size in sizes[1:])])
    return "Adam in mixed precision: 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter", columns, rows
