"""The proof of the 16-bit variants: exact checks where possible, and tolerances of some units of the format.

  gradients          N ranks against one process with the same arithmetic: only the order of sums differs
  float64 gradients  against exact ones at the same weights, if nothing underflows: not for plain fp16
  given              the optimizer's input is the summed gradient without the scale, to the bit
  clipped gradients  with LAB_CLIP: the optimizer's input against the summed gradient, clipped
  update             weights against w - lr·g of the optimizer's input, from the weights of the last step, in units in
                     the last place: half a unit for rounding to nearest
  first masters      masters begin as the float32 weights, to the bit
  copied back        the computing weights are the rounded masters
  unscaled           in float32, without under- or overflow: scaling and unscaling changes no bit
  replicas           all ranks have the same weights, to the bit

Scaled variants also get injected overflows (below).

Gradients are compared by the norm of the difference divided by the norm, in units of the format's epsilon. All proofs
use plain SGD: Adam would cancel a wrong scale.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.contract import Build, Claims, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Worst, largest, largest_difference, relative_norm
from distlab.lab.verify.proof import check_replicas
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import PlainSGD
from distlab.lab.workload.reference import gradients, plain
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.precision import ulp

from .display import flat, gradient_of, stepped_weights
from .predictions import SCALED, converted

SAME_ARITHMETIC, EXACT = 8.0, 16.0  # epsilons: a different order of sums; all roundings of forward and backward
# Rounding to nearest: half a unit of the 16 bits, and half a float32 unit, which is 2^-13 of an fp16 unit.
NEAREST = 0.5 + 2.0**-14
# Two roundings: near its smallest numbers fp16 also rounds lr·g, by up to half a unit of an equally small weight.
TWO_ROUNDINGS = 1.0
LAST_PLACE = "units in the last place"
LEARNING_RATE = 2.0**-7  # a power of two: its product with a gradient is exact, so that an update is rounded once
STEPS = 2
MOST_HALVINGS = 40  # from 65536 to far below 1


class Witness(PlainSGD):
    """Plain SGD that records its gradients, as a vector in float64."""

    received: Tensor | None = None

    def step(self) -> None:
        self.received = flat(parameter.grad for parameter in self.parameters)
        super().step()


def prove(lab: Lab, name: str, build: Build) -> None:
    config = plain(lab.config, lr=LEARNING_RATE, clip=lab.config.clip)
    batches = lab.batches(torch.float32, proof=True)
    strategy = build(lab.model(torch.float32), lab.mesh, config)
    assert isinstance(strategy, Replica)
    assert isinstance(strategy.optimizer, PlainSGD)
    strategy.optimizer = Witness(strategy.optimizer.parameters, LEARNING_RATE)
    start = flat(stepped_weights(strategy))
    if stepped_weights(strategy)[0].dtype == torch.float32:
        masters = largest_difference(start, flat(lab.model(torch.float32).parameters()))
        lab.check("first masters", masters, 0.0, name)
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        backward(strategy, lab.microbatches(batches, step))
        lab.at(step, f"one process, beside {name}")
        if lab.rank == 0:
            check_gradients(lab, name, strategy, batches, step)
        start = check_update(lab, name, strategy, strategy.optimizer, start)
        lab.exchange.barrier("one process")
    check_replicas(lab, name, strategy)
    if name in SCALED:
        check_unscaled(lab, name, build, lab.microbatches(batches, 0))


def backward(strategy: Replica, parts: list[Microbatch]) -> None:
    """Compute gradients at the largest scale without an overflow: every overflow halves it, as in training."""
    for _ in range(MOST_HALVINGS):
        strategy.backward(parts)
        scaled = getattr(strategy, "loss_scale", None) is not None
        if not scaled or summed_gradient(strategy).isfinite().all():
            return
        strategy.update()


def check_gradients(lab: Lab, name: str, strategy: Replica, batches: Batches, step: int) -> None:
    """Compare the sum over all ranks, on rank 0, with one process in the same arithmetic and in float64."""
    dtype, found, batch = dtype_of(strategy), summed_gradient(strategy), batches.full(step)
    wanted = {"gradients": (one_process(strategy.model, batch, dtype, strategy.scale), SAME_ARITHMETIC)}
    if name != "fp16":
        wanted["float64 gradients"] = one_process(strategy.model, batch, torch.float64, 1.0), EXACT
    for check, (alone, tolerance) in wanted.items():
        off = epsilons(found, alone, dtype)
        lab.check(check, off, tolerance, name, unit=of_type("epsilons", dtype))


def check_update(lab: Lab, name: str, strategy: Replica, witness: Witness, start: Tensor) -> Tensor:
    """Check the optimizer's input and the update of the weights `start` on every rank; return the new weights."""
    wanted, dtype = summed_gradient(strategy), dtype_of(strategy)
    witness.received = None
    strategy.update()
    received, after = witness.received, stepped_weights(strategy)
    stored = after[0].dtype
    off, detail = math.inf, "no step was taken"
    if received is not None:
        exact, detail = start - LEARNING_RATE * received, ""
        off = largest((flat(after) - exact) / ulp(exact, stored))
        if strategy.config.clip is None:
            description = "the optimizer's input minus the summed gradient"
            lab.check("given", largest_difference(received, wanted), 0.0, name, description)
        else:
            error = epsilons(received, clipped(wanted, strategy.config.clip), dtype)  # LAB_BUG=unscaled_clip
            lab.check("clipped gradients", error, SAME_ARITHMETIC, name, unit=of_type("epsilons", dtype))
    tolerance = TWO_ROUNDINGS if name == "fp16" else NEAREST
    lab.check("update", off, tolerance, name, detail, unit=of_type(LAST_PLACE, stored))
    if stored != dtype:
        rounded = flat(weight.detach().to(dtype) for weight in after)
        copies = largest_difference(flat(strategy.model.parameters()), rounded)
        lab.check("copied back", copies, 0.0, name)
    return flat(after)


