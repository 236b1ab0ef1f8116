"""The verdict from all ranks' records: the first wrong tensor, the reason, and a table of modules.

The first one is in the first wrong step, gradients before weights, in the order of one process's backward pass: later
differences may follow from it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.lab.measure.tensors import factor
from distlab.lab.report import records
from distlab.lab.report.reading import to_line
from distlab.lab.report.sentences import FINDINGS
from distlab.lab.workload.reference import LEARNING_RATE
from distlab.tools.check.judge.axes import groups_of
from distlab.tools.prove import compare, reference
from distlab.tools.prove.compare import CLIP_EPSILON, GRADIENTS, LOSSES, TOLERANCE, WEIGHTS, Deviation, untrained
from distlab.tools.prove.explain import UNEXPLAINED, Context, blocks, near, why
from distlab.tools.prove.locate import LocatedTensor, Rows
from distlab.tools.prove.reference import STEPS, BatchSplit, Dense, contributions
from distlab.tools.prove.user_file import UserFile

CONTROL = "tests/tools/prove/test_bugs.py::test_it_is_named"
DROPOUT, BEGINNING, WHOLE_MODEL = "dropout by axis", "ranks begin with the model", "all is trained"
MOST_MODULES = 40


Report = Callable[..., None]  # reports one result: its kind ("finding", "record", "said") and values


@dataclass(frozen=True)
class Grid:
    """Each rank's position in the file's mesh, whose `axes` have sizes; the last is innermost, as in a DeviceMesh."""

    axes: Mapping[str, int]

    def index(self, rank: int, axis: str) -> int:
        """Return a rank's index along an axis; 0 if the axis does not exist."""
        return self.neighbours(rank)[axis].index(rank) if axis in self.axes else 0

    def neighbours(self, rank: int) -> dict[str, list[int]]:
        """Return along each axis the ranks that differ only in it, including this one."""
        names, sizes, ranks = list(self.axes), list(self.axes.values()), range(self.size)
        rows = {axis: groups_of(axis, names, sizes, ranks) for axis in names}
        return {axis: next(row for row in rows[axis] if rank in row) for axis in names}

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())


class RankRecords(NamedTuple):
    """The records of one rank."""

    deviations: list[Deviation]
    rows: dict[str, Rows]
    misfits: dict[str, str]
    loss_parts: list[float | None]
    drawn: list[compare.Draw]
    buffers: reference.Buffers
    by_strategy: bool


class AllRecords(NamedTuple):
    """The records of all ranks."""

    file: UserFile
    split: BatchSplit
    grid: Grid
    dense: Dense
    canonical: Mapping[str, str]
    ranks: Sequence[RankRecords]

    def select(self, step: int | None = None, kind: str = "") -> list[Deviation]:
        """Return the deviations of all ranks; only of a `step`, only of a `kind`, if given."""
        deviations = [each for mine in self.ranks for each in mine.deviations]
        return [each for each in deviations if step in (None, each.step) and kind in ("", each.kind)]

    def wrong(self) -> list[Deviation]:
        return [each for each in self.select() if each.is_wrong]

    def first(self) -> Deviation | None:
        place = {name: index for index, name in enumerate(self.dense.order)}

        def order(each: Deviation) -> tuple[int, bool, int, int]:
            return each.step, each.kind == WEIGHTS, place[self.canonical[each.name]], each.rank

        return min(self.wrong(), key=order, default=None)

    def _of_shard(self, loss_parts: Sequence[float]) -> float:
        """Return the loss of one shard: the one that all of its ranks have (tensor parallelism), or their sum."""
        equal = max(loss_parts) - min(loss_parts) <= self.loss_tolerance()
        return loss_parts[0] if equal else math.fsum(loss_parts)

    def without_gradient(self) -> list[str]:
        """Return the parameters whose gradient was missing on all ranks in some step, but not in one process."""
        known = {(each.step, self.canonical[each.name]) for each in self.select(kind=GRADIENTS)}
        missing = [
            name for step, one in enumerate(self.dense.steps) for name in one.gradients if (step, name) not in known
        ]
        return list(dict.fromkeys(missing))

    def loss_tolerance(self) -> float:
        """Return the difference in a loss that rounding, and a clip's epsilon in the weights, may cause."""
        clip = self.file.found.get("clip") or 0.0
        by_clip = STEPS * LEARNING_RATE * clip * CLIP_EPSILON
        return TOLERANCE * max(1.0, *(abs(each.loss) for each in self.dense.steps)) + by_clip

    def is_wrong(self) -> bool:
        off = any(each is not None and each > self.loss_tolerance() for each in self.losses())
        return off or self.first() is not None

    def losses(self) -> list[float | None]:
        """Return each step's largest difference from one process's loss; None if no rank had a loss."""
        found: list[float | None] = []
        for step, single in enumerate(self.dense.steps):
            by_shard = defaultdict[int, list[float]](list)
            for rank, mine in enumerate(self.ranks):
                if (part := mine.loss_parts[step]) is not None:
                    by_shard[rank if mine.by_strategy else self.grid.index(rank, "dp")].append(part)
            total = math.fsum(self._of_shard(each) for each in by_shard.values())
            off = abs(total - single.loss) if math.isfinite(total) else math.inf
            found.append(off if by_shard else None)
        return found


