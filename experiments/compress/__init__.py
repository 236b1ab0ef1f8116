"""Gradients compressed: less on the wire, and what it does to training.

A slow link makes data parallelism wait: S bytes of gradients go around at each step, however small the model's news in
them. So send less: fewer bits a number, fewer numbers, or fewer dimensions. What is left out is kept and added to the
next step's gradients (error feedback, LAB_ERROR_FEEDBACK): late, not lost.

  predicted   bytes a rank and step, for n numbers of s bytes on N ranks, f = 2(N-1)/N, k = LAB_RATIO·n,
              r = LAB_LOW_RANK:
              dense f·s·n; bf16, fp16 f·2n; int8 f·(n + 4); topk (N-1)·(4 + s)k; randomk f·s·k; sign (N-1)·(n/8 + 4);
              powersgd f·s·r(m + n) a matrix [m, n]. All but topk and sign stay bounded as N grows: their messages can
              be added on the way. topk sends more than dense from N = 1/LAB_RATIO on (in float32), sign from N = 64
              one call a bucket, int8 and powersgd two; per_parameter sends topk's bytes in two calls a gradient
              at rest a gradient more on every rank, the residual (among the activations, which are all that is in no
              other class)
  the model   width 64, depth 4 unless set: a dozen variants and more are proven and trained beside each other
  shapes      a bucket [n] flat, of whole gradients; P [m, r], Q [n, r]

The variants; from bf16 on each bucket goes through an all_reduce that sends less (distlab/compression/compressors.py):

  per_parameter  each gradient alone: its largest numbers and their places to all ranks, and the rest is lost
  dense          our buckets, nothing compressed
  bf16, fp16     16 bits a number
  int8           8 bits, one scale a bucket for all ranks, stochastic rounding, sums that cannot overflow
  topk           the largest numbers of a bucket and their places
  randomk        numbers at places that all ranks draw alike
  sign           one bit a number
  powersgd       two thin factors a matrix
  *_plain        topk, sign and powersgd without error feedback: what is left out is lost
  ddp            PyTorch's DistributedDataParallel, nothing compressed: what the others are to beat
  ddp_fp16, ddp_powersgd  PyTorch's own hooks
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Size, Tensor

from distlab.compression.compressors import Cast, Compressor, Quantised, RandomK, Sign, TopK, rank_seed
from distlab.compression.powersgd import LowRank
from distlab.config import Config
from distlab.contract import Build, Mode, Strategy, Variant
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica, begin_alike
from distlab.lab import Lab
from distlab.mesh.grid import Mesh
from distlab.verify.proof import check_replicas
from distlab.verify.run_all import measure
from distlab.workload.model import Model

from . import pytorch
from .bugs import mistake
from .checks import by_the_formula, claims
from .options import Options
from .predictions import OURS, cannot, compare_peak, predict, refuse, show, summary

Group: TypeAlias = dist.ProcessGroup
Shapes: TypeAlias = list[Size]  # of the gradients of a bucket


# --- the variants ---


def per_parameter(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """After the backward pass, each gradient alone: its largest numbers and places to all ranks; the rest is lost."""
    begin_alike(model, mesh.group, config)
    ratio, group = config.own(Options).ratio, mesh.group

    def sum_largest(gradient: Tensor) -> None:  # [n], flat
        k = max(1, round(ratio * len(gradient)))
        places = gradient.abs().argsort(descending=True, stable=True)[:k].int()
        values = gradient[places]
        all_places, all_values = ([torch.empty_like(mine) for _ in range(group.size())] for mine in (places, values))
        dist.all_gather(all_places, places, group=group)  # other places on each rank: no all_reduce could add them
        dist.all_gather(all_values, values, group=group)
        gradient.zero_()
        for at, added in zip(all_places, all_values, strict=True):  # in rank order, so that all replicas stay alike
            gradient[at] += added

    one_by_one = GradientBuckets(model.parameters(), group, 0, all_reduce=sum_largest, overlap=False)
    return Replica(model, config, one_by_one)


def dense(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Our buckets, whole."""
    begin_alike(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20))


