"""Count the (row, key) pairs of attention that each rank computes, and compare the busiest rank with the mean.

A causal mask gives the last positions the most work. The expected work follows from the positions of each rank; the
actual work is counted in the calls of the kernel (below). The processor time in attention is shown beside it. The order
of kernels and receives is checked, too: keys have to be under way while the rank computes with others.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.contract import Claims, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS
from distlab.lab.measure.traffic import DispatchMode
from distlab.lab.verify.counted import saved_bytes
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import outline
from distlab.techniques.context_parallel.costs import causal_share
from distlab.techniques.context_parallel.strategy import Positions
from distlab.techniques.sharded.costs import KEPT_ON_GPU
from distlab.techniques.tensor_parallel.layers import partition_sizes

from .predictions import BY_HAND, positions_of

# Count what a rank computes of attention where PyTorch's kernel is called, forward and backward.
#
# Shapes and mask are the arguments of the call, so no number comes from the code under test. Receives are noted between
# the kernels: their order shows whether keys are under way while the rank computes with others.

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
RECEIVE, COMPUTE = "receive", "compute"


class Kernels(DispatchMode):
    """Records the calls of a step: the `pairs` of all samples and heads, the `cpu_s` in kernels, and the `order`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs, self.cpu_s = 0, 0.0
        self.order: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if name in (FORWARD, BACKWARD):
            self.cpu_s += time.thread_time() - began
            q, k = args[:2] if name == FORWARD else args[1:3]
            causal = args[4:5] if name == FORWARD else args[7:8]  # missing where it is False
            self.pairs += pairs(q, k, causal=any(causal))
            self.order.append(COMPUTE)
        elif name == "c10d::recv_":
            self.order.append(RECEIVE)
        return result


def pairs(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """Count the (row, key) pairs of all samples and heads in [B, heads, rows, head_dim]; `causal`: of a triangle."""
    rows, keys = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * keys)


PAIRS, BALANCE, AHEAD = "attention pairs", "balance", "keys ahead"


class Work(NamedTuple):
    """The expected work of attention on each rank, for one sample and layer."""

    pairs: list[int]
    share: float  # of the busiest rank over the mean
    formula: str


def predicted_share(variant: str, config: Config) -> Work:
    """Return the expected work by the positions of each rank, forward only."""
    positions, ranks = positions_of(variant, config), config.world_size
    if variant == "gathered":
        rows = [each * config.seq * config.heads for each in positions.num_rows]
        return Work(rows, max(rows) * ranks / sum(rows), "all keys for every row")
    if variant == "ulysses":
        heads = partition_sizes(config.heads, ranks)
        each_head = config.seq * (config.seq + 1) // 2
        return Work([each_head * each for each in heads], max(heads) * ranks / sum(heads), "heads of the busiest rank")
    work = [positions.pairs(rank) * config.heads for rank in range(ranks)]
    folded = variant != "ring"
    return Work(work, 1.0 if folded else causal_share(ranks), "1" if folded else "(2c-1)/c")


def tolerance(config: Config) -> float:
    """Return 0.02; or where a rank has few rows, the effect of two rows more or less."""
    return max(0.02, 2 * config.world_size / config.seq)


class BalanceFinding(NamedTuple):
    """The work of one variant: the busiest rank's by formula, and each rank's counted pairs and CPU seconds."""

    name: str
    predicted: float
    pairs: tuple[float, ...]
    cpu_s: tuple[float, ...]


def compare_balance(lab: Lab, variants: list[str]) -> None:
    """Run one step of each variant under `Kernels`, and compare pairs, balance and order with the expected ones."""
    if lab.device.type != "cpu":
        lab.say("not counted: only calls of the CPU's attention kernel are counted", "balance")
        return
    findings = [check_work(lab, name) for name in variants]
    show_work(lab, [each for each in findings if each is not None])


