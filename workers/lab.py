"""Lab: all that an experiment may ask for. Strategy: all that a variant must answer.

An experiment reads top to bottom like its lesson because everything around the lesson is here: the model and the data,
the loops of proof, timing and counting (`measure`), checks and comparisons that decide the verdict, and words and
tables that reach both the log and the report. An experiment holds no clock, no print, no file and no os.environ.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workers.cluster.exchange import Exchange
from workers.config import Config
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import wire_tolerance
from workers.measure.ledger import Ledger, Traffic
from workers.report import records
from workers.report.journal import Journal
from workers.report.text import aligned
from workers.workload.data import Batches, Microbatch, effective_batch
from workers.workload.model import Model, build_model

if TYPE_CHECKING:
    from workers.checkpoint.resuming import Checkpoints
    from workers.checkpoint.saver import Saver


class Strategy(Protocol):
    """One way of training a model on many ranks.

    Its steps make the same calls, or it has an attribute `repeats_after`: the number of steps after which they repeat.
    """

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Forward and backward of this rank's microbatches, gradients synchronised, once a step.

        Returns this rank's share of the loss, detached: the shares of all ranks add up to the mean loss of the batch.
        None where a rank sees no loss.
        """

    def update(self) -> None:
        """Clip, and step the optimizer."""

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """A collective: dense "gradients", "weights" or "optimizer" state under dense names on rank 0, one at a time."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: 'weights.<name>' and 'optimizer.<key>.<name>', each a view of what is trained on.

        Dense names; a Tensor where this rank holds it whole, a Piece or a DTensor where it holds a part, none where nothing.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which `state_dict` gave and a checkpoint has filled in place."""


Variant = Callable[[Model, dist.ProcessGroup, Config], Strategy]


@dataclass(frozen=True)
class Counted:
    """What one step of a variant sent from this rank, and what it held: bytes for the backward pass, and all by class."""

    traffic: Traffic
    activation_bytes: int
    rest: dict[str, int]  # bytes by class (measure/purposes.py) between two steps
    peak: dict[str, int]  # and when the step held most


@dataclass(frozen=True)
class Measured(Counted):
    """`Counted`, and of the timed steps the bubble: on rank 0, where the variant marks its passes."""

    bubble: float | None


@dataclass(frozen=True)
class Bug:
    """A classic mistake that LAB_BUG makes on purpose: what breaks, and the check that sees it."""

    what: str
    check: str


def no_checkpoints(config: Config, why: str) -> list[str]:
    """For the `refuse` of a mode that saves none: a sentence for each variable that asks for checkpoints all the same."""
    asked = {"LAB_CHECKPOINT_EVERY": config.checkpoint_every, "LAB_RESUME": config.resume}
    return [
        f"{name}={value}: {config.run_mode} {why}; checkpoints go with dp, fsdp, pp or tp"
        for name, value in asked.items()
        if value is not None
    ]


