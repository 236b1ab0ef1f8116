"""Gradients compressed: less on the wire, and what it does to training.

A slow link makes data parallelism wait: S bytes of gradients go around at each step, however small the model's news in
them. So send less: fewer bits a number, fewer numbers, or fewer dimensions. What is left out is kept and added to the
next step's gradients (error feedback, LAB_ERROR_FEEDBACK): late, not lost.

  predicted   bytes a rank and step, for n numbers of s bytes on N ranks, f = 2(N-1)/N, k = LAB_RATIO·n,
              r = LAB_LOW_RANK:
              dense f·s·n; fp16 f·2n; int8 f·(n + 4); topk (N-1)·(4 + s)k; randomk f·s·k; powersgd f·s·r(m + n) a
              matrix [m, n]. All but topk stay bounded as N grows: their messages can be added on the way. topk sends
              more than dense from N = 1/LAB_RATIO on (in float32)
              one call a bucket, int8 and powersgd two
              at rest a gradient more on every rank, the residual (among the activations, which are all that is in no
              other class)
  the model   width 64, depth 4 unless set: all variants are proven and trained beside each other
  shapes      a bucket [n] flat, of whole gradients; P [m, r], Q [n, r]

The variants; from fp16 on each bucket goes through an all_reduce that sends less
(distlab/techniques/compression/compressors.py):

  dense     our buckets, nothing compressed
  fp16      16 bits a number
  int8      8 bits, one scale a bucket for all ranks, stochastic rounding, sums that cannot overflow
  topk      the largest numbers of a bucket and their places
  randomk   numbers at places that all ranks draw alike
  powersgd  two thin factors a matrix
  ddp_fp16, ddp_powersgd  PyTorch's DistributedDataParallel with its own hooks

LAB_ERROR_FEEDBACK=0 is each without error feedback: what is left out is lost, and what is never among the largest never
moves.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import TypeAlias

import torch.distributed as dist
from torch import Size

from distlab.contract import Build, Mode, Strategy, Variant
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.proof import check_replicas
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.model import Model
from distlab.techniques.compression.compressors import Cast, Compressor, Quantised, RandomK, TopK, rank_seed
from distlab.techniques.compression.powersgd import LowRank
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica, draw_and_broadcast
from distlab.techniques.mesh.grid import Mesh

from . import lesson, pytorch
from .bugs import mistake
from .checks import by_the_formula, claims
from .options import Options
from .predictions import METHODS, cannot, predict, refuse, show, summary

Group: TypeAlias = dist.ProcessGroup
Proof: TypeAlias = Callable[[str, Build], None]
Shapes: TypeAlias = list[Size]  # of the gradients of a bucket


# --- the variants ---


def dense(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Our buckets, whole."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20))


def compressed(compressor_of: Callable[..., Compressor]) -> Build:
    """A replica of which each bucket is summed through a compressor of its own, made for the shapes of its gradients.

    Each does so: values = residual + bucket; a message of them travels; residual = values - what the message says.
    """

    @wraps(compressor_of)
    def build(model: Model, mesh: Mesh, config: Config) -> Strategy:
        draw_and_broadcast(model, mesh.group, config)
        of_bucket = partial(compressor_of, mesh.group, config, config.own(Options))
        size = config.bucket_mib * 2**20
        return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, size, all_reduce_of=of_bucket))

    return build


@compressed
def fp16(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """11 bits of precision and a small range."""
    return Cast(group, feedback=own.error_feedback)


@compressed
def int8(group: Group, config: Config, own: Options, _: Shapes) -> Compressor:
    """Codes on one scale, rounded at random: each rank draws for itself."""
    return Quantised(group, rank_seed(config.seed, group.rank()), feedback=own.error_feedback)


@compressed
def topk(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """The largest."""
    return TopK(group, own.ratio, feedback=own.error_feedback)


@compressed
def randomk(group: Group, config: Config, own: Options, _: Shapes) -> Compressor:
    """Some: all ranks draw the same."""
    return RandomK(group, own.ratio, config.seed, feedback=own.error_feedback)


@compressed
def powersgd(group: Group, config: Config, own: Options, shapes: Shapes) -> Compressor:
    """Two thin factors."""
    return LowRank(group, shapes, own.low_rank, config.seed, feedback=own.error_feedback)


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: topk, which waits for each bucket."""
    draw_and_broadcast(model, mesh.group, config)
    size, ratio = config.bucket_mib * 2**20, config.own(Options).ratio
    buckets = GradientBuckets(
        model.parameters(), mesh.group, size, all_reduce_of=lambda _: lesson.TopK(mesh.group, ratio)
    )
    return Replica(model, config, buckets)


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove, measure; then what was sent and what it cost in loss."""
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    proofs: dict[str, Proof] = dict.fromkeys((*METHODS, "plain"), partial(by_the_formula, lab))
    measured = measure(lab, also=partial(check_replicas, lab), proofs={**proofs, **pytorch.proofs(lab, fp16, powersgd)})
    lab.hold(predictions, measured)
    show(lab, measured)


MODE = Mode(
    variants=(
        *(Variant(each.__name__, each) for each in (dense, fp16, int8, topk, randomk, powersgd)),
        Variant("ddp_fp16", pytorch.ddp_fp16, by_torch=True),
        Variant("ddp_powersgd", pytorch.ddp_powersgd, by_torch=True),
        Variant("plain", plain, by_name=True, like="topk"),
    ),
    headline=("topk", "send the largest hundredth of a gradient, keep the rest for the next step"),
    run=run,
    claims=claims,
    options=Options,
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake,
    gone={
        "per_parameter": "topk sends the largest of each bucket",
        "bf16": "fp16 sends 16 bits a number",
        "sign": "int8 sends the fewest bits a number",
        "topk_plain": "LAB_VARIANT=topk LAB_ERROR_FEEDBACK=0",
        "sign_plain": "LAB_VARIANT=int8 LAB_ERROR_FEEDBACK=0",
        "powersgd_plain": "LAB_VARIANT=powersgd LAB_ERROR_FEEDBACK=0",
        "ddp": "dense sends as much; RUN_MODE=dp has ddp",
    },
    unsaved="keeps a residual of its own on each rank, as large as the gradients, without which a resumed run would "
    "lose what was not sent",
    in_lesson={
        "no_error_feedback": ("bucket.clone() if self.residual is None else bucket + self.residual", "bucket.clone()")
    },
    reading=(
        "experiments/compress/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/compress/__init__.py: the variants, the simplest first, each with its compressor",
        "distlab/techniques/compression/compressors.py: what every compressor does, and what each variant sends",
        "distlab/techniques/compression/powersgd.py: two thin factors in place of a matrix",
        "experiments/compress/checks.py: how each is compared with its paper's formula",
    ),
)
