"""The Lab: everything that an experiment may use on one rank, except the passes.

An experiment reads like its lesson because everything else is here: the model and this rank's part of the batch, checks
and comparisons that decide the verdict, and text and tables for both log and report. An experiment uses no clock, no
print, no file and no os.environ; the passes over each variant are in verify/.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.contract import Counted, Mode
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.membership import Membership
from distlab.lab.config import Config
from distlab.lab.measure.prediction import Prediction
from distlab.lab.measure.traffic import Ledger, Traffic
from distlab.lab.report import records
from distlab.lab.report.progress import Work
from distlab.lab.report.run_folder import Journal, Level
from distlab.lab.report.table import aligned, wrapped
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import wire_tolerance
from distlab.techniques.collectives.phases import phase
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.transport.handshake import OnRejected, ignore_rejected


@dataclass(frozen=True)
class RunHooks:
    """The callbacks and data that a rank's run gives to its Lab; by default there is no run, as in a test."""

    at: Callable[[int, str], None] = lambda _step, _phase: None  # reports what the main thread does to the other ranks
    work: Work = field(default_factory=Work)  # the number of units, and of those done
    # All ranks call it when a section of rank 0's log (log.py), or one more of its `rows`, is complete, so that rank 0
    # prints it immediately and not at the end.
    finished: Callable[..., None] = lambda _section, _rows=(): None
    side_group: dist.ProcessGroup | None = None  # of gloo and all ranks, for communication next to the training

    # How ranks of this run connect: this one's address, their common key, and a counter of refused connections.
    own_ip: str = "127.0.0.1"
    secret: bytes = b""
    on_rejected: OnRejected = ignore_rejected

    # Fault injection (fault_injection.py), at the start of a training step.
    on_step: Callable[[int, str], None] = lambda _step, _variant: None

    # In runs that continue after losses: allow losses from now on, and the action after each; let the serving rank
    # print and collect for all remaining ranks; in an elastic mode, the members.
    let_leave: Callable[[Callable[[int], None]], None] = lambda _then: None
    move: Callable[[], None] = lambda: None
    membership: Membership | None = None


