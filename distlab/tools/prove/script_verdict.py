"""Compare a script's training on several ranks with one rank: step by step, tensor by tensor.

A difference counts if it is 10 times that of another sample order on one rank, and more than the dtype's rounding.
Steps are compared if their inputs are equal: each row that reaches the model on one rank reaches it on some rank, and
vice versa.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.lab.cluster import name_ranks
from distlab.lab.report import records
from distlab.lab.report.sentences import FINDINGS
from distlab.lab.report.units import counted
from distlab.tools.check.judge.fault import and_more
from distlab.tools.check.judge.rank_state import Finding
from distlab.tools.prove.locate import Place, places_of
from distlab.tools.prove.script_causes import StepData, cause
from distlab.tools.prove.script_ledgers import CHECKS, ledger_findings, remarks

CONTROL = "tests/tools/prove/test_scripts.py::test_what_is_wrong_is_named"
GRADIENTS, UPDATES = "the gradients", "the updates"
TIMES_NOISE = 10
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value of a tensor, that counts at least
LOW, OF_ALL = 5e-2, 1e-2  # the same in 16 bits; and relative to the largest of all tensors
LEAST_GRADIENT = 1e-3  # relative to the largest: smaller ones may be rounding, which Adam scales up
MOST_UPDATE, MOST_NOISE = 0.05, 0.05  # relative to the length of an update, of a gradient

Steps = Sequence[Mapping[str, Any]]  # of each rank


class ComparedRuns(NamedTuple):
    """Notes, findings and records of the comparison."""

    notes: list[tuple[str, str]]  # a heading and a text
    findings: list[Finding]
    records: list[records.Record]


class RoleRecords:
    """The records of all processes of one role."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folders = [folder / str(rank) for rank in range(count)]
        self.ledgers: list[dict[str, Any]] = []
        for each in self._folders:
            with suppress(OSError, ValueError):
                self.ledgers.append(json.loads((each / "ledger.json").read_text()))
        self.is_whole = len(self.ledgers) == count
        self.steps = min((len(list(each.glob("step-*.pt"))) for each in self._folders), default=0)

    @cache  # noqa: B019
    def step(self, number: int) -> Steps:
        return [torch.load(each / f"step-{number}.pt", weights_only=True) for each in self._folders]

    def first(self) -> list[dict[str, Any]]:
        """Return the first weights of each rank, by name."""
        found: list[dict[str, Any]] = [{} for _ in self._folders]
        for number in range(self.steps):
            for mine, step in zip(found, self.step(number), strict=True):
                mine.update({name: piece for name, piece in step["before"].items() if name not in mine})
        return found


class Difference(NamedTuple):
    """A rank's tensor that differs from the reference's."""

    rank: int
    name: str
    difference: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return not self.difference <= self.allowed


class Row(NamedTuple):
    """A step: losses, the largest relative differences, learning rates, and what is wrong."""

    number: int
    losses: tuple[float, float]
    gradients: float
    updates: float
    rates: tuple[list[float], list[float]]
    wrong: list[Difference]
    wrong_updates: list[Difference]
    why_not: str = ""