class Lab:
    """One rank's laboratory: the run's settings, the ranks as a group, and the verbs of an experiment."""

    def __init__(
        self, config: Config, device: torch.device, group: dist.ProcessGroup, exchange: Exchange, ledger: Ledger,
        journal: Journal, at: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self.config = config
        self.device = device
        self.group = group  # all ranks
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.shards = self.world_size  # into how many parts the batch is dealt
        self.exchange = exchange
        self.journal = journal
        self.at = at  # (step, phase): what the watch tells the other ranks
        self.first_step_at: float | None = None
        self.side_group: dist.ProcessGroup | None = None  # of gloo and all ranks, for what goes on beside the training
        self.checkpoints: Checkpoints | None = None  # where the run saves or resumes
        self.saver: Saver | None = None  # while the timed pass saves
        # Where ranks may leave: call it once all that is left to do needs rank 0 alone, with what to do when one has left.
        self.let_leave: Callable[[Callable[[int], None]], None] | None = None
        self._ledger = ledger

    # --- what is trained ---

    def model(self, dtype: torch.dtype) -> Model:
        """The dense model by LAB_SEED: the same on every rank."""
        return build_model(self.config, self.config.seed).to(self.device, dtype)

    def batches(self, dtype: torch.dtype, *, proof: bool = False) -> Batches:
        """The global batches, and each rank's part of them."""
        return Batches(self.config, proof=proof, device=self.device, dtype=dtype)

    # --- what is said ---

    def say(self, text: str, heading: str = "", *, all_ranks: bool = False) -> None:
        """A line in the log of rank 0, or of every rank; with a heading it stands in the report too."""
        if self.rank == 0 or all_ranks:
            self.journal.say(f"{heading:<11}{text}" if heading else text)
        if self.rank == 0 and heading:
            self.journal.write(records.Said(heading, text))

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A table of the lesson's own, in rank 0's log and in the report."""
        if self.rank == 0:
            self.journal.say("\n".join([title, *aligned(columns, rows)]))
            self.journal.write(records.Table(title, columns, rows))

    def chart(
        self, title: str, x_label: str, y_label: str, series: dict[str, list[list[float]]], *, log_x: bool = False, log_y: bool = False
    ) -> None:  # fmt: skip
        """A line chart in the report: `series` maps a name to [x values, y values]."""
        if self.rank == 0:
            self.journal.write(records.Chart(title, x_label, y_label, series, log_x, log_y))

    # --- what decides ---

    def check(self, name: str, max_abs_diff: float, tolerance: float, variant: str = "", detail: str = "") -> None:
        """A claim of this rank: holds if `max_abs_diff <= tolerance`. The run passes if all claims of all ranks hold."""
        self.journal.write(records.Check(variant, name, float(max_abs_diff), float(tolerance), detail))

    def compare(
        self, name: str, predicted: float, measured: float, unit: str = "B", tolerance: float = 0.0, variant: str = "",
        formula: str = "", *, decides: bool = True,
    ) -> None:  # fmt: skip
        """Predicted beside measured on this rank; within `tolerance` (in `unit`), or the run fails if it `decides`."""
        self.journal.write(records.Comparison(variant, name, unit, predicted, measured, tolerance, formula, decides))

    def skip(self, variant: str, reason: str) -> None:
        """Leave out a variant that cannot take these sizes, and say why."""
        if self.rank == 0:
            self.journal.write(records.Skipped(variant, reason))
            self.journal.say(f"skipped    {variant}: {reason}")

    # --- what is measured ---

    def count(self, *, calls: bool = True) -> AbstractContextManager[Traffic]:
        """Calls and wire bytes of what runs inside the block, or the wire alone; all ranks enter and leave together."""
        return self._ledger.count(calls=calls)

    def seconds(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of one of `repeats` calls in a row on this rank; all ranks begin together.

        One call alone would time the end of the barrier more than itself.
        """
        self.exchange.barrier("seconds")
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) / repeats

    def measure(
        self,
        *variants: Variant,
        also: Callable[[str, Strategy], None] | None = None,
        shards: int | None = None,
        cannot: Mapping[str, str] | None = None,
        proofs: Mapping[str, Callable[[Variant], None]] | None = None,
    ) -> dict[str, Measured]:
        """Prove, time and count every variant; `also(name, strategy)` adds checks at the end of each proof.

        The batch is dealt in `shards` equal runs of ranks: one a rank by default, 1 where all ranks work on the same
        samples. Variants in `cannot` are skipped, for the reason given there. Variants in `proofs` do on purpose not compute
        what one process does: each is proven by what stands there in its place. Returns what was measured on this rank.
        """
        from workers.passes.counted import count  # the passes are written in terms of Lab
        from workers.passes.proof import prove
        from workers.passes.timed import time_steps

        self.shards = shards or self.world_size
        self.say(effective_batch(self.config, self.shards), "batch")
        chosen = {variant.__name__: variant for variant in variants if self.wants(variant.__name__)}
        reasons = self.open_checkpoints(list(chosen)) | dict(cannot or {})
        for name in [name for name in chosen if name in reasons]:
            self.skip(name, reasons[name])
            del chosen[name]
        if self.config.proof:
            prove(self, chosen, also, proofs or {})
        bubbles = time_steps(self, chosen)
        counted = count(self, chosen)
        if self.config.trace:
            from workers.passes.profiled import trace

            trace(self, chosen)
        return {name: Measured(**vars(each), bubble=bubbles.get(name)) for name, each in counted.items()}

    def losses(self) -> dict[str, list[float]]:
        """The loss curves of the timed pass by variant, and of one process, on rank 0; nothing elsewhere."""
        return {record.variant: record.values for record in self.journal.records if isinstance(record, records.Losses)}

    def open_checkpoints(self, variants: list[str]) -> dict[str, str]:
        """Find what LAB_RESUME goes on from; returns which of `variants` it does not hold, and a sentence for each."""
        if self.config.checkpoint_every is None and self.config.resume is None:
            return {}
        from workers.checkpoint.resuming import prepare  # torch's checkpoints: 0.7 s that other runs need not wait

        self.checkpoints = prepare(self)
        resumed = self.checkpoints.resumed
        missing = [name for name in variants if resumed is not None and name not in resumed.manifest.steps]
        return {name: f"the checkpoint that is resumed does not hold {name}" for name in missing}

    def stepped(self) -> None:
        """A step of a strategy is done; the first one ends the start-up of the run."""
        self.first_step_at = self.first_step_at or time.time()

    def wants(self, variant: str) -> bool:
        """Whether LAB_VARIANT names this variant, or none."""
        return not self.config.variant or variant in self.config.variant

    def compare_traffic(self, predictions: list[Prediction], measured: Mapping[str, Counted]) -> None:
        """Hold the bytes of each variant against its prediction, as called and on the wire.

        The tolerance on the wire is 1 % plus 1 KiB for each call and other rank, since gloo adds about 577 B to each.
        """
        for prediction in predictions:
            if prediction.variant not in measured or prediction.name != "wire bytes":
                continue
            traffic, predicted = measured[prediction.variant].traffic, prediction.value[self.rank]
            tolerance = wire_tolerance(predicted, prediction.calls, self.world_size)
            seen = {"called bytes": traffic.called_bytes}
            if traffic.wire_error is None:
                seen["wire bytes"] = traffic.wire_bytes
            for name, value in seen.items():
                self.compare(
                    name, predicted, value, "B", tolerance, prediction.variant, prediction.formula,
                    decides=prediction.decides,
                )  # fmt: skip

    def compare_rest(self, predictions: list[Prediction], measured: Mapping[str, Counted]) -> None:
        """Hold the bytes of each variant between two steps against its prediction, within 1 %.

        Weights, gradients, optimizer state, and what else should be gone by then; buffers of messages that are kept for the
        next step are no part of the formulas, and only shown.
        """
        for prediction in predictions:
            if prediction.variant in measured and prediction.name == "rest bytes":
                rest, predicted = measured[prediction.variant].rest, prediction.value[self.rank]
                held = sum(rest.values()) - rest["communication"]
                self.compare(
                    prediction.name, predicted, held, "B", 0.01 * predicted, prediction.variant, prediction.formula,
                    decides=prediction.decides,
                )  # fmt: skip
