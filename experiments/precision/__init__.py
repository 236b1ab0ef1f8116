"""16-bit training: half the memory and half the bytes sent, and what the formats' range and precision lose.

A float has a range, set by its exponent, and a precision, set by its fraction. fp16 is precise but has little range:
from 2^-24 to 65504, and gradients are small. bf16 has the range of float32 but steps of 1/128: gradients survive, but
an update below half a step is lost. So fp16 needs loss scaling, and both need float32 weights to accumulate small
updates.

  predicted   each rank sends 2(N-1)/N x 2P bytes per step, half of float32: gradients are summed in 16 bits
              at rest 2 + 2 bytes per parameter, 4 more for float32 master weights (with adamw 2 + 2 + 4 + 4 + 4 = 16)
  shapes      inputs [B/N, S] per rank; all weights and gradients on each, P numbers of 16 bits; masters P of 32

  bf16         everything in bf16: small updates vanish
  fp16         everything in fp16: small gradients vanish already
  fp32         weights, gradients and optimizer in float32: the baseline
  fp16_scaled  dynamic loss scaling; gradients are unscaled and stepped in float32, weights rounded back to fp16
  bf16_master  computes in bf16, steps float32 master weights
  autocast     PyTorch's own torch.autocast with GradScaler: float32 weights and gradients, passes in fp16

fp32 is proven in float64 against one process. The others cannot be exact: their gradients are compared with one process
of the same arithmetic and, where nothing underflows, also with float64, within some units of the format's precision;
their updates to half a unit in the last place; unscaling to the bit. Overflows are injected: the scale, the skipped
step and the weights must follow the rule. Losses and lost numbers are informational. The model is small by default,
since 16-bit arithmetic is slow on most CPUs; on a GPU (LAB_DEVICE=cuda) the times are of interest.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.contract import Build, Mistakes, Mode, Needs, Strategy, Variant
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.proof import check_replicas
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import make_optimizer
from distlab.lab.workload.user_model import is_own
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import DDPGradients, Replica, draw_and_broadcast
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.precision import LossScale, Masters, all_finite

from . import lesson
from .checks import check_overflows, claims, prove
from .display import observe, percent, show_traces
from .options import Options
from .predictions import SCALED, converted, predict, refuse

mistake = Mistakes()


# --- variants entirely in 16 bits ---


class HalfPrecision(Replica):
    """Everything in `dtype`, 16 bits: weights, gradients, their sum over the ranks, and the optimizer's state."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config, dtype: torch.dtype) -> None:
        model.to(dtype)  # every float32 weight is rounded here, and its exact value is lost
        buckets = GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20)  # in the weights' dtype
        super().__init__(model, config, buckets)
        self.dtype = dtype

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Run the passes of any replica: gradients too small for the format become zero."""
        return super().backward([converted(microbatch, self.dtype) for microbatch in microbatches])

    def update(self) -> None:
        """Compute w - lr·g, rounded to 16 bits: if w is the nearest number, the update is lost."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()


def half(model: Model, mesh: Mesh, config: Config, dtype: torch.dtype) -> Strategy:
    """Everything in `dtype`."""
    draw_and_broadcast(model, mesh.group, config)
    return HalfPrecision(model, mesh.group, config, dtype)


def fp32(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Data parallelism in float32, as in dp."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20))


# PyTorch's own: autocast computes in 16 bits where that is safe, GradScaler scales the loss, and DDP sums the
# gradients, which stay float32 as the weights do ---


class Autocast(Replica):
    """float32 weights, passes in fp16 where autocast chooses it, and a loss that GradScaler scales.

    In float64 autocast changes nothing, so the proof compares it like any other variant.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=config.bucket_mib, init_sync=False)
        super().__init__(model, config, DDPGradients(wrapped), forward=wrapped)
        self.num_ranks = group.size()
        parameters, rate = list(model.parameters()), config.learning_rate
        adam = config.optimizer == "adamw"
        self.stepped = torch.optim.AdamW(parameters, rate) if adam else torch.optim.SGD(parameters, rate)
        self.optimizer = self.stepped
        self.scaler = torch.amp.GradScaler(config.device)
        self.device_type = config.device

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Run the passes; DDP averages over the ranks and we sum, so gradients are multiplied at the end."""
        self.scale = float(self.scaler.scale(torch.ones((), device=self.device_type)))
        with torch.autocast(self.device_type, torch.float16):
            loss = super().backward(microbatches)
        self.scaler.unscale_(self.stepped)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_ranks)
        return loss

    def update(self) -> None:
        """Step with GradScaler, which skips if a gradient is inf or NaN."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.stepped)
        self.scaler.update()


def autocast(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's own: torch.autocast in fp16 with GradScaler, around float32 weights, below DDP."""
    draw_and_broadcast(model, mesh.group, config)
    return Autocast(model, mesh.group, config)


# --- variants with float32 weights or loss scaling ---