def clipped(gradient: Tensor, clip: float) -> Tensor:
    return gradient.mul(min(1.0, clip / gradient.norm().item()))


def of_type(unit: str, dtype: torch.dtype) -> str:
    """Return a unit such as `epsilons of bfloat16`."""
    return f"{unit} of {str(dtype).removeprefix('torch.')}"


def check_unscaled(lab: Lab, name: str, build: Build, parts: list[Microbatch]) -> None:
    """Check that a scale, a power of two, changes no digit: the float32 variant equals a replica without a scale."""
    model, bucket_bytes = lab.model(torch.float32), lab.config.bucket_mib * 2**20  # of one size: added in one order
    exact = Replica(model, lab.config, GradientBuckets(model.parameters(), lab.mesh.group, bucket_bytes))
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config, dtype=torch.float32)
    assert isinstance(strategy, Replica)
    for each in (strategy, exact):
        each.backward(parts)
    off = largest_difference(summed_gradient(strategy), summed_gradient(exact))
    lab.check("unscaled", off, 0.0, name)


def one_process(model: Model, batch: Microbatch, dtype: torch.dtype, scale: float) -> Tensor:
    """Return the unscaled gradient of the batch at `model`'s weights, computed in `dtype`, as a float64 vector."""
    alone, part = copy.deepcopy(model).to(dtype), converted(batch, dtype)
    return flat(gradients(alone, [part._replace(share=part.share * scale)])[1]) / scale


def dtype_of(strategy: Replica) -> torch.dtype:
    return next(strategy.model.parameters()).dtype


def summed_gradient(strategy: Replica) -> Tensor:
    """Return the summed gradient over all ranks, unscaled, as a float64 vector."""
    return gradient_of(strategy) / strategy.scale


