"""Gradients compressed: less on the wire, and what it does to training.

A slow link makes data parallelism wait: S bytes of gradients go around at each step, however small the model's news in them. So
send less: fewer bits a number, fewer numbers, or fewer dimensions. What is left out is kept and added to the next step's
gradients (error feedback, LAB_ERROR_FEEDBACK): late, not lost.

  predicted   bytes a rank and step, for n numbers of s bytes on N ranks, f = 2(N-1)/N, k = LAB_RATIO·n, r = LAB_LOW_RANK
              dense f·s·n; bf16, fp16 f·2n; int8 f·(n + 4); topk (N-1)·(4 + s)k; randomk f·s·k; sign (N-1)·(n/8 + 4);
              powersgd f·s·r(m + n) a matrix [m, n]. All but topk and sign stay bounded as N grows: their messages can be
              added on the way. topk sends more than dense from N = 1/LAB_RATIO on (in float32), sign from N = 64
              at rest a gradient more on every rank, the residual (among the activations, which are all that is in no other class)
  the model   width 64, depth 4 unless set: a dozen variants are proven and trained beside each other
  shapes      a bucket [n] flat, of whole gradients; P [m, r], Q [n, r]

The variants, each an all_reduce of its own for every bucket (workers/parallel/compression.py and its siblings):

  ddp         PyTorch's DistributedDataParallel, nothing compressed: what the others are to beat
  dense       our buckets, nothing compressed
  bf16, fp16  16 bits a number
  int8        8 bits, one scale a bucket for all ranks, stochastic rounding, sums that cannot overflow
  topk        the largest numbers and their places
  randomk     numbers at places that all ranks draw alike
  sign        one bit a number
  powersgd    two thin factors a matrix
  *_plain     topk, sign and powersgd without error feedback: what is left out is lost
  ddp_fp16, ddp_powersgd  PyTorch's own hooks
"""

import torch.distributed as dist

from experiments.compress import torchs
from experiments.compress.claims import OURS, cannot, predict, refuse, sent_bytes, title
from experiments.compress.faults import BUGS
from experiments.compress.methods import METHODS, compressed
from experiments.compress.proofs import by_the_formula
from experiments.compress.shown import show
from experiments.compress.torchs import ddp, ddp_fp16, ddp_powersgd
from workers.config import Config
from workers.lab import Lab, Strategy
from workers.parallel.buckets import GradientBuckets
from workers.passes.replicas import check_replicas
from workers.strategies.replica import Replica, begin_alike
from workers.workload.model import Model

VARIANTS = (
    "ddp", "dense", "bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd",
    "topk_plain", "sign_plain", "powersgd_plain", "ddp_fp16", "ddp_powersgd",
)  # fmt: skip
__all__ = ["BUGS", "VARIANTS", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """Predict, prove, measure; then what was sent and what it cost in loss."""
    config, predictions = lab.config, predict(lab.config)
    lab.say(summary(config), "predict")
    proofs = {
        name: by_the_formula(lab, method, feedback=config.error_feedback and name in METHODS)
        for name, method in OURS.items()
        if name != "dense"
    }
    measured = lab.measure(
        ddp, dense, bf16, fp16, int8, topk, randomk, sign, powersgd, topk_plain, sign_plain, powersgd_plain, ddp_fp16,
        ddp_powersgd, also=lambda name, strategy: check_replicas(lab, name, strategy), cannot=cannot(config),
        proofs=proofs | torchs.proofs(lab),
    )  # fmt: skip
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)
    show(lab, measured)


def summary(config: Config) -> str:
    """One line of what is sent."""
    dense = sent_bytes(config, "dense", config.world_size)
    if not dense:
        return "one rank has nobody to send to: what is left out and comes later shows all the same"
    possible = [name for name in METHODS if name not in cannot(config)]
    parts = [f"{name} {sent_bytes(config, name, config.world_size) / dense:.3f}" for name in possible]
    return f"a rank sends {dense / 1e6:.3g} MB a step dense; as part of it: {', '.join(parts)}"


# --- the variants, in reading order ---


def dense(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Our buckets, whole."""
    begin_alike(model, group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20))


def bf16(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """8 bits of precision and float32's range."""
    return compressed(model, group, config, "bf16", feedback=config.error_feedback)


def fp16(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """11 bits of precision and a small range."""
    return compressed(model, group, config, "fp16", feedback=config.error_feedback)


def int8(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Codes on one scale."""
    return compressed(model, group, config, "int8", feedback=config.error_feedback)


def topk(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The largest."""
    return compressed(model, group, config, "topk", feedback=config.error_feedback)


def randomk(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Some."""
    return compressed(model, group, config, "randomk", feedback=config.error_feedback)


def sign(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """One bit."""
    return compressed(model, group, config, "sign", feedback=config.error_feedback)


def powersgd(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Two thin factors."""
    return compressed(model, group, config, "powersgd", feedback=config.error_feedback)


def topk_plain(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The largest, and the rest is lost: what is never among them never moves."""
    return compressed(model, group, config, "topk", feedback=False)


def sign_plain(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """One bit, and the rest is lost."""
    return compressed(model, group, config, "sign", feedback=False)


def powersgd_plain(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Two thin factors, and what lies outside of them is lost."""
    return compressed(model, group, config, "powersgd", feedback=False)
