"""Check the timed pass against a single process in the same dtype, and against audits of sampled steps.

The proof uses float64, a small rate and temporary strategies, so it cannot detect errors that only float32 or the timed
strategies have. So before the first step, the last one and one in between drawn by LAB_SEED, rank 0 gathers weights and
optimizer state (`Strategy.full`), and again after it. From the weights before, one process computes loss and gradient
of the whole batch in LAB_DTYPE, and the formulas below the new weights and state. Variants with equal weights share
that computation, as all do before the first step. None of it is timed: ranks wait for each other before a step begins.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.contract import Held, Strategy
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Difference, Worst, digest_of, distance
from distlab.lab.verify.proof import summed_losses
from distlab.lab.workload import reference
from distlab.lab.workload.data import Batches
from distlab.lab.workload.reference import Losses
from distlab.techniques.collectives.sharded_tensor import LocalShard

# --- one process ---
#
# Ranks add in another order than one process, so losses differ by rounding, and the difference grows from step to step,
# depending on the dtype, the number of terms and steps, the learning rate and the loss's curvature. No formula of these
# is tight enough to detect a bug in 16 bits. So a twin is trained on rank 1: its weights begin one unit in the last
# place off, and it adds each batch in as many parts as there are ranks. The ranks may differ by MARGIN times the twin's
# difference, plus the rounding of the loss, a sum of n terms, which Higham and Mary (2019, "A New Approach to
# Probabilistic Rounding Error Analysis", theorem 2.4) bound by sqrt(n) units.

# In all modes, models and dtypes, ranks differed by up to twice the twin's difference; bugs by at least 100 times.
MARGIN = 8.0


@dataclass(frozen=True)
class ReferenceRun:
    """The single process's run, on rank 0."""

    losses: list[float]  # of every step
    allowed: list[float]  # the allowed difference of a rank's, up to the first loss that is not finite
    gradients: dict[str, float]  # the norm of each parameter's first gradient
    rounding: dict[str, float]  # the possible effect of rounding on these norms


def one_process(lab: Lab, batches: Batches, dtype: torch.dtype, *, masters: bool = False) -> ReferenceRun | None:
    """Run the single process on rank 0, with or without float32 `masters`; return None on other ranks, or without the
    proof, since a model may not fit into one process."""
    lab.at(0, "one process")
    steps = lab.config.steps if lab.config.proof else 0
    parts = max(2, lab.world_size * lab.config.num_microbatches)

    def train(steps: int, *, is_twin: bool) -> Losses:
        model = lab.model(dtype)
        if is_twin:
            reference.move_by_a_unit(model, lab.config.seed)
            return reference.losses(model, batches, lab.config, steps, masters=masters, parts=parts)
        model.register_forward_hook(lambda *_: lab.work.advance())  # each batch is one pass
        with lab.work.of(steps, "steps while the others wait"):
            return reference.losses(model, batches, lab.config, steps, masters=masters)

    own = train(steps, is_twin=False) if steps and lab.rank == 0 else None
    twins = train(1, is_twin=True).first if own is not None else {}
    last = steps and lab.rank == min(1, lab.world_size - 1)
    twin = lab.exchange.everyone("one process", train(steps, is_twin=True).values if last else [])
    if own is None:
        return None
    terms = batches.batch * batches.samples.terms
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * math.sqrt(terms)
    norms = {name: gradient.double().norm().item() for name, gradient in own.first.items()}
    rounding = {
        name: MARGIN * distance(gradient, twins[name]) + unit * norms[name] for name, gradient in own.first.items()
    }
    return ReferenceRun(own.values, allowed(own.values, next(filter(None, twin)), unit), norms, rounding)


def allowed(losses: Sequence[float], twin: Sequence[float], unit: float) -> list[float]:
    """Return MARGIN times the twin's largest difference so far, plus `unit` of the loss, until one is not finite."""
    bounds: list[float] = []
    gap = largest = 0.0
    for own, other in zip(losses, twin, strict=True):
        if not (math.isfinite(own) and math.isfinite(other)):
            break
        gap, largest = max(gap, abs(own - other)), max(largest, abs(own))
        bounds.append(MARGIN * gap + unit * largest)
    return bounds


