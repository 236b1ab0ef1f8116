"""Predictions of compression: bytes, calls and memory at rest of each variant, and unsupported sizes. After the run:
losses by bytes sent, and the N at which top-k stops paying.

n is the numbers of a bucket, s their bytes each, f = 2(N-1)/N the factor of an all_reduce: it sends less than twice its
message for any number of ranks. An all_gather's bytes grow with N - 1. Sources, by method:

  topk, randomk  Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (NeurIPS 2018)
  powersgd       Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), table 3: r(m + n) in place of m·n
"""

import math
from collections.abc import Mapping, Sequence

from torch import Size

from distlab.contract import Counted, ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import Cost, algorithmic_factor, gloo_all_reduce_messages
from distlab.techniques.compression.compressors import num_kept
from distlab.techniques.compression.powersgd import factors, pays
from distlab.techniques.data_parallel import costs as buckets
from distlab.techniques.data_parallel.buckets import layout
from distlab.techniques.sharded.costs import at_rest, whole_rest

from .options import Options

METHODS = ("fp16", "int8", "topk", "randomk", "powersgd")
TORCHS = {"ddp_fp16": "fp16", "ddp_powersgd": "powersgd"}
METHOD_OF = {name: name for name in ("dense", *METHODS)} | TORCHS | {"plain": "topk"}  # of each variant
Shapes = Sequence[Sequence[int]]  # of the gradients of one bucket

FORMULAS = {
    "dense": "f·s·n",
    "fp16": "f·2n",
    "int8": "f·(n + 4)",
    "topk": "(N-1)·(4 + s)k",
    "randomk": "f·s·k",
    "powersgd": "f·s·(sum of r(m+n) + rest)",
}


def refuse(config: Config) -> list[str]:
    """Return errors for this mode, such as a rank with which no matrix can be factored."""
    uses_powersgd = not config.variant or any(METHOD_OF.get(name) == "powersgd" for name in config.variant)
    reason = no_factors(config) if "low_rank" in config.options.model_fields_set and uses_powersgd else ""
    return ([reason] if reason else []) + untrainable(config)


def cannot(config: Config) -> dict[str, str]:
    unfactorable, why = no_factors(config), "LAB_DTYPE=bfloat16: gradients have 16 bits already"
    return ruled_out(
        (("fp16", "ddp_fp16"), config.dtype == "bfloat16", why),
        (("powersgd", "ddp_powersgd"), unfactorable, unfactorable),
        (
            ("plain",),
            not config.own(Options).error_feedback,
            "LAB_ERROR_FEEDBACK=0: the lesson always has error feedback",
        ),
    )


def no_factors(config: Config) -> str:
    """Return why PowerSGD cannot factor with these settings; empty if it can."""
    low_rank, side = config.own(Options).low_rank, smallest_side(config)
    if low_rank > side:
        setting = f"LAB_LOW_RANK={low_rank} is above the smallest side of a weight matrix of this model"
        return f"{setting}, allowed: 1 to {side}"
    if not any(pays(parameter.shape, low_rank) for parameter in outline(config).parameters()):
        return f"LAB_LOW_RANK={low_rank} saves nothing: two factors are as large as any weight matrix of this model"
    return ""


def smallest_side(config: Config) -> int:
    return min(min(p.shape[0], p.shape[1:].numel()) for p in outline(config).parameters() if p.dim() > 1)


def bucket_members(config: Config, itemsize: int) -> list[list[int]]:
    """Return the parameters of each bucket by number, in the bucket's order."""
    return layout([size * itemsize for size in outline(config).sizes], config.bucket_mib * 2**20)


def bucket_shapes(config: Config, itemsize: int) -> list[list[Size]]:
    shapes = [parameter.shape for parameter in outline(config).parameters()]
    return [[shapes[index] for index in bucket] for bucket in bucket_members(config, itemsize)]


def sent_bytes(config: Config, variant: str, world_size: int) -> float:
    itemsize, ratio, low_rank = config.itemsize, config.own(Options).ratio, config.own(Options).low_rank
    return math.fsum(
        bucket_bytes(METHOD_OF[variant], world_size, shapes, itemsize, ratio=ratio, low_rank=low_rank)
        for shapes in bucket_shapes(config, itemsize)
    )


def calls(config: Config, variant: str) -> int:
    """Return the number of collectives in a step."""
    low_rank, buckets = config.own(Options).low_rank, bucket_shapes(config, config.itemsize)
    return sum(bucket_calls(METHOD_OF[variant], shapes, low_rank) for shapes in buckets)


def messages(config: Config, variant: str, world_size: int) -> int:
    """Return a rank's messages in a step: 2(N-1) per all_gather; a long all_reduce may have more than 4(N-1)."""
    if METHOD_OF[variant] == "topk":
        return 2 * (world_size - 1) * calls(config, variant)
    short = gloo_all_reduce_messages(world_size, 1)
    sent = buckets.bucket_bytes(config)
    longest = sum(gloo_all_reduce_messages(world_size, nbytes) for nbytes in sent)
    return longest + short * (calls(config, variant) - len(sent))


def predict(config: Config) -> list[Prediction]:
    """Return bytes and calls of a step per variant; at rest dp's bytes, and the residual: one more gradient."""
    ranks, found, (whole, each) = config.world_size, list[Prediction](), whole_rest(config)
    names = [name for name in METHOD_OF if name not in cannot(config)]
    for name in names:
        shown, of_calls = (PYTORCHS, "") if name in TORCHS else ("", "the calls of each bucket")
        cost = Cost(sent_bytes(config, name, ranks), calls(config, name), messages(config, name, ranks))
        found += of_a_step(name, FORMULAS[METHOD_OF[name]], [cost] * ranks, shown, of_calls)
    for name in names:
        residual = config.itemsize * (config.own(Options).error_feedback and name in (*METHODS, "plain"))
        nbytes = whole + residual * outline(config).num_parameters()
        found.append(at_rest(name, config, f"{each + residual} x P", [nbytes], PYTORCHS * (name in TORCHS)))
    return found


