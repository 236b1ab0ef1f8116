"""16 bits: half the memory and half the bytes on the wire, and what their range and their steps lose.

A float has a range, by its exponent, and steps, by its fraction. fp16 has fine steps and no range: it ends at 2^-24 and at 65504, and
gradients are small. bf16 has the range of float32 and steps of a 128th: gradients live, but an update of less than half a step
leaves no trace. So fp16 needs its loss scaled, and both need float32 weights to add small updates up in.

  predicted   each rank sends 2(N-1)/N x 2P bytes a step, half of float32: gradients are summed over the ranks in their 16 bits
              at rest 2 + 2 bytes a parameter, and 4 more for float32 master weights (with adamw 2 + 2 + 4 + 4 + 4 = 16)
  shapes      inputs [B/N, S] a rank; weights and gradients whole on each, P numbers of 16 bits; masters P of 32

  fp32             weights, gradients and optimizer in float32: what the others are held against
  bf16             all of it in bf16: small updates vanish
  fp16             all of it in fp16: small gradients vanish before that
  fp16_scaled      the loss is scaled, dynamically; unscaled and stepped in float32, rounded back to fp16
  bf16_master      computes in bf16, steps float32 master weights
  fp16_master      computes in fp16 with a scaled loss, steps float32 master weights: mixed precision as it was published
  bf16_stochastic  bf16, and updates are rounded up or down at random: right in the mean, with no master weights

fp32 is proven in float64 against one process. The others cannot be exact: their gradients are held against one process of the same
arithmetic and, where nothing underflows, against float64 too, within some units of the format's precision; their updates to one unit
in the last place; unscaling to the bit. Neither the losses nor what was lost decide. The model is small unless sizes are set, since
16-bit arithmetic is slow on most CPUs; on a GPU (LAB_DEVICE=cuda) the times are the point.
"""

from functools import partial

import torch
import torch.distributed as dist

from experiments.precision.claims import BUGS, VARIANTS, predict, refuse, title
from experiments.precision.formats import show_formats
from experiments.precision.halved import Halved
from experiments.precision.proof import prove
from experiments.precision.seen import observe
from experiments.precision.shown import show_gradients, show_seen
from workers.config import Config
from workers.lab import Lab, Strategy
from workers.parallel.buckets import GradientBuckets
from workers.passes.replicas import check_replicas
from workers.strategies.replica import Replica, begin_alike
from workers.workload.model import Model

__all__ = ["BUGS", "VARIANTS", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """The formats, proof and measure, then what was lost on the way."""
    config = lab.config
    sizes = "line" if config.model == "line" else f"width {config.width}, depth {config.depth}"
    lab.say(f"{sizes}: 2 + 2 bytes a parameter, and 4 for a master weight", "predict")
    show_formats(lab)
    builds = (fp32, bf16, fp16, fp16_scaled, bf16_master, fp16_master, bf16_stochastic)
    proofs = {build.__name__: partial(prove, lab, build.__name__) for build in builds[1:]}
    measured = lab.measure(*builds, proofs=proofs, also=partial(check_replicas, lab))
    predictions = predict(config)
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)
    show_gradients(lab)
    show_seen(lab, {build.__name__: observe(lab, build) for build in builds if lab.wants(build.__name__)})


# --- the variants, in reading order ---


def fp32(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Data parallelism as in dp."""
    begin_alike(model, group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20))


def bf16(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """All of it in bf16."""
    return Halved(model, group, config, torch.bfloat16)


def fp16(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """All of it in fp16."""
    return Halved(model, group, config, torch.float16)


def fp16_scaled(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """A scaled loss; float32 for as long as the update takes."""
    return Halved(model, group, config, torch.float16, scaled=True, stepped="copies")


def bf16_master(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """float32 master weights."""
    return Halved(model, group, config, torch.bfloat16, stepped="masters")


def fp16_master(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """A scaled loss and float32 master weights."""
    return Halved(model, group, config, torch.float16, scaled=True, stepped="masters")


def bf16_stochastic(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Updates in float32, rounded at random."""
    return Halved(model, group, config, torch.bfloat16, stepped="copies", stochastic=True)
