"""What decides about the timed pass: its losses, its audited steps, its number of steps, and replicas that stay alike.

  timed losses       of every step, against the one process that trains the same steps in the same type (alone.py)
  audited loss, audited weights, audited optimizer
                     of sampled steps, against one process from the same weights and state (audit.py)
  timed replicas     ranks that hold a weight, or the same part of it, hold the same to the bit after the last step
  timed steps        every rank has done every step, and all that were to be audited were

PyTorch's own are shown beside them. So is what on purpose is not what one process computes, unless `Held` names what it
is held to. In 16 bits a strategy may step float32 copies of its weights: then the one process does so too.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from workers.checkpoint.course import Course
from workers.contract import Held, OneProcess, Strategy
from workers.lab import Lab
from workers.measure.difference import Worst
from workers.measure.hashing import digest_of
from workers.parallel.piece import Piece
from workers.passes.alone import Alone, one_process
from workers.passes.audit import Audit
from workers.workload import baseline

Curves = dict[str, list[float | None]]  # the loss of the batch at each step, by variant; None where nobody knows it

ONE: OneProcess = baseline.losses
MASTERS: OneProcess = partial(baseline.losses, masters=True)
NAMES: dict[OneProcess, str] = {ONE: "one process", MASTERS: "one process, float32 masters"}

TEST = "tests/workers/passes/test_audit.py::test_a_fault_of_float32_alone_is_seen_by_name"
CONTROLS = {
    "losses": f"{TEST}[stays_at_batch_0]",
    "loss": f"{TEST}[stays_at_batch_0]",
    "weights": f"{TEST}[never_updates]",
    "optimizer": f"{TEST}[adamw_anew]",
    "replicas": f"{TEST}[one_rank_drifts]",
    "steps": f"{TEST}[leaves_a_step_out]",
}


class Holding:
    """What the timed steps of `strategies` are held to. All ranks call every method; without the proof none decides
    but the number of steps and replicas."""

    def __init__(
        self, lab: Lab, course: Course, strategies: Mapping[str, Strategy], ends: Mapping[str, int],
        dtype: torch.dtype, held: Mapping[str, Held],
    ) -> None:  # fmt: skip
        self.lab, self.held = lab, {name: held.get(name, Held()) for name in strategies}
        self.starts, self.ends = dict(course.done), ends  # the steps that each had done before, and is to have done
        kept = in_float32(lab, strategies, dtype)
        self.against: dict[str, OneProcess] = {
            name: each.alone or (MASTERS if name in kept else ONE) for name, each in self.held.items() if not each.why
        }
        kinds = list(dict.fromkeys([ONE, *self.against.values()]))
        self.alone: dict[OneProcess, Alone | None] = {
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
        elif label.startswith("weights.") and isinstance(weight, Piece):
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