# --- shown after a run: losses by bytes, and the N at which top-k stops paying ---

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256)


def summary(config: Config) -> str:
    dense = sent_bytes(config, "dense", config.world_size)
    if not dense:
        return "one rank sends nothing; the effect of the unsent part shows all the same"
    possible = [name for name in METHODS if name not in cannot(config)]
    parts = [f"{name} {over_dense(config, name, config.world_size):.3f}" for name in possible]
    return f"dense sends {dense / 1e6:.3g} MB per rank and step; relative to it: {', '.join(parts)}"


def show(lab: Lab, measured: Mapping[str, Counted]) -> None:
    sent = {name: bytes_of(each) for name, each in measured.items()}
    by_variant(lab, sent, lab.losses())
    by_world(lab, sent)


def bytes_of(counted: Counted) -> float:
    traffic = counted.traffic
    return traffic.wire_bytes if traffic.wire_error is None else traffic.called_bytes


def by_variant(lab: Lab, sent: Mapping[str, float], losses: Mapping[str, list[float]]) -> None:
    """Show what each variant sends, the loss that it reaches, and the loss by bytes sent."""
    rows: list[list[str]] = []
    config = lab.config
    dense = sent_bytes(config, "dense", config.world_size)
    samples = config.steps * config.batch
    for name in sent:
        formula = sent_bytes(config, name, config.world_size)
        kilobytes = [f"{value / 1e3:.1f}" for value in (sent[name], formula)]
        rows.append([name, *kilobytes, part_of(sent[name], dense), figure(losses.get(name, []))])
    columns = ["variant", "kB per step", "by formula", "over dense", f"loss after {samples} samples"]
    lab.table("Bytes sent and loss reached by each variant", columns, rows)
    curves = {
        name: [[sent[name] * step / 1e6 for step in range(1, len(losses[name]) + 1)], losses[name]]
        for name in sent
        if losses.get(name)
    }
    lab.chart("Loss by bytes sent", "MB that a rank has sent", "loss", curves, log_x=True)


def by_world(lab: Lab, sent: Mapping[str, float]) -> None:
    """Chart the bytes relative to dense for growing N, with this run's points; log where top-k sends more."""
    config, here = lab.config, lab.world_size
    methods = [name for name in METHODS if name in sent]
    lines = {name: [over_dense(config, name, worlds) for worlds in WORLDS] for name in methods}
    points = {name: part_of(sent[name], sent_bytes(config, "dense", here)) for name in methods}
    columns = ["variant", f"measured, N={here}", *(f"N={worlds}" for worlds in WORLDS)]
    rows = [[name, points[name], *(f"{value:.3g}" for value in lines[name])] for name in methods]
    lab.table(
        f"Bytes sent over dense, with LAB_RATIO={config.own(Options).ratio:g} and"
        f" LAB_LOW_RANK={config.own(Options).low_rank}",
        columns,
        rows,
    )
    below = topk_pays_below(config.own(Options).ratio, config.itemsize)
    lab.say(f"topk sends less than dense below N = {below:.4g}", "all_gather")
    series = {name: [[float(worlds) for worlds in WORLDS], values] for name, values in lines.items()}
    if here > 1:
        series |= {f"{name}, measured": [[float(here)], [float(points[name])]] for name in methods}
    lab.chart("Bytes sent over dense", "ranks", "over dense", series, log_x=True, log_y=True)


def over_dense(config: Config, method: str, world_size: int) -> float:
    """Return the formula's bytes of a step relative to the dense sum's."""
    return sent_bytes(config, method, world_size) / sent_bytes(config, "dense", world_size)


def part_of(sent: float, dense: float) -> str:
    """Return bytes relative to the dense sum; a single rank sends nothing."""
    return f"{sent / dense:.4f}" if dense else "-"


def figure(values: list[float]) -> str:
    return f"{values[-1]:.4f}" if values else "-"


def bucket_bytes(method: str, world_size: int, shapes: Shapes, itemsize: int, *, ratio: float, low_rank: int) -> float:
    """Return the bytes that each rank sends to sum a bucket of gradients of `shapes`."""
    numel = sum(math.prod(shape) for shape in shapes)
    k, factor, scale = num_kept(numel, ratio), algorithmic_factor("all_reduce", world_size), max(4, itemsize)
    if method == "topk":
        return float((world_size - 1) * (4 + itemsize) * k)
    message = {
        "dense": itemsize * numel,
        "fp16": 2 * numel,
        "int8": numel + scale,
        "randomk": itemsize * k,
        "powersgd": itemsize * sum(factors(shape, low_rank) for shape in shapes),
    }[method]
    return factor * message


def bucket_calls(method: str, shapes: Shapes, low_rank: int) -> int:
    """Return the collectives per bucket: int8 needs a scale first; PowerSGD sends Q after P if it factors a matrix."""
    if method == "powersgd":
        return 1 + any(factors(shape, low_rank) < math.prod(shape) for shape in shapes)
    return 2 if method == "int8" else 1


def topk_pays_below(ratio: float, itemsize: int = 4) -> float:
    """Return the N at which top-k sends as much as a dense sum: (N-1)(4+s)·ratio·n = 2(N-1)/N·s·n."""
    return 2 * itemsize / ((4 + itemsize) * ratio)
