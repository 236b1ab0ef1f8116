"""Sampled steps of the timed pass, audited: the state before, the same batch in one process, and the state after.

The proof is made in float64 with a small rate, on strategies that are thrown away: what only float32 does, or only the
strategies that are timed, it does not see. So before the first step, the last one and one in between that LAB_SEED
draws, rank 0 gathers weights and optimizer state (`Strategy.full`); after it again. From the weights before, one
process computes loss and gradient of the whole batch in LAB_DTYPE, and reference_run.py what becomes of weights and
state. Variants that hold the same weights to the bit share that computation, as all do before the first step. None
of it is in the timed interval: ranks wait for each other before a step begins.
"""

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from distlab.checkpoint.training_position import TrainingPosition
from distlab.collectives.sharded_tensor import LocalShard
from distlab.contract import Held, OneProcess, Strategy
from distlab.lab import Lab
from distlab.measure.tensors import Off, Worst, digest_of
from distlab.verify import reference_run
from distlab.verify.proof import summed_losses
from distlab.verify.reference_run import ReferenceRun, one_process
from distlab.workload import reference
from distlab.workload.data import Batches

Tensors = dict[str, Tensor]
State = dict[str, Tensors]  # "weights" by name, and the "optimizer" state under '<key>.<name>'
Gradient = tuple[float, Tensors]  # the loss of a batch, and its gradient
MISSING = {"weights": Off(math.inf, 0.0)}


def sampled(steps: range, seed: int) -> list[int]:
    """Those of `steps` that are audited: both ends, and one in between."""
    drawn = [random.Random(seed).choice(steps[1:-1])] if steps[1:-1] else []
    return sorted({steps[0], *drawn, steps[-1]}) if steps else []


