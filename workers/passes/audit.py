"""Sampled steps of the timed pass, audited: the state before, the same batch in one process, and the state after.

The proof is made in float64 with a small rate, on strategies that are thrown away: what only float32 does, or only the
strategies that are timed, it does not see. So before the first step, the last one and one in between that LAB_SEED
draws, rank 0 gathers weights and optimizer state (`Strategy.full`); after it again. From the weights before, one
process computes loss and gradient of the whole batch in LAB_DTYPE, and workers/passes/update.py what becomes of weights
and state. Variants that hold the same weights to the bit share that computation, as all do before the first step. None
of it is in the timed interval: ranks wait for each other before a step begins.
"""

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from workers.contract import Strategy
from workers.lab import Lab
from workers.measure.difference import Off, Worst
from workers.measure.hashing import digest_of
from workers.passes import update
from workers.passes.alone import Alone
from workers.passes.proof import summed_losses
from workers.workload import baseline
from workers.workload.data import Batches

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
        self, lab: Lab, batches: Batches, alone: Mapping[str, Alone | None], steps: Mapping[str, range]
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
            return update.sgd(weight, gradient, found, rounding, config)
        return update.adamw(weight, gradient, before, found, after, step, rounding, config)

    def _gradient(self, before: State, data_step: int) -> Gradient:
        """Loss and gradient of the whole batch at these weights, in one process and LAB_DTYPE."""
        model = self.lab.model(getattr(torch, self.lab.config.dtype))
        baseline.fill(model, before["weights"])
        key = f"{data_step} {digest_of(model.parameters())}"
        if self._known is None or self._known[0] != key:
            loss, _ = baseline.backward(model, self.batches.alone(data_step), self.lab.config.clip)
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
