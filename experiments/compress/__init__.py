"""Gradient compression: fewer bytes per step, and the effect on training.

On a slow link data parallelism waits: each step sends S bytes of gradients, however little information they have. So
send less: fewer bits per number, fewer numbers, or fewer dimensions. The unsent part is kept and added to the next
step's gradients (error feedback, LAB_ERROR_FEEDBACK): it is late, not lost.

  predicted   bytes per rank and step, for n numbers of s bytes on N ranks, f = 2(N-1)/N, k = LAB_RATIO·n,
              r = LAB_LOW_RANK:
              dense f·s·n; fp16 f·2n; int8 f·(n + 4); topk (N-1)·(4 + s)k; randomk f·s·k; powersgd f·s·r(m + n) per
              matrix [m, n]. All but topk stay bounded as N grows, since their messages can be added. topk sends more
              than dense from N = 1/LAB_RATIO on (in float32)
              one call per bucket, int8 and powersgd two
              at rest one more gradient on every rank, the residual (it is counted as activations, the class of
              everything that is in no other class)
  the model   width 64, depth 4 by default: all variants are proven and trained in the same run
  shapes      a bucket [n] flat, of whole gradients; P [m, r], Q [n, r]

The variants; from fp16 on each bucket has its own compressor (distlab/techniques/compression/compressors.py):

  dense     our buckets, nothing compressed
  fp16      16 bits per number
  int8      8 bits, one scale per bucket for all ranks, stochastic rounding, sums that cannot overflow
  topk      the largest numbers of a bucket and their positions
  randomk   numbers at random positions, equal on all ranks
  powersgd  two low-rank factors per matrix
  ddp_fp16, ddp_powersgd  PyTorch's DistributedDataParallel with its own hooks

LAB_ERROR_FEEDBACK=0 disables error feedback: the unsent part is lost, and a number that is never among the largest
never changes.
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
from .checks import claims, prove_by_formula
from .options import Options
from .predictions import METHODS, cannot, predict, refuse, show, summary

Group: TypeAlias = dist.ProcessGroup
Proof: TypeAlias = Callable[[str, Build], None]
Shapes: TypeAlias = list[Size]  # of the gradients of a bucket


# --- the variants ---


def dense(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Our buckets, uncompressed."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20))


def compressed(make_compressor: Callable[..., Compressor]) -> Build:
    """Build a replica in which each bucket has its own compressor, made for the shapes of its gradients.

    Each computes values = residual + bucket, sends a message of them, and keeps residual = values - message.
    """

    @wraps(make_compressor)
    def build(model: Model, mesh: Mesh, config: Config) -> Strategy:
        draw_and_broadcast(model, mesh.group, config)
        compressor_of_bucket = partial(make_compressor, mesh.group, config, config.own(Options))
        size = config.bucket_mib * 2**20
        return Replica(
            model, config, GradientBuckets(model.parameters(), mesh.group, size, make_all_reduce=compressor_of_bucket)
        )

    return build


@compressed
def fp16(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """16 bits with 11 bits of precision and a small range."""
    return Cast(group, feedback=own.error_feedback)


@compressed
def int8(group: Group, config: Config, own: Options, _: Shapes) -> Compressor:
    """Codes with a common scale, rounded at random: each rank has its own seed."""
    return Quantised(group, rank_seed(config.seed, group.rank()), feedback=own.error_feedback)


@compressed
def topk(group: Group, _: Config, own: Options, __: Shapes) -> Compressor:
    """The numbers of largest magnitude."""
    return TopK(group, own.ratio, feedback=own.error_feedback)


@compressed
def randomk(group: Group, config: Config, own: Options, _: Shapes) -> Compressor:
    """Random numbers, at the same positions on all ranks."""
    return RandomK(group, own.ratio, config.seed, feedback=own.error_feedback)


@compressed
def powersgd(group: Group, config: Config, own: Options, shapes: Shapes) -> Compressor:
    """Two low-rank factors per matrix."""
    return LowRank(group, shapes, own.low_rank, config.seed, feedback=own.error_feedback)


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: topk without overlap."""
    draw_and_broadcast(model, mesh.group, config)
    size, ratio = config.bucket_mib * 2**20, config.own(Options).ratio
    buckets = GradientBuckets(
        model.parameters(), mesh.group, size, make_all_reduce=lambda _: lesson.TopK(mesh.group, ratio)
    )
    return Replica(model, config, buckets)


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove and measure; then show the bytes sent and the losses reached."""
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    proofs: dict[str, Proof] = dict.fromkeys((*METHODS, "plain"), partial(prove_by_formula, lab))
    measured = measure(lab, also=partial(check_replicas, lab), proofs={**proofs, **pytorch.proofs(lab, fp16, powersgd)})
    lab.compare_predictions(predictions, measured)
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
        "bf16": "fp16 sends 16 bits per number",
        "sign": "int8 sends the fewest bits per number",
        "topk_plain": "LAB_VARIANT=topk LAB_ERROR_FEEDBACK=0",
        "sign_plain": "LAB_VARIANT=int8 LAB_ERROR_FEEDBACK=0",
        "powersgd_plain": "LAB_VARIANT=powersgd LAB_ERROR_FEEDBACK=0",
        "ddp": "dense sends as much; RUN_MODE=dp has ddp",
    },
    unsaved="has a residual on each rank, as large as the gradients, without which a resumed run would lose the "
    "unsent part",
    in_lesson={
        "no_error_feedback": ("bucket.clone() if self.residual is None else bucket + self.residual", "bucket.clone()")
    },
    reading=(
        "experiments/compress/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/compress/__init__.py: the variants, the simplest first, each with its compressor",
        "distlab/techniques/compression/compressors.py: the steps of every compressor, and the message of each variant",
        "distlab/techniques/compression/powersgd.py: two thin factors in place of a matrix",
        "experiments/compress/checks.py: how each is compared with its paper's formula",
    ),
)