def dense_of(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return whole tensors from the reference's ranks."""
    found: dict[str, Tensor] = {}
    for mine in reversed(pieces):
        for name, (begin, shape, tensor) in mine.items():
            if not begin:
                found[name] = tensor
            else:
                whole = found.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
                Place(name, begin=tuple(begin)).put(whole, tensor)
    return found


class Comparison:
    """The ranks compared with the reference."""

    def __init__(self, ranks: RoleRecords, reference: RoleRecords, noise: RoleRecords) -> None:
        self.ranks, self._reference, self._noise = ranks, reference, noise
        dense = dense_of(reference.first())
        self.places = [places_of(mine, dense) for mine in ranks.first()]

    def rows(self) -> Iterator[Row]:
        for number in range(min(self.ranks.steps, self._reference.steps)):
            yield self._row(number)

    def _row(self, number: int) -> Row:
        ranks, (alone, *_) = self.ranks.step(number), self._reference.step(number)
        losses = loss_of(ranks, alone)
        rates = ranks[0]["rates"], alone["rates"]
        why_not = self._inputs_differ(ranks, self._reference.step(number))
        if why_not:
            return Row(number, losses, math.nan, math.nan, rates, [], [], why_not)
        dense = self._dense(self._reference, number, "gradients")
        again = self._dense(self._noise, number, "gradients") if number < self._noise.steps else dense
        if not dense:
            return Row(number, losses, math.nan, math.nan, rates, [], [], "no gradient reaches the optimizer on 1 rank")
        largest = max((largest_of(each) for each in dense.values()), default=0.0)
        both = [name for name in dense if name in again]
        noise = {name: largest_of(dense[name].double() - again[name].double()) for name in both}
        if sum(noise.values()) > MOST_NOISE * sum(map(largest_of, dense.values())):
            return Row(number, losses, math.nan, math.nan, rates, [], [], "the order of samples changes the gradients")
        differences = [
            self._gradient_difference(rank, name, place, step, dense, noise, largest)
            for rank, step in enumerate(ranks)
            for name, place in self.places[rank].items() if name in step["before"]
        ]  # fmt: skip
        if not differences:
            return Row(number, losses, math.nan, math.nan, rates, [], [], "no tensor of the ranks is found on 1 rank")
        wrong = [each for each in differences if each.is_wrong]
        updates = [] if wrong or rates[0] != rates[1] else list(self._updates(number, ranks, largest, dense))
        of_update = max((each.difference for each in updates), default=math.nan)
        of_all = max((each.difference for each in differences), default=0.0) / (largest or 1.0)
        return Row(number, losses, of_all, of_update, rates, wrong, [each for each in updates if each.is_wrong])

    def _dense(self, role: RoleRecords, number: int, kind: str) -> dict[str, Tensor]:
        return dense_of([each[kind] for each in role.step(number)])

    def _gradient_difference(
        self, rank: int, name: str, place: Place, step: Mapping[str, Any], dense: Mapping[str, Tensor],
        noise: Mapping[str, float], largest: float,
    ) -> Difference:  # fmt: skip
        piece, whole = step["gradients"].get(name), dense.get(place.name)
        shape = step["before"][name][2].shape
        if piece is None or whole is None:
            present = place.of(whole, shape) if whole is not None else piece[2] if piece is not None else torch.zeros(1)
            return Difference(rank, name, largest_of(present), 1e-6 * largest)
        wanted = place.of(whole, shape).double()
        low = step["low"] or wanted.dtype in (torch.bfloat16, torch.float16)
        relative = LOW if low else RELATIVE.get(piece[2].dtype, LOW)
        least = relative * max(largest_of(whole), OF_ALL * largest)
        found = piece[2].double()
        difference = math.inf if found.shape != wanted.shape else largest_of(found - wanted)
        return Difference(rank, name, difference, max(TIMES_NOISE * noise.get(place.name, 0.0), least))

    def _updates(self, number: int, ranks: Steps, largest: float, dense: Mapping[str, Tensor]) -> Iterator[Difference]:
        """Yield how far each update is from one rank's, relative to its length."""
        alone = {kind: self._dense(self._reference, number, kind) for kind in ("before", "after")}
        again = self._noise if number < self._noise.steps else self._reference
        other = {kind: self._dense(again, number, kind) for kind in ("before", "after")}
        for rank, step in enumerate(ranks):
            for name, place in self.places[rank].items():
                whole = dense.get(place.name)
                if name not in step["after"] or whole is None or place.name not in other["after"]:
                    continue
                before, after = step["before"][name][2].double(), step["after"][name][2].double()
                large = place.of(whole, before.shape).abs() > LEAST_GRADIENT * largest
                if not large.any():
                    continue
                parts = [place.of(of[kind][place.name], before.shape).double() for of in (alone, other) for kind in of]
                moved, wanted, mixed = (
                    each[large] for each in (after - before, parts[1] - parts[0], parts[3] - parts[2])
                )
                length = float(wanted.norm())
                rounded = 4 * torch.finfo(step["after"][name][2].dtype).eps * float(after.norm())
                allowed = max(MOST_UPDATE * length, TIMES_NOISE * float((wanted - mixed).norm()), rounded)
                unit = length or 1.0
                yield Difference(rank, name, float((moved - wanted).norm()) / unit, allowed / unit)

    def _inputs_differ(self, ranks: Steps, alone: Steps) -> str:
        """Return why a step cannot be compared: other rows reach the model."""
        if len({each["stepped_at"] for each in (*ranks, *alone)}) > 1:
            return "different steps"
        stepped = {name for each in alone for name in each["before"]}
        for kind in {kind for each in alone for kind in each["inputs"]}:
            mine = {row for each in alone for row in each["inputs"].get(kind, ())}
            by_rank = [set(each["inputs"].get(kind, ())) for each in ranks]
            if not any(by_rank):
                continue  # padded to another length
            whole = [
                rows for rows, places in zip(by_rank, self.places, strict=True)
                if {place.name for place in places.values()} >= stepped
            ]  # fmt: skip
            if mine - set().union(*by_rank) or any(rows - mine for rows in whole):
                return "different inputs"
        return ""

    def cause(self, row: Row, gathered: str) -> str:
        """Return which gradients of the first wrong step are wrong, why, and where."""
        ranks = self.ranks.step(row.number)
        local = {
            name: torch.stack([each for _, each in parts]).sum(0)
            for name, parts in self._reference.step(row.number)[0]["parts"].items()
        }
        dense = self._dense(self._reference, row.number, "gradients")
        first = min(each.rank for each in row.wrong)
        names = [each.name for each in row.wrong if each.rank == first]
        outputs = self._reference.step(row.number)[0]["outputs"]
        step = StepData(ranks, self.places, dense, local, outputs, gathered)
        of_rank = [name for name in self.places[first] if name in ranks[first]["before"]]
        all_of_them = f"all {len(names)} parameters" if len(names) == len(of_rank) > 1 else and_more(names)
        ranks_text = name_ranks(sorted({each.rank for each in row.wrong}))
        where = f"{ranks[first]['line']}, step {row.number}, on {ranks_text}"
        return f"gradients of {all_of_them} are {cause(step, first, names)} ({where})"


def largest_of(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    value = float(tensor.detach().abs().max())
    return value if math.isfinite(value) else math.inf


def loss_of(ranks: Steps, alone: Mapping[str, Any]) -> tuple[float, float]:
    """Return one rank's loss, and the ranks': their mean, or their sum if that matches."""
    wanted = sum(alone["losses"])
    sums = [sum(each["losses"]) for each in ranks]
    mean, total = sum(sums) / len(sums), sum(sums)
    return wanted, total if abs(total - wanted) < abs(mean - wanted) else mean


def compare_runs(folder: Path, size: int, references: int, why_not: str) -> ComparedRuns:
    """Return all that is known of a run and its reference."""
    ranks = RoleRecords(folder / "ranks", size)
    label = "1 rank" if references == 1 else f"{references} ranks"
    if not ranks.is_whole:
        return ComparedRuns([("reference", f"not compared: {why_not or 'a rank wrote no records'}")], [], [])
    reference, noise = (RoleRecords(folder / role, references) for role in ("reference", "noise"))
    findings = list(ledger_findings(ranks.ledgers, reference.ledgers[0] if reference.ledgers else None))
    notes, table = [], []
    comparable = not why_not and ranks.steps and reference.steps
    rows = list(Comparison(ranks, reference, noise).rows()) if comparable else []
    right = [row for row in rows if not row.why_not]
    if right:
        what = f"the same script on {label}, with the samples that all {size} ranks read, and the same initial weights"
        notes.append(("reference", what))
        findings += judged(Comparison(ranks, reference, noise), right, ranks.ledgers[0]["gathered"], label)
        table = [records.Table(*table_of(rows, size, label))]
    else:
        notes.append(("reference", uncompared(ranks, rows, why_not, label)))
    notes += [("note", sentence) for sentence in remarks(ranks.ledgers, reference.ledgers[:1], size)]
    checks = [
        records.Check(
            "", name, sum(each.check == name for each in findings), 0, control=CONTROL, unit=FINDINGS,
            detail="; ".join(each.sentence for each in findings if each.check == name),
        )
        for name in (*((GRADIENTS, UPDATES) if right else ()), *CHECKS)
    ]  # fmt: skip
    printed = [records.Said(heading, text) for heading, text in notes]
    return ComparedRuns(notes, findings, [*printed, *table, *checks])


def judged(comparison: Comparison, rows: Sequence[Row], gathered: str, label: str) -> Iterator[Finding]:
    """Yield the first wrong step."""
    for row in rows:
        if row.wrong:
            wrong = tuple(sorted({each.rank for each in row.wrong}))
            yield Finding(GRADIENTS, comparison.cause(row, gathered).replace("one rank", label), wrong)
            return
        if row.wrong_updates:
            wrong = tuple(sorted({each.rank for each in row.wrong_updates}))
            names = list(dict.fromkeys(each.name for each in row.wrong_updates))
            sentence = (
                f"{and_more(names)} changed differently in step {row.number} than on {label}, though gradients and"
                " learning rates are equal: the optimizer has another state or other options, or other code writes them"
            )
            yield Finding(UPDATES, sentence, wrong)
            return


def uncompared(ranks: RoleRecords, rows: Sequence[Row], why_not: str, label: str) -> str:
    """Return why there is no comparison with a reference, and what to do."""
    if why_not:
        return f"not compared: {why_not} (on {label}); --reference 2 compares with 2 ranks"
    if not ranks.steps:
        return "not compared: no optimizer took a step"
    uses_loader = any(each["trains"] for each in ranks.ledgers[0]["passes"])
    reasons = {row.why_not for row in rows}
    if reasons == {"different inputs"} and not uses_loader:
        return (
            f"not compared: the script makes its own batches, and on {label} others than on all ranks: wrap them, x, y"
            " = distlab.batch(x, y)"
        )
    if reasons == {"different inputs"}:
        return (
            "not compared: the model's inputs are not the samples that were read: the script changes them with random"
            " numbers, which differ per rank"
        )
    return f"not compared: {'; '.join(sorted(reasons)) or 'no step was taken on ' + label}"


def table_of(rows: Sequence[Row], size: int, label: str) -> tuple[str, list[str], list[list[Any]]]:
    """Return a table with one row per step."""
    shown: list[list[Any]] = []
    for row in rows:
        wanted, found = row.losses
        rates = " ".join(f"{each:g}" for each in row.rates[0])
        other = " ".join(f"{each:g}" for each in row.rates[1])
        rate = rates if rates == other else f"{rates} ({label} {other})"
        far = ["-" if math.isnan(each) else f"{each:.0e}" for each in (row.gradients, row.updates)]
        shown.append([row.number, f"{wanted:.6f}", f"{found:.6f}", row.why_not or far[0], far[1], rate])
    columns = ["step", f"loss {label}", f"{size} ranks", "gradients", "updates", "rate"]
    return f"Steps on {label} and on {counted(size, 'ranks')}", columns, shown