def check_work(lab: Lab, name: str) -> BalanceFinding | None:
    """Check the variant's work; return what the table shows of it, on rank 0."""
    seen, work = watch_second_step(lab, name), predicted_share(name, lab.config)
    shown = "" if name in BY_HAND else PYTORCHS
    wanted = work_per_step(lab.config) * work.pairs[lab.rank]
    lab.compare(PAIRS, wanted, seen.pairs, "pairs", 0, name, work.formula, shown=shown)
    if name in ("ring", "zigzag", "shift"):
        check_ahead(lab, name, seen.order)
    everyone = lab.exchange.gather(f"work of {name}", (seen.pairs, seen.cpu_s))
    if everyone is None:
        return None
    pairs, cpu_s = zip(*everyone, strict=True)
    lab.compare(BALANCE, work.share, busiest(pairs), "", tolerance(lab.config), name, work.formula, shown=shown)
    return BalanceFinding(name, work.share, pairs, cpu_s)


def work_per_step(config: Config) -> int:
    """Return how often a step does the work of one sample and layer: forward and backward."""
    return 2 * config.batch * config.depth


def show_work(lab: Lab, findings: list[BalanceFinding]) -> None:
    needed_pairs = lab.config.seq * (lab.config.seq + 1) // 2 * lab.config.heads * work_per_step(lab.config)
    rows, work_by_variant = [], dict[str, list[list[float]]]()
    for name, wanted, pairs, cpu_s in findings:
        cells = [f"{wanted:.3f}", f"{busiest(pairs):.3f}", f"{sum(pairs) / needed_pairs:.2f}"]
        rows.append([name, *cells, " ".join(f"{each * 1e3:.1f}" for each in cpu_s), f"{busiest(cpu_s):.2f}"])
        work_by_variant[name] = [
            list(map(float, range(len(pairs)))),
            [each * len(pairs) / sum(pairs) for each in pairs],
        ]
    columns = ["variant", "by formula", "counted", "all over needed", "CPU ms of attention by rank", "busiest CPU"]
    lab.table("Causal work: the busiest rank over the mean", columns, rows)
    lab.chart("Causal work of each rank over the mean", "rank", "x the mean", work_by_variant)


def busiest(amounts: tuple[float, ...]) -> float:
    """Divide the largest amount by the mean; 1 if all are 0."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0


def watch_second_step(lab: Lab, name: str) -> Kernels:
    (build,) = [each.build for each in lab.mode.variants if each.name == name]
    assert build is not None
    dtype = getattr(torch, lab.config.dtype)
    lab.at(0, f"balance of {name}")
    strategy, microbatches = build(lab.model(dtype), lab.mesh, lab.config), lab.microbatches(lab.batches(dtype), 0)
    strategy.backward(microbatches)
    seen = Kernels()
    with seen:
        strategy.backward(microbatches)
    return seen


def check_ahead(lab: Lab, name: str, order: list[str]) -> None:
    """Check that the next keys are requested before the rank computes with those it has, in every layer, both ways."""
    wanted = expected_order(name, lab.config, lab.rank)
    first = next((place for place, (own, other) in enumerate(zip(order, wanted, strict=False)) if own != other), None)
    faults = int(order != wanted)
    difference = (
        f"they differ from event {first} on" if first is not None else f"{len(order)} events, not {len(wanted)}"
    )
    lab.check(AHEAD, faults, 0, name, difference if faults else f"{len(order)} receives and blocks in order")


def received_keys(name: str, positions: Positions, rank: int, source: int) -> int:
    """Return the number of keys that `rank` receives of `source`: those that it sees, or in a ring all."""
    return positions.visible_keys(rank, source).num_keys if name == "shift" else positions.num_rows[source]


def received_gradients(name: str, positions: Positions, rank: int, distance: int, ranks: int) -> int:
    """Return the number of keys whose gradients arrive in turn `distance`: this rank's own, or in a ring the next."""
    if name == "shift":
        return positions.visible_keys((rank + distance) % ranks, rank).num_keys
    return positions.num_rows[(rank - distance - 1) % ranks]