class MixedPrecision(HalfPrecision):
    """Computes in 16 bits and steps in float32: with temporary copies of the weights, or with permanent masters.

    Args:
        scaled: whether the loss is scaled, so that small gradients do not vanish.
        kept: whether the float32 weights are permanent: masters accumulate updates that 16 bits would lose.
    """

    def __init__(
        self, model: Model, group: dist.ProcessGroup, config: Config, dtype: torch.dtype, *, scaled: bool = False,
        persistent: bool = False,
    ) -> None:  # fmt: skip
        exact = [parameter.detach().float().clone() for parameter in model.parameters()]
        super().__init__(model, group, config, dtype)
        self.loss_scale = LossScale() if scaled else None
        self.scale = self.loss_scale.value if self.loss_scale else 1.0  # Replica multiplies the loss by it
        self.masters = Masters(list(model.parameters()), exact, persistent=persistent)
        self.optimizer = make_optimizer(self.masters.parameters, config)

    def deliver(self) -> None:
        """Copy the unscaled gradients to the masters; then clip them by their true norm."""
        self.masters.deliver(self.scale)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.masters.parameters, self.config.clip)

    def update(self) -> None:
        """With loss scaling, step only if all gradients are finite, then adjust the scale."""
        summed = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        is_finite = self.loss_scale is None or all_finite(summed)
        if is_finite:
            self.deliver()
            self.optimizer.step()
            self.masters.refresh()  # rounded into the computing weights
        if self.loss_scale is not None:
            self.loss_scale.adjust(overflowed=not is_finite)
            self.scale = self.loss_scale.value


@mistake("unscaled_clip", check="clipped gradients", part="MixedPrecision", of=SCALED[:1], needs=Needs(ranks=1))
class ClippedBeforeUnscaled(MixedPrecision):
    """Gradients are clipped before unscaling: their norm is 65536 times too large, so the unscaled gradients are far
    too small."""

    def deliver(self) -> None:
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.masters.computing, self.config.clip)
        self.masters.deliver(self.scale)


def mixed(model: Model, mesh: Mesh, config: Config, **options: Any) -> Strategy:
    """Compute in 16 bits with the options of `MixedPrecision`."""
    draw_and_broadcast(model, mesh.group, config)
    return MixedPrecision(model, mesh.group, config, **options)


class LessonMixedPrecision(MixedPrecision):
    """The lesson's masters and loss scale, in the common step."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config, dtype: torch.dtype) -> None:
        masters: Any = lesson.Masters(model.parameters())
        super().__init__(model, group, config, dtype, scaled=True, persistent=True)
        scale: Any = lesson.LossScale()
        self.masters, self.loss_scale, masters.persistent = masters, scale, True
        self.optimizer = make_optimizer(masters.parameters, config)


def plain(model: Model, mesh: Mesh, config: Config, dtype: torch.dtype = torch.float16) -> Strategy:
    """The lesson on one page: fp16_scaled with permanent float32 weights."""
    draw_and_broadcast(model, mesh.group, config)
    return LessonMixedPrecision(model, mesh.group, config, dtype)


# --- the run ---


def prove_16_bit(lab: Lab, name: str, build: Build) -> None:
    """Prove a 16-bit variant, with injected overflows that a few steps would not have."""
    prove(lab, name, build)
    if name in SCALED:
        check_overflows(lab, name, build)


def run(lab: Lab) -> None:
    config, predictions = lab.config, predict(lab.config)
    sizes = "line" if config.model == "line" else f"width {config.width}, depth {config.depth}"
    lab.say(f"{sizes}: 2 + 2 bytes per parameter, and 4 for a master weight", "predict")
    half_names = [name for name in lab.mode.by_hand if name != "fp32"]
    measured = measure(
        lab, also=partial(check_replicas, lab), proofs=dict.fromkeys(half_names, partial(prove_16_bit, lab))
    )
    lab.compare_predictions(predictions, measured)
    with lab.work.of(config.steps * sum(map(lab.wants, lab.mode.names)), "observed steps"):
        traces = {
            each.name: observe(lab, each.name, each.build)
            for each in lab.mode.variants
            if each.build and lab.wants(each.name) and not is_own(each.name)
        }
    lost = ", ".join(f"{name} {percent(each.underflowed[0])}" for name, each in traces.items() if each.underflowed)
    lab.note("underflow", f"share of the first step's gradients that became 0: {lost}")
    show_traces(lab, traces)


MODE = Mode(
    variants=(
        Variant("bf16", partial(half, dtype=torch.bfloat16)),
        Variant("fp16", partial(half, dtype=torch.float16)),
        Variant("fp32", fp32),
        Variant("fp16_scaled", partial(mixed, dtype=torch.float16, scaled=True)),
        Variant("bf16_master", partial(mixed, dtype=torch.bfloat16, persistent=True)),
        Variant("autocast", autocast, by_torch=True),
        Variant("plain", plain, by_name=True),
    ),
    headline=("bf16", "weights, gradients and messages in 16 bits, half the bytes of everything"),
    run=run,
    claims=claims,
    options=Options,
    predict=predict,
    refuse=refuse,
    mistakes=mistake,
    gone={
        "fp16_master": "fp16_scaled scales the loss, bf16_master keeps float32 masters",
        "bf16_stochastic": "bf16_master keeps what bf16 rounds away",
    },
    unsaved="does not save the loss scale",
    reading=(
        "experiments/precision/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/precision/__init__.py: the variants, first those entirely in 16 bits",
        "distlab/techniques/precision/__init__.py: float32 master weights, and loss scaling",
        "experiments/precision/checks.py: which checks are exact, and the tolerances of the others",
    ),
)