# --- one update of a tensor, by its published formula ---
#
# The code is independent of the optimizers that train (distlab/lab/workload/optimizer.py, torch.optim). AdamW divides a
# gradient by its own size, which turns rounding into an update where a gradient is only rounding. So its moments, which
# are linear and quadratic in the gradient, are compared with one process, and its weights with the formula for the
# present moments (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2).
#
# Compared are norms of differences, in float64. A number in a coarse dtype changes by whole units or not at all: if it
# differs by d before rounding, it differs by a unit afterwards in d/unit of all cases, so in the norm by sqrt(unit ·
# d).

BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # AdamW's, which the lab does not set
ROUNDINGS = 4  # of an element per update, at most: decay, ratio, product, sum


def sgd(weight: Tensor, gradient: Tensor, found: Tensor, rounding: float, config: Config) -> dict[str, Difference]:
    """Check that `found` is w - lr·g; `rounding` is the norm of the gradient's possible error."""
    wanted = weight.clone().add_(gradient, alpha=-config.learning_rate)
    return {"weights": stored_difference(found, wanted, config.learning_rate * rounding)}


def adamw(
    weight: Tensor, gradient: Tensor, before: dict[str, Tensor], found: Tensor, after: dict[str, Tensor], step: int,
    rounding: float, config: Config,
) -> dict[str, Difference]:  # fmt: skip
    """Check the update after `step` others: moments against the gradient, weights against the present moments."""
    counters = (before.get("step"), after.get("step"))
    counts = tuple(0.0 if count is None else count.item() for count in counters)
    if counts != (step, step + 1) or not {"exp_avg", "exp_avg_sq"} <= set(after):
        return {"optimizer": Difference(math.inf, 0.0)}  # restarted, or never begun
    first = before.get("exp_avg", torch.zeros_like(found)).lerp(gradient, 1 - BETA_1)
    second = before.get("exp_avg_sq", torch.zeros_like(found)) * BETA_2
    second.addcmul_(gradient, gradient, value=1 - BETA_2)
    largest = gradient.double().abs().max().item()
    squares = 2 * largest * rounding + rounding**2
    moments = [
        stored_difference(after["exp_avg"], first, (1 - BETA_1) * rounding),
        stored_difference(after["exp_avg_sq"], second, (1 - BETA_2) * squares),
    ]
    rate, corrected = config.learning_rate / (1 - BETA_1 ** (step + 1)), math.sqrt(1 - BETA_2 ** (step + 1))
    scale = (after["exp_avg_sq"].sqrt() / corrected).add_(EPSILON)
    wanted = (weight * (1 - config.learning_rate * DECAY)).addcdiv_(after["exp_avg"], scale, value=-rate)
    moved = (wanted.double() - weight.double()).norm().item()
    exact = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
    return {
        "optimizer": max(moments, key=lambda each: each.share),
        "weights": stored_difference(found, wanted, ROUNDINGS * exact * moved),
    }


def stored_difference(found: Tensor, wanted: Tensor, uncertain: float) -> Difference:
    """Return the difference of stored numbers that may be `uncertain` before rounding; both as norms."""
    unit = torch.finfo(wanted.dtype).eps
    exact = torch.finfo(torch.promote_types(wanted.dtype, torch.float32)).eps
    size = wanted.double().norm().item()
    inexact = uncertain + ROUNDINGS * exact * size
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Difference(math.inf, 0.0)
    return Difference(distance(found, wanted), inexact + math.sqrt(unit * size * inexact))


# --- the audited steps ---

Tensors = dict[str, Tensor]
State = dict[str, Tensors]  # each parameter's "weights", and the optimizer's state by key
Gradient = tuple[float, Tensors]  # the loss of a batch, and its gradient
MISSING = {"weights": Difference(math.inf, 0.0)}


