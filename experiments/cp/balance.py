"""Who does how much of attention: (row, key) pairs that each rank computed, counted where PyTorch is called.

What is counted are the calls of its kernel, with the shapes and the mask that they were given, forward and backward: no
number comes from the mechanism itself. Beside the pairs stands the processor's time in these calls, which is a time and
only shown; and the order of kernels and receives, for keys have to be on their way while others are computed with.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.cp.predictions import BY_HAND, positions_of
from workers.config import Config
from workers.lab import Lab
from workers.measure.formulas.context import causal_share
from workers.parallel.slices import shares

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
RECEIVE, COMPUTE = "receive", "compute"
PAIRS, BALANCE, AHEAD = "attention pairs", "balance", "keys ahead"


class Kernels(TorchDispatchMode):
    """Around a step: the `pairs` of all samples and heads, `cpu_s` and `order` of what is called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs, self.cpu_s = 0, 0.0
        self.order: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if name in (FORWARD, BACKWARD):
            self.cpu_s += time.thread_time() - began
            q, k = args[:2] if name == FORWARD else args[1:3]
            causal = args[4:5] if name == FORWARD else args[7:8]  # left out where it is False
            self.pairs += pairs(q, k, causal=any(causal))
            self.order.append(COMPUTE)
        elif name == "c10d::recv_":
            self.order.append(RECEIVE)
        return result


def pairs(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """(row, key) pairs of all samples and heads in [B, heads, rows, head_dim]; of a triangle those below it."""
    rows, keys = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * keys)


class Work(NamedTuple):
    """What attention should cost each rank, for one sample and layer."""

    pairs: list[int]
    share: float  # of the busiest rank over the mean
    formula: str


def predicted(variant: str, config: Config) -> Work:
    """By who holds what; forward alone."""
    positions, ranks = positions_of(variant, config), config.world_size
    if variant == "gathered":
        rows = [each * config.seq * config.heads for each in positions.num_rows]
        return Work(rows, max(rows) * ranks / sum(rows), "all keys for every row")
    if variant == "ulysses":
        heads = shares(config.heads, ranks)
        every = config.seq * (config.seq + 1) // 2
        return Work([every * each for each in heads], max(heads) * ranks / sum(heads), "the busiest one's heads")
    work = [positions.pairs(rank) * config.heads for rank in range(ranks)]
    folded = variant != "ring"
    return Work(work, 1.0 if folded else causal_share(ranks), "1" if folded else "(2c-1)/c")


def tolerance(config: Config) -> float:
    """0.02; or where a rank has few rows, what two of them more or less make."""
    return max(0.02, 2 * config.world_size / config.seq)


def compare_balance(lab: Lab, variants: list[str]) -> None:
    """One step of each variant under `Kernels`: hold pairs, share and order against what they should be."""
    if lab.device.type != "cpu":
        lab.say("not counted: it is the CPU's kernel that is watched", "balance")
        return
    rows = []
    for name in [each for each in variants if each in lab.mode.names]:
        seen, work = watched(lab, name), predicted(name, lab.config)
        shown = "" if name in BY_HAND else "PyTorch's own, which ours stand beside"
        both = 2 * lab.config.batch * lab.config.depth  # forward and backward
        lab.compare(
            PAIRS, both * work.pairs[lab.rank], seen.pairs, "pairs", 0, name, work.formula, shown=shown,
            control="LAB_BUG=unfolded",
        )  # fmt: skip
        if name in ("ring", "zigzag"):
            check_ahead(lab, name, seen.order)
        everyone = lab.exchange.gather(f"work of {name}", (seen.pairs, seen.cpu_s))
        if everyone is not None:
            counts, seconds = zip(*everyone, strict=True)
            share = busiest(counts)
            lab.compare(BALANCE, work.share, share, "", tolerance(lab.config), name, work.formula, shown=shown)
            needed = lab.config.seq * (lab.config.seq + 1) // 2 * lab.config.heads * both
            cells = [f"{work.share:.3f}", f"{share:.3f}", f"{sum(counts) / needed:.2f}"]
            rows.append([name, *cells, " ".join(f"{each * 1e3:.1f}" for each in seconds), f"{busiest(seconds):.2f}"])
    columns = ["variant", "by formula", "counted", "of what is needed", "CPU ms of attention by rank", "its share"]
    lab.table("Causal work: the busiest rank over the mean of all", columns, rows)


def busiest(amounts: tuple[float, ...]) -> float:
    """The largest over the mean; 1 where there is none."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0


def watched(lab: Lab, name: str) -> Kernels:
    """The second of two steps."""
    (build,) = [each.build for each in lab.mode.variants if each.name == name]
    assert build is not None
    dtype = getattr(torch, lab.config.dtype)
    lab.at(0, f"balance of {name}")
    strategy, microbatches = build(lab.model(dtype), lab.mesh, lab.config), lab.dealt(lab.batches(dtype), 0)
    strategy.backward(microbatches)
    seen = Kernels()
    with seen:
        strategy.backward(microbatches)
    return seen


def check_ahead(lab: Lab, name: str, order: list[str]) -> None:
    """Keys are asked for before those that are there are computed with, in every layer and both ways."""
    wanted = drawn(name, lab.config, lab.rank)
    parted = next((at for at, (one, other) in enumerate(zip(order, wanted, strict=False)) if one != other), None)
    faults = int(order != wanted)
    told = f"they part at {parted}" if parted is not None else f"{len(order)} of {len(wanted)}"
    lab.check(AHEAD, faults, 0, name, told if faults else f"{len(order)} receives and blocks in their order")


def drawn(name: str, config: Config, rank: int) -> list[str]:
    """The order of one step on a rank: receive the next keys, compute with those that are there; backward behind each
    block the gradients that follow them."""
    positions, ranks = positions_of(name, config), config.world_size
    forward, backward = list[str](), list[str]()
    for distance in range(ranks):
        following = distance < ranks - 1 and positions.num_rows[(rank - distance - 1) % ranks] > 0
        source = (rank - distance) % ranks
        computes = positions.num_rows[rank] > 0 if source == rank else positions.seen(rank, source).num_keys > 0
        block = [RECEIVE] * following + [COMPUTE] * computes
        gradient = distance > 0 and positions.num_rows[(source - 1) % ranks] > 0
        forward += block
        backward += block + [RECEIVE] * gradient
    return (forward * config.depth + backward * config.depth) * config.num_microbatches