def compressed(compressor_of: Callable[..., Compressor]) -> Build:
    """A replica of which each bucket is summed through a compressor of its own, made for the shapes of its gradients.

    Each does so: values = residual + bucket; a message of them travels; residual = values - what the message says.
    """

    @wraps(compressor_of)
    def build(
        model: Model, mesh: Mesh, config: Config, buckets: type[GradientBuckets] = GradientBuckets, **parts: Any
    ) -> Strategy:
        begin_alike(model, mesh.group, config)
        of_bucket = partial(compressor_of, mesh.group, config, config.own(Options), **parts)
        size = config.bucket_mib * 2**20
        return Replica(model, config, buckets(model.parameters(), mesh.group, size, all_reduce_of=of_bucket))

    return build


@compressed
def bf16(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """8 bits of precision and float32's range."""
    return Cast(group, torch.bfloat16, feedback=own.error_feedback)


@compressed
def fp16(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """11 bits of precision and a small range."""
    return Cast(group, torch.float16, feedback=own.error_feedback)


@compressed
def int8(group: Group, config: Config, own: Options, _: Shapes, compressor: type[Quantised] = Quantised) -> Compressor:
    """Codes on one scale, rounded at random: each rank draws for itself."""
    return compressor(group, rank_seed(config.seed, group.rank()), feedback=own.error_feedback)


@compressed
def topk(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """The largest."""
    return TopK(group, own.ratio, feedback=own.error_feedback)


@compressed
def randomk(group: Group, config: Config, own: Options, _: Shapes, compressor: type[RandomK] = RandomK) -> Compressor:
    """Some: all ranks draw the same."""
    return compressor(group, own.ratio, config.seed, feedback=own.error_feedback)


@compressed
def sign(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """One bit."""
    return Sign(group, feedback=own.error_feedback)


@compressed
def powersgd(
    group: Group, config: Config, own: Options, shapes: Shapes, compressor: type[LowRank] = LowRank
) -> Compressor:
    """Two thin factors."""
    return compressor(group, shapes, own.low_rank, config.seed, feedback=own.error_feedback)


def plain(build: Build) -> Build:
    """The same without error feedback: what is left out is lost, and what is never among the largest never moves."""

    def forgetting(model: Model, mesh: Mesh, config: Config, **parts: Any) -> Strategy:
        return build(model, mesh, config.with_own(error_feedback=False), **parts)

    return forgetting


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove, measure; then what was sent and what it cost in loss."""
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    proofs = {name: partial(by_the_formula, lab) for name in OURS if name != "dense"}
    measured = measure(
        lab, also=partial(check_replicas, lab), proofs={**proofs, **pytorch.proofs(lab, plain(fp16), powersgd)}
    )
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)
    compare_peak(lab, measured)
    for prediction in predictions:
        if prediction.calls and prediction.decides and prediction.variant in measured:
            lab.compare_calls(prediction.variant, prediction.calls, measured[prediction.variant].traffic)
    show(lab, measured)


MODE = Mode(
    variants=(
        Variant("per_parameter", per_parameter, formerly="naive"),
        *(Variant(each.__name__, each) for each in (dense, bf16, fp16, int8, topk, randomk, sign, powersgd)),
        Variant("topk_plain", plain(topk)),
        Variant("sign_plain", plain(sign)),
        Variant("powersgd_plain", plain(powersgd)),
        Variant("ddp", pytorch.ddp, by_torch=True),
        Variant("ddp_fp16", pytorch.ddp_fp16, by_torch=True),
        Variant("ddp_powersgd", pytorch.ddp_powersgd, by_torch=True),
    ),
    run=run,
    claims=claims,
    options=Options,
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake,
    unsaved="keeps a residual of its own on each rank, as large as the gradients, without which a resumed run would "
    "lose what was not sent",
    reading=(
        "experiments/compress/__init__.py: the variants, the simplest first, each with its compressor",
        "distlab/compression/compressors.py: what every compressor does, and what each variant sends",
        "distlab/compression/powersgd.py: two thin factors in place of a matrix",
        "experiments/compress/checks.py: how each is compared with its paper's formula",
    ),
)