def sampled(steps: range, seed: int) -> list[int]:
    """Return the audited ones of `steps`: both ends, and one in between."""
    drawn = [random.Random(seed).choice(steps[1:-1])] if steps[1:-1] else []
    return sorted({steps[0], *drawn, steps[-1]}) if steps else []


class Audit:
    """The audited steps of some variants, compared with their single process; all ranks call `around` every step."""

    def __init__(
        self, lab: Lab, batches: Batches, references: Mapping[str, ReferenceRun | None], steps: Mapping[str, range]
    ) -> None:
        self.lab, self.batches, self.references = lab, batches, references
        self.steps = {name: sampled(of, lab.config.seed) for name, of in steps.items()}
        self.done: dict[str, list[int]] = {name: [] for name in references}
        self.found = {name: Worst() for name in references}
        self.not_finite: dict[str, set[str]] = {}  # kinds that were not finite in the single process in some step
        self._known: tuple[str, Gradient] | None = None  # the last gradient, with the key of its input

    @contextmanager
    def around(self, name: str, strategy: Strategy, step: int, data_step: int) -> Iterator[list[float | None]]:
        """Wrap a variant's step on the batch `data_step`; the caller appends its part of the loss to the yielded
        list."""
        loss_parts: list[float | None] = []
        if step not in self.steps.get(name, ()):
            yield loss_parts
            return
        self.lab.at(step, f"audit of {name}")
        before = gathered(self.lab, strategy)
        yield loss_parts
        self.lab.at(step, f"audit of {name}")
        losses = summed_losses(self.lab, loss_parts)
        after = gathered(self.lab, strategy)
        self.done[name].append(step)
        self.lab.at(step, f"one process, to audit {name}")
        if self.lab.rank == 0:
            (loss,) = losses
            self._compare(name, step, data_step, loss, before, after)

    def _compare(self, name: str, step: int, data_step: int, loss: float, before: State, after: State) -> None:
        found, run = self.found[name], self.references[name]
        assert run is not None
        wanted, gradients = self._gradient(before, data_step)
        length = norm(gradients)
        if not (math.isfinite(wanted) and math.isfinite(length)):
            self.not_finite.setdefault(name, set()).update(("loss", "weights", "optimizer"))
            return
        if step >= len(run.allowed):
            self.not_finite.setdefault(name, set()).add("loss")
        else:
            found.note("loss", abs(loss - wanted), run.allowed[step], f"step {step}")
        all_grown = length / (math.hypot(*run.gradients.values()) or length or 1.0)
        for label, gradient in gradients.items():
            own_grown = gradient.double().norm().item() / (run.gradients[label] or math.inf)
            rounding = max(1.0, all_grown, own_grown) * run.rounding[label]
            was, now = (dict(state.get(label, {})) for state in (before, after))
            there = "weights" in was and "weights" in now and was["weights"].shape == now["weights"].shape
            offs = self._parameter(step, gradient, rounding, was, now) if there else MISSING
            for kind, off in offs.items():
                found.note(kind, off.value, off.allowed, f"step {step}, {label}")

    def _parameter(
        self, step: int, gradient: Tensor, rounding: float, before: Tensors, after: Tensors
    ) -> dict[str, Difference]:  # fmt: skip
        config, weight, found = self.lab.config, before.pop("weights"), after.pop("weights")
        gradient = gradient.to(weight.dtype)  # of float32 masters
        if config.optimizer == "sgd":
            return sgd(weight, gradient, found, rounding, config)
        return adamw(weight, gradient, before, found, after, step, rounding, config)

    def _gradient(self, before: State, data_step: int) -> Gradient:
        """Return loss and gradient of the whole batch at these weights, in one process and LAB_DTYPE."""
        model = self.lab.model(getattr(torch, self.lab.config.dtype))
        reference.fill(model, {name: each["weights"] for name, each in before.items() if "weights" in each})
        key = f"{data_step} {digest_of(model.parameters())}"
        if self._known is None or self._known[0] != key:
            loss, _ = reference.backward(model, self.batches.alone(data_step), self.lab.config.clip)
            self._known = key, (loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        return self._known[1]


def gathered(lab: Lab, strategy: Strategy) -> State:
    """Return a copy of all weights and of the optimizer's state on rank 0; nothing elsewhere."""
    state = defaultdict[str, Tensors](dict)
    for kind in ("weights", "optimizer"):
        for label, tensor in strategy.full(kind):  # a collective
            key, _, name = label.partition(".") if kind == "optimizer" else (kind, "", label)
            if lab.rank == 0:
                state[name][key] = tensor.detach().clone()
    return state


def norm(tensors: Tensors) -> float:
    return math.hypot(*(tensor.double().norm().item() for tensor in tensors.values()))


# --- the checks ---
#
# timed losses       every step, against one process that trains the same steps in the same dtype
# audited loss, audited weights, audited optimizer
#                    sampled steps, against one process from the same weights and state
# timed replicas     ranks with the same weight, or the same part of it, have equal bits after the last step
# timed steps        every rank has run every step, and all chosen steps were audited
#
# PyTorch's variants are informational. So are those that by design differ from one process, unless `Held` names a
# reference for them. In 16 bits a strategy may step float32 copies of its weights: then the single process does too.

Curves = dict[str, list[float | None]]  # the batch's loss at each step, by variant; None if unknown

NAMES = {False: "one process", True: "one process, float32 masters"}

TEST = "tests/lab/verify/test_audit.py::test_a_fault_of_float32_alone_is_seen_by_name"
CONTROLS = {
    "losses": f"{TEST}[stays_at_batch_0]",
    "loss": f"{TEST}[stays_at_batch_0]",
    "weights": f"{TEST}[never_updates]",
    "optimizer": f"{TEST}[adamw_anew]",
    "replicas": f"{TEST}[one_rank_drifts]",
    "steps": f"{TEST}[leaves_a_step_out]",
}


class TimedPassChecks:
    """The checks of the timed pass, called on all ranks; without the proof only steps and replicas decide."""

    def __init__(
        self, lab: Lab, position: TrainingPosition, strategies: Mapping[str, Strategy], ends: Mapping[str, int],
        dtype: torch.dtype, references: Mapping[str, Held],
    ) -> None:  # fmt: skip
        self.lab, self.references = lab, {name: references.get(name, Held()) for name in strategies}
        self.starts, self.ends = dict(position.done), ends  # the steps that each had done before, and must have done
        kept = in_float32(lab, strategies, dtype)
        self.masters = {name: name in kept for name, each in self.references.items() if not each.why}
        self.single_process = {
            masters: one_process(lab, position.batches, dtype, masters=masters)
            for masters in sorted({False, *self.masters.values()})
        }
        audited = {
            name: self.single_process[masters]
            for name, masters in self.masters.items()
            if lab.config.proof and name not in lab.mode.by_torch
        }
        self.audit = Audit(
            lab, position.batches, audited, {name: range(position.first, ends[name]) for name in audited}
        )

    @property
    def losses(self) -> dict[str, list[float]]:
        """Return the curves of the single processes, by name, on rank 0."""
        return {NAMES[masters]: run.losses for masters, run in self.single_process.items() if run is not None}

    def decide(self, strategies: Mapping[str, Strategy], curves: Curves, loss_parts: Curves) -> None:
        """Write the checks; `curves` of the whole batch are known on rank 0, `loss_parts` are this rank's."""
        for name, strategy in strategies.items():
            self._count(name, len(loss_parts[name]))
            if self.lab.rank == 0 and self.lab.config.proof:
                self._losses(name, curves[name])
                found = self.audit.found[name].found if name in self.audit.found else {}
                for kind in self.audit.not_finite.get(name, set()) - set(found):
                    self.lab.waive(f"audited {kind}", "in one process it is not finite either", name)
                for kind, off in found.items():
                    self.lab.check(f"audited {kind}", *off[:2], name, off.where, control=CONTROLS[kind])
            if self.references[name].replicas and name not in self.lab.mode.by_torch:
                check_equal_weights(self.lab, name, strategy)

    def _count(self, name: str, done: int) -> None:
        steps, audit = self.ends[name], self.audit
        planned = [step for step in audit.steps.get(name, []) if step >= self.starts[name]]
        missing = abs(max(0, steps - self.starts[name]) - done) + len(set(planned) ^ set(audit.done.get(name, [])))
        audited = f", audited: {', '.join(map(str, planned))}" if planned else ""
        detail = f"steps {self.starts[name]} to {steps - 1}{audited}" if self.starts[name] < steps else "no step left"
        self.lab.check("timed steps", missing, 0, variant=name, detail=detail, control=CONTROLS["steps"])

    def _losses(self, name: str, curve: list[float | None]) -> None:
        run = self.single_process[self.masters.get(name, False)]
        assert run is not None
        if name not in self.masters or name in self.lab.mode.by_torch:
            own, last = run.losses[-1], curve[-1]
            why = self.references[name].why or "PyTorch's own"
            if last is not None:
                self.lab.compare("last timed loss", own, last, "", variant=name, shown=why)
            return
        expected = run.losses[: self.ends[name]]
        remark = f" (not finite from step {len(run.allowed)} on)" if len(run.allowed) < len(curve) else ""
        worst = Worst()
        for step, (value, wanted, bound) in enumerate(zip(curve, expected, run.allowed, strict=False)):
            if value is not None:
                worst.note("losses", abs(value - wanted), bound, f"step {step} of {len(curve)}{remark}")
        if not worst.found:
            self.lab.waive("timed losses", "no loss is finite, neither here nor in one process", name)
        elif len(curve) == len(expected):  # otherwise the check of the number of steps fails
            off = worst.found["losses"]
            self.lab.check("timed losses", *off[:2], name, off.where, control=CONTROLS["losses"])


def in_float32(lab: Lab, strategies: Mapping[str, Strategy], dtype: torch.dtype) -> set[str]:
    """Return the strategies whose weights have a finer dtype than `dtype`, in which they compute."""
    found: set[str] = set()
    if dtype.itemsize < 4:
        for name, strategy in strategies.items():
            dtypes = {weight.dtype for _, weight in strategy.full("weights")}
            found |= {name} if dtypes - {dtype} else set()
    return set(lab.exchange.share("types", sorted(found)))


def own_weights(lab: Lab, strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's weights, boxes by position, so that replicas of a slice compare. In a mode that saves nothing,
    yield what its strategy returns as dense."""
    if lab.mode.unsaved and not hasattr(strategy, "state_dict"):
        yield from strategy.full("weights")
        return
    for label, weight in strategy.state_dict().items():
        if label.startswith("weights.") and isinstance(weight, torch.Tensor):
            yield label, weight
        elif label.startswith("weights.") and isinstance(weight, LocalShard):
            yield from ((f"{label} at {offset}", box) for offset, box in weight.boxes)


def check_equal_weights(lab: Lab, name: str, strategy: Strategy) -> None:
    """Check that ranks with the same weight, or the same box of it, have equal bits, by checksums."""
    lab.at(lab.config.steps, f"the weights of {name}")
    mine = {label: digest_of([weight]) for label, weight in own_weights(lab, strategy)}
    everyone = lab.exchange.gather("checksums", mine)
    if everyone is None:
        return
    labels = {label for of_rank in everyone for label in of_rank}
    differing = [label for label in labels if len({of_rank[label] for of_rank in everyone if label in of_rank}) > 1]
    detail = f"weights that differ between ranks, of {len(labels)} compared"
    lab.check("timed replicas", len(differing), 0, variant=name, detail=detail, control=CONTROLS["replicas"])