class Audit:
    """The audited steps of some variants, each held against its one process: all ranks go `around` every step."""

    def __init__(
        self, lab: Lab, batches: Batches, alone: Mapping[str, ReferenceRun | None], steps: Mapping[str, range]
    ) -> None:
        self.lab, self.batches, self.alone = lab, batches, alone
        drilled = {each.step for each in lab.config.planned_faults if each.flipped and each.step is not None}
        self.steps = {name: sorted({*sampled(of, lab.config.seed), *drilled}) for name, of in steps.items()}
        self.done: dict[str, list[int]] = {name: [] for name in alone}
        self.found = {name: Worst() for name in alone}
        self.numberless: dict[str, set[str]] = {}  # kinds of which one process had no number in a step
        self._known: tuple[str, Gradient] | None = None  # the last gradient, by what it was computed from

    @contextmanager
    def around(self, name: str, strategy: Strategy, step: int, data_step: int) -> Iterator[list[float | None]]:
        """Around one step of a variant, which works on the batch `data_step`; its share of the loss goes into what is
        yielded."""
        shares: list[float | None] = []
        if step not in self.steps.get(name, ()):
            yield shares
            return
        self.lab.at(step, f"audit of {name}")
        before = gathered(self.lab, strategy)
        yield shares
        self.lab.at(step, f"audit of {name}")
        losses = summed_losses(self.lab, shares)
        after = gathered(self.lab, strategy)
        self.done[name].append(step)
        self.lab.at(step, f"one process, to audit {name}")
        if self.lab.rank == 0:
            (loss,) = losses
            self._judge(name, step, data_step, loss, before, after)

    def _judge(self, name: str, step: int, data_step: int, loss: float, before: State, after: State) -> None:
        """Note how far loss, weights and state are off, each where it is worst."""
        found, alone = self.found[name], self.alone[name]
        assert alone is not None
        wanted, gradients = self._gradient(before, data_step)
        length = norm(gradients)
        if not (math.isfinite(wanted) and math.isfinite(length)):
            self.numberless.setdefault(name, set()).update(("loss", "weights", "optimizer"))
            return
        if step >= len(alone.allowed):
            self.numberless.setdefault(name, set()).add("loss")
        else:
            found.note("loss", abs(loss - wanted), alone.allowed[step], f"step {step}")
        all_grown = length / (math.hypot(*alone.gradients.values()) or length or 1.0)
        for label, gradient in gradients.items():
            own_grown = gradient.double().norm().item() / (alone.gradients[label] or math.inf)
            rounding = max(1.0, all_grown, own_grown) * alone.rounding[label]
            held = of_parameter(before, after, label)
            offs = self._parameter(step, gradient, rounding, *held) if held else MISSING
            for kind, off in offs.items():
                found.note(kind, off.value, off.allowed, f"step {step}, {label}")

    def _parameter(
        self, step: int, gradient: Tensor, rounding: float, before: Tensors, after: Tensors
    ) -> dict[str, Off]:  # fmt: skip
        """How far one parameter is off, and its state."""
        config, weight, found = self.lab.config, before.pop("weights"), after.pop("weights")
        gradient = gradient.to(weight.dtype)  # of float32 masters
        if config.optimizer == "sgd":
            return reference_run.sgd(weight, gradient, found, rounding, config)
        return reference_run.adamw(weight, gradient, before, found, after, step, rounding, config)

    def _gradient(self, before: State, data_step: int) -> Gradient:
        """Loss and gradient of the whole batch at these weights, in one process and LAB_DTYPE."""
        model = self.lab.model(getattr(torch, self.lab.config.dtype))
        reference.fill(model, before["weights"])
        key = f"{data_step} {digest_of(model.parameters())}"
        if self._known is None or self._known[0] != key:
            loss, _ = reference.backward(model, self.batches.alone(data_step), self.lab.config.clip)
            self._known = key, (loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        return self._known[1]


def gathered(lab: Lab, strategy: Strategy) -> State:
    """A copy of all weights and of the optimizer's state on rank 0; nothing elsewhere."""
    return {
        kind: {label: tensor.detach().clone() for label, tensor in strategy.full(kind) if lab.rank == 0}
        for kind in ("weights", "optimizer")
    }


def of_parameter(before: State, after: State, label: str) -> tuple[Tensors, Tensors] | None:
    """What belongs to one parameter, by key, where its weight is there before and after, alike in shape."""
    held = []
    for state in (before, after):
        moments = {key: state["optimizer"].get(f"{key}.{label}") for key in ("step", "exp_avg", "exp_avg_sq")}
        found = {"weights": state["weights"].get(label)} | moments
        held.append({key: tensor for key, tensor in found.items() if tensor is not None})
    shapes = [state["weights"].shape for state in held if "weights" in state]
    return (held[0], held[1]) if len(shapes) == 2 and shapes[0] == shapes[1] else None


def norm(tensors: Tensors) -> float:
    """Of all together."""
    return math.hypot(*(tensor.double().norm().item() for tensor in tensors.values()))


# What decides about the timed pass: its losses, its audited steps, its number of steps, and replicas that stay alike.
#
# timed losses       of every step, against the one process that trains the same steps in the same type
# (reference_run.py)
#   audited loss, audited weights, audited optimizer
#                      of sampled steps, against one process from the same weights and state (audit.py)
#   timed replicas     ranks that hold a weight, or the same part of it, hold the same to the bit after the last step
#   timed steps        every rank has done every step, and all that were to be audited were
#
# PyTorch's own are shown beside them. So is what on purpose is not what one process computes, unless `Held` names
# what it is held to. In 16 bits a strategy may step float32 copies of its weights: then the one process does so too.

Curves = dict[str, list[float | None]]  # the loss of the batch at each step, by variant; None where nobody knows it

ONE: OneProcess = reference.losses
MASTERS: OneProcess = partial(reference.losses, masters=True)
NAMES: dict[OneProcess, str] = {ONE: "one process", MASTERS: "one process, float32 masters"}

TEST = "tests/verify/test_audit.py::test_a_fault_of_float32_alone_is_seen_by_name"
CONTROLS = {
    "losses": f"{TEST}[stays_at_batch_0]",
    "loss": f"{TEST}[stays_at_batch_0]",
    "weights": f"{TEST}[never_updates]",
    "optimizer": f"{TEST}[adamw_anew]",
    "replicas": f"{TEST}[one_rank_drifts]",
    "steps": f"{TEST}[leaves_a_step_out]",
}


class TimedPassChecks:
    """What the timed steps of `strategies` are held to. All ranks call every method; without the proof none decides
    but the number of steps and replicas."""

    def __init__(
        self, lab: Lab, course: TrainingPosition, strategies: Mapping[str, Strategy], ends: Mapping[str, int],
        dtype: torch.dtype, held: Mapping[str, Held],
    ) -> None:  # fmt: skip
        self.lab, self.held = lab, {name: held.get(name, Held()) for name in strategies}
        self.starts, self.ends = dict(course.done), ends  # the steps that each had done before, and is to have done
        kept = in_float32(lab, strategies, dtype)
        self.against: dict[str, OneProcess] = {
            name: each.alone or (MASTERS if name in kept else ONE) for name, each in self.held.items() if not each.why
        }
        kinds = list(dict.fromkeys([ONE, *self.against.values()]))
        self.alone: dict[OneProcess, ReferenceRun | None] = {
            kind: one_process(lab, course.batches, dtype, kind) for kind in kinds
        }
        audited = {
            name: self.alone[kind]
            for name, kind in self.against.items()
            if lab.config.proof and kind in NAMES and name not in lab.mode.by_torch
        }
        self.audit = Audit(lab, course.batches, audited, {name: range(course.first, ends[name]) for name in audited})

    @property
    def losses(self) -> dict[str, list[float]]:
        """The curves of one process, by name, on rank 0: for all charts, and for those whose way is another."""
        names = NAMES | {kind: f"one process, as {name}" for name, kind in self.against.items() if kind not in NAMES}
        return {names[kind]: alone.losses for kind, alone in self.alone.items() if alone is not None}

    def decide(self, strategies: Mapping[str, Strategy], curves: Curves, shares: Curves) -> None:
        """Write the checks; `curves` of the whole batch are known on rank 0, `shares` are this rank's."""
        for name, strategy in strategies.items():
            self._count(name, len(shares[name]))
            if self.lab.rank == 0 and self.lab.config.proof:
                self._losses(name, curves[name])
                found = self.audit.found[name].found if name in self.audit.found else {}
                for kind in self.audit.numberless.get(name, set()) - set(found):
                    self.lab.waive(f"audited {kind}", "one process has no numbers there either", name)
                for kind, off in found.items():
                    self.lab.check(f"audited {kind}", *off[:2], name, off.where, control=CONTROLS[kind])
            if self.held[name].replicas and name not in self.lab.mode.by_torch:
                check_alike(self.lab, name, strategy)

    def _count(self, name: str, done: int) -> None:
        """Every step that was to be done, and every one that was to be audited."""
        steps, audit = self.ends[name], self.audit
        planned = [step for step in audit.steps.get(name, []) if step >= self.starts[name]]
        missing = abs(max(0, steps - self.starts[name]) - done) + len(set(planned) ^ set(audit.done.get(name, [])))
        told = f", audited: {', '.join(map(str, planned))}" if planned else ""
        detail = f"steps {self.starts[name]} to {steps - 1}{told}" if self.starts[name] < steps else "none left to do"
        self.lab.check("timed steps", missing, 0, variant=name, detail=detail, control=CONTROLS["steps"])

    def _losses(self, name: str, curve: list[float | None]) -> None:
        """The step whose loss is farthest off for what is allowed there."""
        alone = self.alone[self.against.get(name, ONE)]
        assert alone is not None
        if name not in self.against or name in self.lab.mode.by_torch:
            own, last = alone.losses[-1], curve[-1]
            why = self.held[name].why or "PyTorch's own"
            if last is not None:
                self.lab.compare("last timed loss", own, last, "", variant=name, shown=why)
            return
        expected = alone.losses[: self.ends[name]]
        numbers = f" (no numbers from step {len(alone.allowed)} on)" if len(alone.allowed) < len(curve) else ""
        worst = Worst()
        for step, (value, wanted, bound) in enumerate(zip(curve, expected, alone.allowed, strict=False)):
            if value is not None:
                worst.note("losses", abs(value - wanted), bound, f"step {step} of {len(curve)}{numbers}")
        if not worst.found:
            self.lab.waive("timed losses", "neither has a loss that is a number", name)
        elif len(curve) == len(expected):  # else the number of steps has a check of its own
            off = worst.found["losses"]
            self.lab.check("timed losses", *off[:2], name, off.where, control=CONTROLS["losses"])


def in_float32(lab: Lab, strategies: Mapping[str, Strategy], dtype: torch.dtype) -> set[str]:
    """The strategies that keep their weights in a finer type than `dtype`, which they compute in."""
    found: set[str] = set()
    if dtype.itemsize < 4:
        for name, strategy in strategies.items():
            dtypes = {weight.dtype for _, weight in strategy.full("weights")}
            found |= {name} if dtypes - {dtype} else set()
    return set(lab.exchange.share("types", sorted(found)))


def own_weights(lab: Lab, strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that this rank holds, a box of one by where it stands: replicas of a slice hold the same. Of a mode
    that saves nothing, what its strategy gives as dense."""
    if lab.mode.unsaved and not hasattr(strategy, "state_dict"):
        yield from strategy.full("weights")
        return
    for label, weight in strategy.state_dict().items():
        if label.startswith("weights.") and isinstance(weight, torch.Tensor):
            yield label, weight
        elif label.startswith("weights.") and isinstance(weight, LocalShard):
            yield from ((f"{label} at {offset}", box) for offset, box in weight.boxes)


def check_alike(lab: Lab, name: str, strategy: Strategy) -> None:
    """Ranks that hold the same weight, or the same box of it, hold the same to the bit, by the checksum of each."""
    lab.at(lab.config.steps, f"the weights of {name}")
    mine = {label: digest_of([weight]) for label, weight in own_weights(lab, strategy)}
    everyone = lab.exchange.gather("checksums", mine)
    if everyone is None:
        return
    labels = {label for of_rank in everyone for label in of_rank}
    differing = [label for label in labels if len({of_rank[label] for of_rank in everyone if label in of_rank}) > 1]
    detail = f"weights that differ between ranks, of {len(labels)} that a rank holds"
    lab.check("timed replicas", len(differing), 0, variant=name, detail=detail, control=CONTROLS["replicas"])