def expected_order(name: str, config: Config, rank: int) -> list[str]:
    """Return the order of one step on a rank: request the next keys, compute with those it has; backward, also request
    the gradients behind each block."""
    positions, ranks = positions_of(name, config), config.world_size
    forward, backward = list[str](), list[str]()
    arriving_keys = [received_keys(name, positions, rank, (rank - distance) % ranks) for distance in range(ranks)]
    arriving_gradients = [received_gradients(name, positions, rank, distance, ranks) for distance in range(ranks)]
    for distance in range(ranks):
        following = distance < ranks - 1 and arriving_keys[distance + 1] > 0
        source = (rank - distance) % ranks
        computes = positions.num_rows[rank] > 0 if source == rank else positions.visible_keys(rank, source).num_keys > 0
        block = [RECEIVE] * following + [COMPUTE] * computes
        gradient = distance > 0 and arriving_gradients[distance] > 0
        forward += block
        backward += block + [RECEIVE] * gradient
    return (forward * config.depth + backward * config.depth) * config.num_microbatches


# The activations that each rank keeps for its backward pass, compared with one process's.
#
# Everything except attention works on a rank's own rows, and keeps what one process keeps for as many rows. Attention
# keeps: in a ring q, k, v, the result and one number per row, of its own rows; in ulysses the same of its own heads,
# and the result once more as rows; in gathered the keys and values of all ranks, and a mask.

TOLERANCE = 0.01
FORMULAS = {
    "gathered": "one process's for S/c rows + all K and V + a mask",
    "ring": "one process's for S/c rows",
    "zigzag": "one process's for S/c rows",
    "shift": "one process's for S/c rows",
    "ulysses": "one process's for S/c rows + the result of each layer",
}


def predicted_activation_bytes(lab: Lab, variant: str, config: Config, microbatch: Microbatch) -> int:
    """Return the bytes that this rank keeps for one microbatch, of samples of LAB_SEQ tokens."""
    positions = positions_of(variant, config)
    inputs, targets = (positions.own(side, lab.rank) for side in microbatch[:2])
    alone = saved_bytes(lab, range(len(outline(config).layers)), Microbatch(inputs, targets, microbatch.share))
    index = inputs.shape[1] * torch.long.itemsize  # the positions of its tokens
    return alone + index + extra_bytes(variant, config, positions, len(inputs), lab.rank)


def extra_bytes(variant: str, config: Config, positions: Positions, samples: int, rank: int) -> int:
    """Return what attention keeps in all layers beyond what one process keeps for this rank's rows."""
    itemsize, whole, rows = config.itemsize, positions.length, positions.num_rows[rank]
    row_bytes = samples * config.width * itemsize
    if variant == "gathered" and rows:
        return 2 * config.depth * (whole - rows) * row_bytes + rows * whole * itemsize
    if variant != "ulysses":
        return 0
    heads, sums = partition_sizes(config.heads, config.world_size)[rank], max(itemsize, 4)
    head_bytes = samples * (4 * config.width // config.heads * itemsize + sums)  # q, k, v, the result; log-sum-exp
    return config.depth * (whole * heads * head_bytes - rows * config.heads * head_bytes + rows * row_bytes)


def compare_activations(lab: Lab, measured: Mapping[str, int]) -> None:
    """Compare the bytes that each variant kept in a step, in its largest microbatch, with the prediction."""
    batches = lab.batches(getattr(torch, lab.config.dtype))
    largest = max(lab.microbatches(batches, 0), key=lambda microbatch: len(microbatch.inputs))
    for name, nbytes in measured.items():
        wanted = predicted_activation_bytes(lab, name, lab.config, largest)
        shown = KEPT_ON_GPU if lab.device.type == "cuda" else ""
        lab.compare("activation bytes", wanted, nbytes, "B", TOLERANCE * wanted, name, FORMULAS[name], shown=shown)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """List the checks of a run: bytes, calls, activations, and on a CPU the work of attention."""
    on_cpu = config.device == "cpu"
    kernels = [name for name in mode.by_hand if name in BY_HAND]  # the lesson calls none
    return (
        *measured(mode, config),
        Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand),
        Claims(("activation bytes",), kernels),
        Claims((PAIRS,), kernels, when=on_cpu, fails_in="LAB_BUG=unfolded"),
        Claims((BALANCE,), kernels, one=True, when=on_cpu),
        Claims((AHEAD,), ("ring", "zigzag", "shift"), when=on_cpu),
    )