def report_all(
    run: AllRecords,
    first: Deviation | None,
    tensors: Sequence[LocatedTensor | None],
    errors: Sequence[str],
    send: Report,
) -> None:
    """Report findings, checks and the table to rank 0's coordinator."""
    sentences = defaultdict[str, list[str]](list)

    def add(check: str, sentence: str, ranks: Sequence[int]) -> None:
        sentences[check].append(sentence)
        send("finding", check, sentence, list(ranks))

    for name, rows in untrained([mine.rows for mine in run.ranks], run.canonical, run.dense):
        which = f" rows {rows[0]} to {rows[-1]} of" if rows else ""
        add(WHOLE_MODEL, f"no rank trains{which} {name}", range(len(run.ranks)))
    if missing := run.without_gradient():
        more = f", nor of {len(missing) - 1} more" if len(missing) > 1 else ""
        add(WHOLE_MODEL, f"no rank has a gradient of {missing[0]}{more}", range(len(run.ranks)))
    for rank, mine in enumerate(run.ranks):
        for name, misfit in list(mine.misfits.items())[:1]:
            more = f", and {len(mine.misfits) - 1} more" if len(mine.misfits) > 1 else ""
            add(BEGINNING, f"{name} on rank {rank} {misfit}{more}", [rank])
    for sentence, ranks in reference.wrong_buffers([mine.buffers for mine in run.ranks], run.dense.buffers):
        add(reference.BUFFERS, sentence, ranks)
    ranks = [rank for rank, each in enumerate(errors) if each]
    where = f"; the forward pass first differs on rank {ranks[0]}: {errors[ranks[0]]}" if ranks else ""
    losses, allowed = run.losses(), run.loss_tolerance()
    if first is not None:
        text = sentence_of(run, first, tensors)
        add(first.kind, text + (where if UNEXPLAINED in text else ""), sorted({each.rank for each in run.wrong()}))
    step = next((step for step, each in enumerate(losses) if each is not None and each > allowed), None)
    if step is not None and (first is None or step <= first.step):  # else the wrong weights explain it
        add(LOSSES, loss_sentence(run, step) + where, ranks or range(len(run.ranks)))
    for sentence, ranks in compare.wrong_draws([mine.drawn for mine in run.ranks], run.grid.neighbours):
        add(DROPOUT, sentence, ranks)
    seen = [each for each in losses if each is not None]
    for check in checks_of(run, sentences, seen, allowed):
        send("record", to_line(check))
    if first is not None:
        send("record", to_line(modules(run, first)))
    if any(mine.drawn for mine in run.ranks):
        send("said", "dropout", "nothing is dropped; the random states of the ranks are compared instead")
    for sentence in reference.changed_buffers([mine.buffers for mine in run.ranks], run.dense.buffers):
        send("said", "buffers", sentence)
    if not seen:
        send("said", "losses", "not compared: train_step returned no loss on any rank")


