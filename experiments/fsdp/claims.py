"""What sharded data parallelism claims before it runs: bytes, calls, and the sizes that it cannot take."""

from typing import Any

import torch

from experiments.fsdp.faults import invisible
from workers.config import Config
from workers.measure.formulas import Prediction
from workers.measure.formulas.sharding import fully_shard_bytes, rest_bytes, zero_bytes
from workers.workload import data, model, text
from workers.workload.model import outline

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_kept": 3}


def title(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    faults = model.faults(config) + data.faults(config, config.world_size) + text.faults(config) + invisible(config)
    if config.offload and config.device != "cuda":
        faults.append("LAB_OFFLOAD=1 moves shards from the GPU's memory to the host's: it needs LAB_DEVICE=cuda")
    if "zero3_kept" in config.variant and not config.recompute:
        faults.append("LAB_VARIANT='zero3_kept' is zero3 without recomputation, to compare with: set LAB_RECOMPUTE=1")
    return faults


def units(config: Config) -> list[int]:
    """Parameters of each flat unit: a layer, and one of both ends where LAB_TIE makes them share a weight."""
    layers = list(outline(config).layers)
    if config.tie and config.model == "gpt":
        first, *blocks, last = layers
        groups = [[first, last], *([block] for block in blocks)]
    else:
        groups = [[layer] for layer in layers]
    return [sum(p.numel() for p in {p for layer in group for p in layer.parameters()}) for group in groups]


def chunks(config: Config) -> list[int]:
    """Parameters in a rank's chunk of each unit, padding included: what is sent is of one size."""
    return [-(-numel // config.world_size) for numel in units(config)]


def owned(config: Config, rank: int) -> int:
    """Parameters that `rank` owns of all units."""
    return sum(
        max(0, min(chunk, numel - rank * chunk)) for numel, chunk in zip(units(config), chunks(config), strict=True)
    )


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    named = [name for name in STAGES if name != "zero3_kept" or config.recompute]
    sent = [by_hand(config, name) for name in named] + [by_torch(config)]
    return sent + [at_rest(config, name) for name in [*named, "fsdp2"]]


def by_hand(config: Config, name: str) -> Prediction:
    """The moves of ours: every rank sends the same."""
    ranks, parts, stage = config.world_size, config.num_microbatches, STAGES[name]
    gathers = 2 if config.reshard else 1
    itemsize: int = getattr(torch, config.dtype).itemsize
    shared = int(config.tie and config.model == "gpt")  # the first unit stays from its first use to its last
    total, calls = 0.0, 0
    for index, chunk in enumerate(chunks(config)):
        times = 1 if index < shared else gathers
        total += zero_bytes(stage, ranks, ranks * chunk * itemsize, parts, times)
        moves = {1: 2, 2: parts + 1, 3: parts * (times + 1)}[stage]
        calls += moves * (1 if config.backend == "nccl" else ranks - 1)
    times = {1: 2, 2: parts + 1, 3: parts * (gathers + 1)}[stage]
    clips = int(config.clip is not None)
    return Prediction(name, "wire bytes", "B", f"{times}(N-1)/N x S", (total,) * ranks, calls + clips)


def by_torch(config: Config) -> Prediction:
    """fully_shard's: gathers as zero3's, and sums as the backend has them."""
    ranks, parts, gathers = config.world_size, config.num_microbatches, 2 if config.reshard else 1
    itemsize: int = getattr(torch, config.dtype).itemsize
    total = fully_shard_bytes(ranks, sum(units(config)) * itemsize, parts, gathers, config.backend)
    moves = parts * (gathers + (2 if config.backend == "gloo" else 1))
    wrapped = len(outline(config).layers) - (config.model == "gpt")  # both ends are one unit
    calls = parts * (gathers + 1) * wrapped
    return Prediction("fsdp2", "wire bytes", "B", f"{moves}(N-1)/N x S", (total,) * ranks, calls, decides=False)


def at_rest(config: Config, name: str) -> Prediction:
    """Weights, gradients and optimizer state of what a rank owns; where whole units are kept, and in chunks, padding is too."""
    ranks, stage, total = config.world_size, STAGES.get(name, 3), sum(units(config))
    adam, masters = config.optimizer == "adamw", config.dtype == "bfloat16" and name in STAGES
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
    return Prediction(name, "rest bytes", "B", formula, value, 0, decides=name in STAGES)


def published() -> tuple[str, list[str], list[list[str]]]:
    """The table of the ZeRO paper (figure 1), which holds for half precision: GB on each rank; and what 7 billion take."""
    columns = ["", "GB of 7.5B parameters on 64 ranks", "of 7B parameters on 1, 8, 64"]
    rows = []
    for stage, name in enumerate(["dp", "zero1", "zero2", "zero3"]):
        cases = [(7.5e9, 64), (7e9, 1), (7e9, 8), (7e9, 64)]
        sizes = [sum(rest_bytes(stage, p, p / n, itemsize=2, masters=True).values()) / 1e9 for p, n in cases]
        rows.append([name, f"{sizes[0]:.3g}", ", ".join(f"{size:.3g}" for size in sizes[1:])])
    return "Adam in mixed precision: 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter", columns, rows