def epsilons(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """Return the norm of the difference divided by the norm, in epsilons of `dtype`."""
    return relative_norm(found - wanted, wanted.norm()) / torch.finfo(dtype).eps


# Injected overflows, and their required effects: on the scale, on the skipped step, on the weights.
#
# A short run may never overflow, and never takes 2000 good steps in a row. So a scaled variant gets a test sequence: a
# rank's loss that is 2^40 times too large, a single inf and a single NaN in the summed gradient, and good steps between
# them, two of which are set to be the 2000th. For each step
#
#     loss scale         scale and count of good steps follow torch's own rule (torch._amp_update_scale_, which
#                        GradScaler calls), for the same gradients
#     skipped            with a non-finite gradient no weight moves and the optimizer is not called; else it is
#     clipped gradients  the optimizer's input is clip(g/S): unscaled before the norm is bounded
#     weights            over all taken steps, w - lr·clip(g/S) in float64 from the first weights on
#
# The norm is bounded by LAB_CLIP or CLIP, so that every run tests the order of clipping and unscaling.

CLIP = 0.05
TOO_LARGE = 2.0**40  # fp16 ranges from 2^-24 to 2^16: any number in it but zero overflows with this factor
SCALE, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000  # torch.amp.GradScaler's defaults
# The kind of each step, and the count of good steps to set before it; None: unchanged.
OVERFLOW_STEPS: tuple[tuple[str, int | None], ...] = (
    ("a rank", None), ("good", None), ("one inf", INTERVAL - 1), ("good", None), ("good", INTERVAL - 1),
    ("good", None), ("one nan", None), ("good", None),
)  # fmt: skip


class Rule:
    """The scale by torch's rule."""

    def __init__(self, scale: float) -> None:
        self.scale, self.good = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)

    def adjust(self, *, overflowed: bool) -> None:
        torch._amp_update_scale_(self.scale, self.good, torch.tensor(float(overflowed)), GROWTH, BACKOFF, INTERVAL)


class OverflowTest:
    """A scaled strategy, the rule, and the largest difference so far of each kind."""

    def __init__(self, strategy: Replica, witness: Witness, clip: float) -> None:
        self.strategy, self.witness, self.clip = strategy, witness, clip
        self.loss_scale = strategy.loss_scale  # type: ignore[attr-defined]
        self.rule = Rule(strategy.scale)
        self.exact = flat(stepped_weights(strategy))  # by the formula
        self.unit = torch.zeros_like(self.exact)  # in the last place, the largest so far
        self.steps_taken = 0
        self.seen = Worst(("loss scale", "skipped", "clipped gradients", "weights"))

    def set_good_steps(self, good_steps: int) -> None:
        """Set the count of steps without an overflow."""
        self.loss_scale.good_steps = good_steps
        self.rule.good.fill_(good_steps)

    def update(self, *, overflow_expected: bool) -> None:
        """Run one update. With `overflow_expected` its gradients must have an overflow; without they may have one."""
        gradient, before, scaled_by = summed_gradient(self.strategy), self.weights(), self.strategy.scale
        self.witness.received = None
        self.strategy.update()
        overflowed = not bool(gradient.isfinite().all())
        self.rule.adjust(overflowed=overflowed)
        for scale in (self.strategy.scale, self.loss_scale.value):
            self.seen.note("loss scale", abs(math.log2(scale / self.rule.scale.item())) if scale > 0 else math.inf)
        self.seen.note("loss scale", abs(self.loss_scale.good_steps - int(self.rule.good)))
        if overflowed:
            self.seen.note("skipped", largest_difference(self.weights(), before))
        if (
            overflowed == (self.witness.received is not None)
            or (overflow_expected and not overflowed)
            or scaled_by == 0
        ):
            self.seen.note("skipped", math.inf)  # a step was wrongly taken or skipped; or there was no overflow
        if self.witness.received is not None and not overflowed:
            self.follow(gradient, self.witness.received)

    def follow(self, gradient: Tensor, received: Tensor) -> None:
        off = epsilons(received, clipped(gradient, self.clip), dtype_of(self.strategy))
        self.seen.note("clipped gradients", off)
        self.exact = self.exact - LEARNING_RATE * received
        self.steps_taken += 1
        stepped = stepped_weights(self.strategy)
        self.unit = torch.maximum(self.unit, ulp(self.exact, stepped[0].dtype))
        self.seen.note("weights", largest((flat(stepped) - self.exact) / self.unit) / self.steps_taken)

    def weights(self) -> Tensor:
        return torch.cat([flat(self.strategy.model.parameters()), flat(stepped_weights(self.strategy))])