def checks_of(
    run: AllRecords, sentences: Mapping[str, list[str]], losses: Sequence[float], allowed: float
) -> Iterator[records.Check]:
    if losses:
        text = "; ".join(sentences[LOSSES])
        yield records.Check("", LOSSES, max(losses), allowed, detail=text, control=CONTROL)
    for kind in (GRADIENTS, WEIGHTS):
        worst = max(run.select(kind=kind), key=lambda each: each.difference / each.allowed, default=None)
        if worst is not None:
            detail = "; ".join(sentences[kind])
            yield records.Check("", kind, worst.difference, worst.allowed, detail=detail, control=CONTROL)
    drops, carries = any(mine.drawn for mine in run.ranks), bool(run.dense.buffers.start)
    for name in [BEGINNING, WHOLE_MODEL, *[DROPOUT] * drops, *[reference.BUFFERS] * carries]:
        found = sentences[name]
        yield records.Check("", name, len(found), 0, detail="; ".join(found[:4]), control=CONTROL, unit=FINDINGS)


def sentence_of(run: AllRecords, first: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    name = run.canonical[first.name]
    others = [alias for alias, target in run.canonical.items() if target == name and alias != first.name]
    shown = f"{first.name} (tied to {', '.join(others)})" if others else first.name
    wrong = [each for each in run.select(first.step, first.kind) if each.is_wrong]
    names = {run.canonical[each.name] for each in wrong}
    ranks = name_ranks(sorted({each.rank for each in wrong}))
    rest = f"{len(names)} of {len(run.dense.start)} parameters are wrong" if len(names) > 1 else "the only wrong one"
    where = f"step {first.step}, {rest}, on {ranks}"
    if first.kind == WEIGHTS:
        return f"weights of {shown} on rank {first.rank} {update(run, first, tensors)} ({where})"
    common = norm(run, first, wrong) or norm_by_shard(run, first, tensors[first.rank])
    return f"gradients of {shown} on rank {first.rank} are {common or reason(run, first, tensors)} ({where})"


def reason(run: AllRecords, first: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    name, dense = run.canonical[first.name], run.dense
    if name not in dense.steps[first.step].gradients:
        return "present, but one process has none: the loss does not depend on it"
    parts = contributions(run.file, run.split, dense.before(first.step), first.step, name)
    single = dense.steps[first.step]
    clip = run.file.found.get("clip")
    if clip is not None and single.norm > clip:
        parts = {part: each * (clip / single.norm) for part, each in parts.items()}
    terms = {
        (shard, index): run.file.terms(part.targets)
        for shard in range(run.split.num_shards)
        for index, part in enumerate(run.split.microbatches(first.step, shard))
    }
    grid, shard = run.grid, run.grid.index(first.rank, "dp")
    context = Context(first.rank, shard, grid.axes, grid.neighbours(first.rank), terms, grid.size)
    return why(context, tensors, single.gradients[name], parts)


def norm(run: AllRecords, first: Deviation, wrong: Sequence[Deviation]) -> str:
    """Return a sentence if clipping explains it: all gradients of a rank have one factor, so the norm is wrong."""
    clip = run.file.found.get("clip")
    factors = [each.factor for each in run.select(first.step, first.kind) if each.rank == first.rank and each.factor]
    if clip is None or not first.factor or len(factors) < 2 or not all(near(each, first.factor) for each in factors):
        return ""
    single = run.dense.steps[first.step].norm
    implied = clip / (first.factor * min(1.0, clip / single))
    by_rank = {each.rank: each.factor for each in wrong if each.factor}
    note = ", different on each rank" if len({round(value, 6) for value in by_rank.values()}) > 1 else ""
    longer = f"{implied / single:.4g} x one process's norm {single:.4g}{note}"
    own = own_norm(run, first) / min(1.0, clip / single)
    if own < single and math.isclose(implied, own, rel_tol=1e-4):  # within a clip's epsilon
        longer += "; it is that of this rank's own part alone: sum the squares over the ranks that have the other parts"
    return f"{first.factor:.4g} x one process's, as all on this rank: the norm that clips them to {clip:g} is {longer}"


def norm_by_shard(run: AllRecords, first: Deviation, mine: LocatedTensor | None) -> str:
    """Return the same for a parameter whose rows, from several ranks, each have their own factor."""
    clip, single = run.file.found.get("clip"), run.dense.steps[first.step]
    if clip is None or mine is None or mine.tensor is None or mine.tensor.dim() == 0:
        return ""
    found = blocks(mine.tensor.double(), mine.rows.of(single.gradients[run.canonical[first.name]]))
    norms = [clip / (times * min(1.0, clip / single.norm)) for _, times in found if times > 0]
    if not 1 < len(found) == len(norms) <= run.grid.size or math.hypot(*norms) > single.norm * (1 + 1e-4):
        return ""
    shown = ", ".join(f"rows {rows[0]} to {rows[-1]} {times:.4g} x" for rows, times in found)
    own = ", ".join(f"{each:.4g}" for each in norms)
    return (
        f"{shown} one process's: each rank's shard is clipped by its own norm ({own}; that of all is"
        f" {single.norm:.4g}); sum the squares of the shards' norms over the ranks before the root"
    )


def own_norm(run: AllRecords, first: Deviation) -> float:
    """Return the norm of one process's clipped gradients in this rank's parts of the parameters."""
    gradients = run.dense.steps[first.step].gradients
    rows = {run.canonical[name]: mine for name, mine in run.ranks[first.rank].rows.items()}
    return math.hypot(*(float(rows[name].of(gradients[name]).norm()) for name in rows if name in gradients))


def update(run: AllRecords, first: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    """Return how weights are wrong although their gradient is right."""
    mine, name = tensors[first.rank], run.canonical[first.name]
    if mine is None or mine.tensor is None:
        return "are missing"
    both = run.dense.before(first.step), run.dense.steps[first.step].weights
    start, wanted = (mine.rows.of(each[name]) for each in both)
    moved, right = mine.tensor - start, wanted - start
    if not moved.any():
        return "did not change, though they have a gradient: the optimizer does not have this parameter"
    times = factor(moved, right)
    if times is not None:
        return f"changed {times:.4g} x as much as one process's, though their gradient is right: another learning rate"
    after = f"a step of plain SGD at {LEARNING_RATE:g}"
    return f"differ by {first.difference:.2g} after {after}, though their gradient is right: other code writes them"


def loss_sentence(run: AllRecords, step: int) -> str:
    loss_parts = [mine.loss_parts[step] for mine in run.ranks]
    shown = ", ".join("none" if part is None else f"{part:.6g}" for part in loss_parts[:8])
    return (
        f"the loss of step {step} is {run.dense.steps[step].loss:.6g} in one process, but the ranks returned {shown}:"
        " they must add up to it over dp (loss * share of each microbatch)"
    )


def modules(run: AllRecords, first: Deviation) -> records.Table:
    """Return a table by module of the first wrong step, in the order of the backward pass."""
    place = {name: index for index, name in enumerate(run.dense.order)}
    rows = defaultdict[str, list[Deviation]](list)
    for each in sorted(run.select(first.step, first.kind), key=lambda each: place[run.canonical[each.name]]):
        rows[each.name.rpartition(".")[0] or "the model"].append(each)
    shown: list[list[Any]] = []
    for module, mine in list(rows.items())[:MOST_MODULES]:
        wrong = [each for each in mine if each.is_wrong]
        names = sorted({each.name.rpartition(".")[2] for each in wrong})
        factors = {f"{each.factor:.4g}" for each in wrong if each.factor is not None}
        ranks = name_ranks(sorted({each.rank for each in wrong})) if wrong else ""
        largest = max(each.difference for each in mine)
        times = ", ".join(sorted(factors)) if wrong and all(each.factor is not None for each in wrong) else ""
        shown.append([module, "wrong" if wrong else "right", ", ".join(names), ranks, times, f"{largest:.2g}"])
    title = f"{first.kind.capitalize()} of step {first.step} by module, in the order of the backward pass"
    return records.Table(title, ["module", "", "parameters", "on", "x one process's", "largest difference"], shown)
