"""What compression predicts before it runs: bytes, calls and memory of each variant; and sizes that it cannot take.
After it bytes beside loss, and where top-k stops paying.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Size

from distlab.collectives.costs import gloo_all_reduce_messages
from distlab.compression.compressors import num_kept
from distlab.compression.costs import FORMULAS, bucket_bytes, bucket_calls, sign_pays_below, topk_pays_below
from distlab.compression.powersgd import factors, pays
from distlab.config import Config
from distlab.contract import Counted, Measured, untrainable
from distlab.data_parallel.buckets import layout
from distlab.lab import Lab
from distlab.measure.prediction import PYTORCHS, Prediction
from distlab.sharded.costs import Happening, adamw_scratch_bytes, pass_peak, rest_bytes, shown_on
from distlab.verify.counted import outlined
from distlab.workload.model import outline

from .options import Options

METHODS = ("bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd")
# What these leave out is no noise around the gradient: without feedback they are biased.
PLAIN = ("topk", "sign", "powersgd")
TORCHS = {"ddp": "dense", "ddp_fp16": "fp16", "ddp_powersgd": "powersgd"}
OURS = {
    "per_parameter": "topk",
    "dense": "dense",
    **{name: name for name in METHODS},
    **{f"{name}_plain": name for name in PLAIN},
}
METHOD_OF = OURS | TORCHS  # of each variant


def refuse(config: Config) -> list[str]:
    """What this mode cannot run: a rank that was asked for and that no matrix can be factored by, before all else."""
    wants_low_rank = not config.variant or any(METHOD_OF.get(name) == "powersgd" for name in config.variant)
    reason = no_factors(config) if "low_rank" in config.options.model_fields_set and wants_low_rank else ""
    return ([reason] if reason else []) + untrainable(config)


def cannot(config: Config) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if config.dtype == "bfloat16":
        reason = "LAB_DTYPE=bfloat16: gradients are of 16 bits already"
        reasons |= dict.fromkeys(("bf16", "fp16", "ddp_fp16"), reason)
    if not config.own(Options).error_feedback:
        reasons |= {f"{name}_plain": f"LAB_ERROR_FEEDBACK=0: {name} is without it already" for name in PLAIN}
    if reason := no_factors(config):
        reasons |= {name: reason for name, method in METHOD_OF.items() if method == "powersgd"}
    return reasons


def no_factors(config: Config) -> str:
    """Why PowerSGD cannot factor with these settings; empty if it can."""
    low_rank, side = config.own(Options).low_rank, smallest_side(config)
    if low_rank > side:
        what = f"LAB_LOW_RANK={low_rank} is above the smallest side of a weight matrix of this model"
        return f"{what}, allowed: 1 to {side}"
    if not any(pays(parameter.shape, low_rank) for parameter in outline(config).parameters()):
        return f"LAB_LOW_RANK={low_rank} factors nothing: two factors are as large as any weight matrix of this model"
    return ""


def smallest_side(config: Config) -> int:
    return min(min(p.shape[0], p.shape[1:].numel()) for p in outline(config).parameters() if p.dim() > 1)


def bucket_members(config: Config, itemsize: int, variant: str = "") -> list[list[int]]:
    """Which parameters lie in each bucket, by their number, in its order; `per_parameter` has a bucket a gradient."""
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    bucket_mib = 0 if variant == "per_parameter" else config.bucket_mib
    return layout(sizes, bucket_mib * 2**20)


def bucket_shapes(config: Config, itemsize: int, variant: str = "") -> list[list[Size]]:
    shapes = [parameter.shape for parameter in outline(config).parameters()]
    return [[shapes[index] for index in bucket] for bucket in bucket_members(config, itemsize, variant)]


def sent_bytes(config: Config, variant: str, world_size: int) -> float:
    itemsize: int = getattr(torch, config.dtype).itemsize
    ratio, low_rank = config.own(Options).ratio, config.own(Options).low_rank
    return math.fsum(
        bucket_bytes(METHOD_OF[variant], world_size, shapes, itemsize, ratio=ratio, low_rank=low_rank)
        for shapes in bucket_shapes(config, itemsize, variant)
    )


def calls(config: Config, variant: str) -> int:
    """Collectives in a step; `per_parameter` sends numbers and places apart."""
    buckets = bucket_shapes(config, getattr(torch, config.dtype).itemsize, variant)
    one_by_one = sum(bucket_calls(METHOD_OF[variant], shapes, config.own(Options).low_rank) for shapes in buckets)
    return 2 * one_by_one if variant == "per_parameter" else one_by_one


def messages(config: Config, variant: str, world_size: int) -> int:
    """Messages of a rank in a step: 2(N-1) an all_gather; of all_reduces the longest may be more than 4(N-1)."""
    if METHOD_OF[variant] in ("topk", "sign"):
        return 2 * (world_size - 1) * calls(config, variant)
    short = gloo_all_reduce_messages(world_size, 1)
    itemsize: int = getattr(torch, config.dtype).itemsize
    sent = [sum(shape.numel() for shape in shapes) * itemsize for shapes in bucket_shapes(config, itemsize, variant)]
    longest = sum(gloo_all_reduce_messages(world_size, nbytes) for nbytes in sent)
    return longest + short * (calls(config, variant) - len(sent))


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, impossible = config.world_size, cannot(config)
    names = [name for name in METHOD_OF if name not in impossible]
    return [
        Prediction(
            name, "wire bytes", "B", FORMULAS[METHOD_OF[name]], (sent_bytes(config, name, ranks),) * ranks,
            calls(config, name), shown=PYTORCHS if name in TORCHS else "",
            messages=(messages(config, name, ranks),) * ranks,
        )
        for name in names
    ] + [at_rest(config, name) for name in names]  # fmt: skip


def at_rest(config: Config, name: str) -> Prediction:
    """Weights, gradients and optimizer state as in dp, and the residual: a gradient more."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    itemsize: int = getattr(torch, config.dtype).itemsize
    adam = config.optimizer == "adamw"
    held = rest_bytes(0, sum(sizes), sum(sizes), itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    residual = config.own(Options).error_feedback and name in METHODS
    value = sum(held.values()) + residual * itemsize * sum(sizes)
    formula = f"{(2 + 2 * adam + residual) * itemsize} x P"
    shown = PYTORCHS if name in TORCHS else ""
    return Prediction(name, "rest bytes", "B", formula, (float(value),) * config.world_size, 0, shown=shown)


# The most that a step of a compressor holds, predicted: dp's replica, a residual, and the messages on their way.
#
# A bucket is compressed when its last gradient is there, while the passes go on: what it takes to write a message,
# then what lies there until the sum is waited for, which for all buckets is after the passes; then what it takes to
# read it. How many numbers top-k has to look through depends on the gradients: where that could decide, its peak is
# only shown.

INDEX = 8  # bytes of a place in torch
TABLE = 256 * 8  # the signs of every byte: made of three tables of places, kept beside one
PIECE = 1 << 16  # numbers of which the compressors look at magnitudes at once
TOLERANCE = 0.05
BY_GRADIENTS = "how many numbers pass the threshold that is guessed depends on the gradients"


class Message(NamedTuple):
    """Bytes beside a bucket: the most while it is written and sent, what stays until the sum is there, and the most
    that is added while that is read."""

    written: float
    under_way: float
    read: float = 0.0


def message(method: str, numel: int, itemsize: int, world_size: int, ratio: float, *, feedback: bool) -> Message:
    """Of `numel` numbers; with `feedback` what is sent is taken out of the residual, in the dtype of the bucket."""
    wide, back, k = max(4, itemsize), itemsize * numel * feedback, num_kept(numel, ratio)
    if method in ("bf16", "fp16"):
        return Message(2 * 2 * numel + back, 2 * numel)  # its own beside the sum
    if method == "int8":
        return Message(max((wide + 1) * numel, 2 * numel + back), numel)  # numbers at random, then codes
    if method == "sign":
        sent = -(-numel // 8) + wide
        bits = max(2.25 * numel, itemsize * min(PIECE, numel) + numel / 8)  # flags twice; or magnitudes of a piece
        received = world_size * sent
        looked_up = TABLE * (INDEX + itemsize) + (itemsize + 0.5) * numel
        return Message(max(bits, received + sent + 2 * back), received, max(3 * TABLE * INDEX, looked_up))
    if method == "randomk":
        places = INDEX * (numel if 4 * k > numel else k)
        drawn = INDEX * (numel if 4 * k > numel else 4 * 5 * k // 4)  # with those that were drawn twice
        return Message(max(drawn, places + 2 * itemsize * k), places + itemsize * k, itemsize * k)
    return Message(0, 0)


def largest_k(numel: int, itemsize: int, world_size: int, ratio: float, *, all_pass: bool) -> Message:
    """Top-k's: a piece's magnitudes and flags, then the places of what passed, 5/4 k as a rule, or all numbers."""
    k = num_kept(numel, ratio)
    passed = numel if all_pass else min(numel, 5 * k // 4)
    looked_at = (itemsize + 1) * min(PIECE, numel) + (itemsize + INDEX) * min(numel // 100, passed // 100 + 50)
    ranked = 2 * INDEX * passed + (2 * itemsize + 2) * passed + (itemsize + INDEX) * k
    received = world_size * (4 + itemsize) * k
    sent = (4 + itemsize) * k
    return Message(max(looked_at + INDEX * passed, ranked, received + 2 * sent), received, sent)


def gathered(numel: int, itemsize: int, world_size: int, ratio: float) -> Message:
    """That of `per_parameter`, a gradient at a time: magnitudes sorted beside their places, then everybody's."""
    k = num_kept(numel, ratio)
    sent = (4 + itemsize) * k
    return Message(max((2 * itemsize + INDEX) * numel, INDEX * numel + (world_size + 1) * sent), 0)


class Compressed:
    """A replica whose buckets are launched in order, each when the last of its gradients is there."""

    def __init__(self, constant: float, buckets: list[tuple[set[str], Message]], microbatches: int) -> None:
        self.constant, self.under_way = constant, 0.0
        self.waiting, self.remaining = buckets, microbatches
        self.reading = max((each.read for _, each in buckets), default=0.0)

    def held(self) -> float:
        return self.constant + self.under_way

    def after(self, happening: Happening) -> Iterator[float]:
        """Launch what is complete; after the last microbatch read all sums, one after another."""
        if happening.what == "taken" and self.remaining == 1:
            for names, _ in self.waiting:
                names.discard(happening.name)
            while self.waiting and not self.waiting[0][0]:
                _, launched = self.waiting.pop(0)
                yield self.held() + launched.written
                self.under_way += launched.under_way
        if happening.what == "passed":
            self.remaining -= 1
            yield self.held() + (self.reading if not self.remaining else 0.0)
        yield self.held()


def peak_bytes(name: str, config: Config, passes: list[Happening], *, all_pass: bool = False) -> float:
    """The highest moment of the passes of variant `name`, or the update."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    shapes = [parameter.shape for parameter in outline(config).parameters()]
    sizes = [shape.numel() for shape in shapes]
    adam, total = config.optimizer == "adamw", sum(sizes)
    held = rest_bytes(0, total, total, itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    constant = sum(held.values()) + itemsize * total * (config.own(Options).error_feedback and name in METHODS)
    if METHOD_OF[name] == "powersgd":
        constant += itemsize * sum(factors(shape, config.own(Options).low_rank) for shape in shapes)
    buckets = message_bytes(name, config, sizes, itemsize, all_pass=all_pass)
    alone = constant + max(each.written for _, each in buckets) if name == "per_parameter" else 0.0  # after the passes
    holding = Compressed(constant, [] if name == "per_parameter" else buckets, config.num_microbatches)
    return max(pass_peak(passes, holding), alone, constant + adam * adamw_scratch_bytes(sizes, itemsize))


def message_bytes(
    name: str, config: Config, sizes: list[int], itemsize: int, *, all_pass: bool
) -> list[tuple[set[str], Message]]:
    ranks, ratio = config.world_size, config.own(Options).ratio
    feedback, named, found = config.own(Options).error_feedback and name in METHODS, names_of(config), []
    for members in bucket_members(config, itemsize, name):
        numel = sum(sizes[index] for index in members)
        if name == "per_parameter":
            its = gathered(numel, itemsize, ranks, ratio)
        elif METHOD_OF[name] == "topk":
            its = largest_k(numel, itemsize, ranks, ratio, all_pass=all_pass)
        else:
            its = message(METHOD_OF[name], numel, itemsize, ranks, ratio, feedback=feedback)
        found.append(({named[index] for index in members}, its))
    return found


def names_of(config: Config) -> list[str]:
    """Of each parameter, in order, what passes call it: its first layer and its name there."""
    model, names = outline(config), dict[torch.nn.Parameter, str]()
    for index, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            names.setdefault(parameter, f"{index}.{name}")
    return [names[parameter] for parameter in model.parameters()]


def compare_peak(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Hold the most that each variant of ours held against the formula, within 5 %."""
    passes = outlined(lab)
    for name in [name for name in measured if name not in TORCHS]:
        predicted = peak_bytes(name, lab.config, passes)
        most = peak_bytes(name, lab.config, passes, all_pass=True)
        lab.compare(
            "peak bytes", predicted, sum(measured[name].peak.values()), tolerance=TOLERANCE * predicted, variant=name,
            formula="weights + optimizer + gradients + residual + messages + one process's passes",
            shown=shown_on(lab.config.device) or (BY_GRADIENTS if most > (1 + TOLERANCE) * predicted else ""),
            control="tests/experiments/test_compress.py::test_a_message_that_is_copied_shows_in_the_peak",
        )  # fmt: skip


# --- what is shown of a run: bytes beside loss, and where top-k stops paying ---

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256)


def summary(config: Config) -> str:
    dense = sent_bytes(config, "dense", config.world_size)
    if not dense:
        return "one rank has nobody to send to: what is left out and comes later shows all the same"
    possible = [name for name in METHODS if name not in cannot(config)]
    parts = [f"{name} {over_dense(config, name, config.world_size):.3f}" for name in possible]
    return f"a rank sends {dense / 1e6:.3g} MB a step dense; as part of it: {', '.join(parts)}"


def show(lab: Lab, measured: Mapping[str, Counted]) -> None:
    sent = {name: bytes_of(each) for name, each in measured.items()}
    by_variant(lab, sent, lab.losses())
    by_world(lab, sent)


def bytes_of(counted: Counted) -> float:
    traffic = counted.traffic
    return traffic.wire_bytes if traffic.wire_error is None else traffic.called_bytes


def by_variant(lab: Lab, sent: Mapping[str, float], losses: Mapping[str, list[float]]) -> None:
    """What each variant sends and reaches, and the way there: loss against the bytes that it took."""
    rows: list[list[str]] = []
    config = lab.config
    dense = sent_bytes(config, "dense", config.world_size)
    samples = config.steps * config.batch
    for name in sent:
        formula = sent_bytes(config, name, config.world_size)
        kilobytes = [f"{value / 1e3:.1f}" for value in (sent[name], formula)]
        rows.append([name, *kilobytes, part_of(sent[name], dense), figure(losses.get(name, []))])
    columns = ["variant", "kB a step", "by the formula", "of dense", f"loss after {samples} samples"]
    lab.table("What each sends, and what it reaches", columns, rows)
    curves = {
        name: [[sent[name] * step / 1e6 for step in range(1, len(losses[name]) + 1)], losses[name]]
        for name in sent
        if losses.get(name)
    }
    lab.chart("Loss by bytes sent", "MB that a rank has sent", "loss", curves, log_x=True)


def by_world(lab: Lab, sent: Mapping[str, float]) -> None:
    """Bytes over dense as N grows, by the formulas, with the points of this run; and from where on top-k sends more."""
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
    itemsize = getattr(torch, config.dtype).itemsize
    lab.say(
        f"topk sends less than dense below N = {topk_pays_below(config.own(Options).ratio, itemsize):.4g}, "
        f"sign below N = {sign_pays_below(itemsize)}", "all_gather",
    )  # fmt: skip
    series = {name: [[float(worlds) for worlds in WORLDS], values] for name, values in lines.items()}
    if here > 1:
        series |= {f"{name}, measured": [[float(here)], [float(points[name])]] for name in methods}
    lab.chart("Bytes sent over dense", "ranks", "part of dense", series, log_x=True, log_y=True)


def over_dense(config: Config, method: str, world_size: int) -> float:
    """The formula's bytes of a step, as part of the dense sum's."""
    return sent_bytes(config, method, world_size) / sent_bytes(config, "dense", world_size)


def part_of(sent: float, dense: float) -> str:
    """As part of the dense sum; nothing is sent by one rank alone."""
    return f"{sent / dense:.4f}" if dense else "-"


def figure(values: list[float]) -> str:
    return f"{values[-1]:.4f}" if values else "-"