class Lab:
    """The interface of an experiment to its run on one rank: the settings, the ranks as a group, and all actions."""

    def __init__(
        self, config: Config, mode: Mode, device: torch.device, group: dist.ProcessGroup, exchange: Exchange,
        ledger: Ledger, journal: Journal, hooks: RunHooks,
    ) -> None:  # fmt: skip
        self.config = config
        self.mode = mode
        self.device = device
        self.group = group  # all ranks
        self.mesh = Mesh.grid(mode.axes(config), group, config.collective_timeout_s)
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.exchange = exchange
        self.journal = journal
        self.hooks = hooks
        self.at, self.work, self.finished = hooks.at, hooks.work, hooks.finished
        self.first_step_at: float | None = None
        self._ledger = ledger

    # --- the workload ---

    def model(self, dtype: torch.dtype) -> Model:
        """Return the dense model of LAB_SEED, equal on every rank."""
        return self.mode.model(self.config, self.config.seed).to(self.device, dtype)

    def batches(self, dtype: torch.dtype, *, proof: bool = False) -> Batches:
        """Return the global batches, with each rank's part of them."""
        return self.mode.batches(self.config, proof=proof, device=self.device, dtype=dtype)

    def microbatches(self, batches: Batches, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of `step`: split along the mesh's axis dp, equal along other axes."""
        with phase("data"):
            return batches.microbatches(step, self.mesh.index("dp"), self.mesh.size("dp"))

    def begin_step(self, step: int, variant: str) -> None:
        """Mark the start of a step of the training itself, not of other passes."""
        self.at(step, variant)
        self.hooks.on_step(step, variant)

    # --- output ---

    @property
    def speaks(self) -> bool:
        """Return whether this rank writes for all: rank 0, or the one that runs the store after rank 0 has left."""
        return self.rank == self.exchange.host

    def say(self, text: str, heading: str = "", *, all_ranks: bool = False, at: Level | None = None) -> None:
        """Print a line in the log of rank 0, or of every rank; with a heading it is in the report too.

        LAB_LOG must be at least this level: "normal", or by default "full" for rank 0's lines with a heading.
        """
        if self.speaks or all_ranks:
            level: Level = at or ("full" if heading and not all_ranks else "normal")
            self.journal.say("\n".join(wrapped(heading, text)) if heading else text, level)
        if self.speaks and heading:
            self.journal.write(records.Said(heading, text))

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Write a table of the lesson, in rank 0's log and in the report."""
        if self.speaks:
            self.journal.say("\n".join([title, *aligned(columns, rows)]), "full")
            self.journal.write(records.Table(title, columns, rows))

    def chart(
        self, title: str, x_label: str, y_label: str, series: dict[str, list[list[float]]], *,
        log_x: bool = False, log_y: bool = False,
    ) -> None:  # fmt: skip
        """Write a line chart to the report: `series` maps a name to [x values, y values]."""
        if self.speaks:
            self.journal.write(records.Chart(title, x_label, y_label, series, log_x, log_y))

    def changed(self, variant: str, step: int, at: float, what: str, members: list[int]) -> None:
        """Record new members from `step` on, as this rank noticed at Unix time `at`: a rank was "lost" or has "asked"
        for admission, or all "restart"."""
        self.journal.write(records.Changed(variant, step, at, what, members))

    def note(self, heading: str, text: str) -> None:
        """Write a line to this rank's own log, under a heading of at most ten letters."""
        self.journal.write(records.Noted(heading, text))

    # --- the verdict ---

    def check(
        self, name: str, max_abs_diff: float, tolerance: float, variant: str = "", detail: str = "", *,
        unit: str = "", control: str = "",
    ) -> None:  # fmt: skip
        """Record a check of this rank: it passes if `max_abs_diff <= tolerance`. The run passes if all checks do.

        `unit` names the unit of both if they are no plain numbers, such as "epsilons of bfloat16". The mode's table
        names what makes it fail, or for a check of every mode `control` does.
        """
        control = self.mistake_for(name) or control or self.fails_in(name)
        self.journal.write(records.Check(variant, name, float(max_abs_diff), float(tolerance), detail, control, unit))

    def mistake_for(self, check: str) -> str:
        """Return the first injected bug of the mode that this check has to catch, in LAB_BUG's form; empty if none."""
        meant = (name for name, mistake in self.mode.mistakes.items() if mistake.check == check)
        return next((f"LAB_BUG={name}" for name in meant), "")

    def fails_in(self, name: str) -> str:
        """Return what makes a check fail by the mode's table, if it has one; raises for a name that is in no row."""
        if self.mode.claims is None:
            return ""
        for row in self.mode.claims(self.mode, self.config):
            if row.fails_in and any(name == each or (each[-1:] == " " and name.startswith(each)) for each in row.names):
                test = row.fails_in
                path = f"tests/experiments/test_{self.config.mode_name}.py::{test}"
                return path if test.startswith("test_") else test
        raise LookupError(f"no row of the mode's table and no injected bug says what makes the check {name!r} fail")

    def compare(
        self, name: str, predicted: float, measured: float, unit: str = "B", tolerance: float = 0.0, variant: str = "",
        formula: str = "", *, shown: str = "", control: str = "",
    ) -> None:  # fmt: skip
        """Compare a predicted with a measured value on this rank; beyond `tolerance` (in `unit`) the run fails.

        With `shown`, a reason, the comparison is informational. `control` is as in `check`.
        """
        if name == "peak bytes" and is_own(self.config.model):
            shown = shown or "no formula covers what a layer of your own model stores inside"
        control = "" if shown else self.mistake_for(name) or control or self.fails_in(name)
        self.journal.write(
            records.Comparison(
                variant, name, unit, predicted, measured, tolerance, formula, not shown, control, shown
            )
        )  # fmt: skip

    def waive(self, name: str, why: str, variant: str = "", times: int = 1) -> None:
        """Record that this rank omits an expected check that has no data; a name that ends in a space covers all names
        with this prefix."""
        self.journal.write(records.Waived(variant, name, why, times))

    def skip(self, variant: str, reason: str) -> None:
        """Leave out a variant that cannot take these sizes, with the reason; all ranks call it together."""
        if self.rank == 0:
            self.journal.write(records.Skipped(variant, reason))
        self.finished("skipped")

    # --- measurements ---

    @contextmanager
    def count(self, *, calls: bool = True) -> Iterator[Traffic]:
        """Count calls and wire bytes of the block, or only the wire bytes; all ranks enter and leave together."""
        with self._ledger.count(calls=calls) as traffic:
            yield traffic
        if traffic.wire_error is not None:
            self.waive("wire ", traffic.wire_error)

    def seconds(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Return the mean seconds of `repeats` calls in a row on this rank; all ranks begin together.

        A single call would mostly measure the end of the barrier.
        """
        self.exchange.barrier("seconds")
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) / repeats

    def losses(self) -> dict[str, list[float]]:
        """Return the loss curves of the timed pass by variant, and of one process, on rank 0, with NaN for an unknown
        loss; empty on other ranks."""
        written = (record for record in self.journal.records if isinstance(record, records.Losses))
        return {record.variant: record.numbers for record in written} if self.speaks else {}

    def first_calls(self) -> dict[str, list[list[Any]]]:
        """Return the calls of the first step of each variant on this rank, as in a FirstStep."""
        found = (record for record in self.journal.records if isinstance(record, records.FirstStep))
        return {record.variant: record.calls for record in found}

    def profiles(self) -> dict[str, dict[str, float]]:
        """Return the seconds by class of a median timed step on this rank, for each variant."""
        return {
            record.variant: record.seconds for record in self.journal.records if isinstance(record, records.Profile)
        }

    def stepped(self, units: float = 1) -> None:
        """Record that a step of a strategy is done, so many units of the current work; the first one ends the run's
        start-up."""
        self.first_step_at = self.first_step_at or time.time()
        self.work.advance(units)

    def wants(self, variant: str) -> bool:
        """Return whether LAB_VARIANT names this variant, or is unset."""
        return not self.config.variant or variant in self.config.variant

    def compare_predictions(self, predictions: Sequence[Prediction], measured: Mapping[str, Counted]) -> None:
        """Compare the measurements of each variant with all its predictions, by their kinds; rank 0 then prints
        both."""
        expected = [each for each in self.mode.all_predictions(predictions) if each.variant in measured]
        for name, kind in KINDS.items():
            for each in [each for each in expected if each.name == name]:
                value = kind.measure(measured[each.variant])
                if name == "wire bytes":
                    self.compare_bytes(each, measured[each.variant].traffic)
                elif value is not None:
                    self.compare_prediction(each, value, kind.absolute + kind.relative * each.value[self.rank])
        self.finished("measured")
        self.finished("memory")

    def compare_prediction(
        self,
        prediction: Prediction,
        measured: float,
        tolerance: float = 0.0,
        name: str = "",
        predicted: float | None = None,
    ) -> None:
        """Compare one number of this rank with its prediction, optionally under another `name` or with `predicted`."""
        wanted = prediction.value[self.rank] if predicted is None else predicted
        control = KINDS[prediction.name].control if prediction.name in KINDS else ""
        self.compare(
            name or prediction.name, wanted, measured, prediction.unit, tolerance, prediction.variant,
            prediction.formula, shown=prediction.shown, control=control,
        )  # fmt: skip

    def compare_bytes(self, prediction: Prediction, traffic: Traffic) -> None:
        """Compare called bytes exactly, and wire bytes within 1 % and the frames that gloo adds to each message.

        Called and predicted bytes are multiples of 1/N B, summed in different orders: rounded to 1/1000 B they are
        either equal or really different.
        """
        predicted = prediction.value[self.rank]
        self.compare_prediction(prediction, round(traffic.called_bytes, 3), 0.0, "called bytes", round(predicted, 3))
        if traffic.wire_error is None:
            tolerance = wire_tolerance(predicted, prediction.messages_of(self.rank))
            wanted, sent = self.bytes_to_compare(f"the wire of {prediction.variant}", predicted, traffic.wire_bytes)
            self.compare_prediction(prediction, sent, tolerance, predicted=wanted)

    def bytes_to_compare(self, label: str, wanted_bytes: float, wire_bytes: float) -> tuple[float, float]:
        """Return the wire bytes to compare: this rank's. Over plain TCP small sums go to rank 0 and back, so ranks
        differ and the formula is their mean: there both are the mean of all ranks."""
        if self.config.backend != "tcp":
            return wanted_bytes, wire_bytes
        everyone = self.exchange.everyone(label, (wanted_bytes, wire_bytes))
        return statistics.fmean(wanted for wanted, _ in everyone), statistics.fmean(sent for _, sent in everyone)


class Kind(NamedTuple):
    """How to check a prediction of a kind: the measured value, its tolerance, and what makes the check fail."""

    measure: Callable[[Any], float | None]  # None if there is nothing to check
    relative: float = 0.0
    absolute: float = 0.0
    control: str = ""  # as in `Lab.check`


# At rest there are weights, gradients, optimizer state, and leaks; message buffers that stay for the next step are not
# in the formulas and only informational. A bubble is measured if the passes were marked.
TESTS = "tests/lab/test_lab.py::"
KINDS = {
    "wire bytes": Kind(lambda step: None, control=f"{TESTS}test_bytes_that_differ_from_their_formula_fail"),  # noqa: ARG005
    "peak bytes": Kind(lambda step: sum(step.peak.values()), 0.05),
    "rest bytes": Kind(
        lambda step: sum(step.rest.values()) - step.rest["communication"], 0.01, 0, f"{TESTS}test_leaked_bytes_fail"
    ),
    "calls": Kind(lambda step: step.traffic.calls, 0, 0, f"{TESTS}test_calls_that_differ_from_their_formula_fail"),
    "bubble": Kind(lambda step: getattr(step, "bubble", None), 0, 0.03),
}