def check_overflows(lab: Lab, name: str, build: Build) -> None:
    """Run all steps of one scaled variant, on every rank; only gradients are sent."""
    clip = lab.config.clip or CLIP
    config = plain(lab.config, lr=LEARNING_RATE, clip=clip)
    strategy = build(lab.model(torch.float32), lab.mesh, config)
    assert isinstance(strategy, Replica)
    witness = Witness(strategy.optimizer.param_groups[0]["params"], LEARNING_RATE)
    strategy.optimizer = witness
    first_error = abs(math.log2(strategy.scale / SCALE))
    parts = lab.microbatches(lab.batches(torch.float32, proof=True), 0)
    backward(strategy, parts)  # down to a scale at which good steps do not overflow
    found = OverflowTest(strategy, witness, clip)
    found.seen.note("loss scale", first_error)
    for step, (kind, good_steps) in enumerate(OVERFLOW_STEPS):
        lab.at(step, f"overflows of {name}")
        if good_steps is not None:
            found.set_good_steps(good_steps)
        overflow(strategy, kind, parts, mine=step % lab.world_size == lab.rank)
        found.update(overflow_expected=kind != "good")
    overflows = sum(kind != "good" for kind, _ in OVERFLOW_STEPS)
    details = {
        "loss scale": (
            0.0,
            "powers of two and good steps",
            f"after {len(OVERFLOW_STEPS)} steps with {overflows} overflows",
        ),
        "skipped": (0.0, "", "change of weights in skipped steps; infinite if a wrong step was skipped or taken"),
        "clipped gradients": (SAME_ARITHMETIC, of_type("epsilons", dtype_of(strategy)), ""),
        "weights": (1.0, LAST_PLACE, f"per step, of {found.steps_taken} steps"),
    }
    for check, (tolerance, unit, detail) in details.items():
        lab.check(check, found.seen.found[check].value, tolerance, name, detail, unit=unit)


def overflow(strategy: Replica, kind: str, parts: list[Microbatch], *, mine: bool) -> None:
    """Run one backward pass, good or with a non-finite number; `mine` if this rank is the faulty one."""
    if kind == "a rank" and mine:
        parts = [part._replace(share=part.share * TOO_LARGE) for part in parts]
    strategy.backward(parts)
    if kind.startswith("one"):
        last = [parameter.grad for parameter in strategy.model.parameters() if parameter.grad is not None][-1]
        last.view(-1)[-1] = float(kind.removeprefix("one "))


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks: bytes of all variants, the formats' tolerances, and the effects of overflows."""
    half_names, proof, clips = [name for name in mode.by_hand if name != "fp32"], config.proof, config.clip is not None
    exact = [name for name in half_names if name != "fp16"]
    masters, gradients = "test_wrong_master_weights_fail_the_run", "test_wrong_gradients_fail_the_run"
    return (
        *measured(mode, config, not_compared=half_names),
        Claims(("called bytes", "wire bytes", "rest bytes"), mode.by_hand),
        Claims(("replicas",), mode.by_hand, when=proof),
        Claims(("gradients",), half_names, one=True, times=STEPS, when=proof, fails_in=gradients),
        Claims(("float64 gradients",), exact, one=True, times=STEPS, when=proof, fails_in=gradients),
        Claims(
            ("given",),
            half_names,
            times=STEPS,
            when=proof and not clips,
            fails_in="test_wrongly_unscaled_gradients_fail_the_run",
        ),
        Claims(("clipped gradients",), half_names, times=STEPS, when=proof and clips),
        Claims(("update",), half_names, times=STEPS, when=proof, fails_in=masters),
        Claims(("unscaled",), SCALED, when=proof, fails_in=gradients),
        Claims(("loss scale",), SCALED, when=proof, fails_in="test_a_wrong_loss_scale_fails_the_run"),
        Claims(("skipped",), SCALED, when=proof, fails_in="test_wrong_skipping_fails_the_run"),
        Claims(("clipped gradients",), SCALED, when=proof),
        Claims(("weights",), SCALED, when=proof, fails_in=masters),
        Claims(("first masters",), ("bf16_master", "plain"), when=proof, fails_in=masters),
        Claims(("copied back",), ("bf16_master", "plain"), times=STEPS, when=proof, fails_in=masters),
    )
