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
from distlab.tools.prove.compare import CLIP_EPSILON, GRADIENTS, LOSSES, TOLERANCE, WEIGHTS, Deviation, not_held
from distlab.tools.prove.explain import UNEXPLAINED, Scene, blocks, near, why
from distlab.tools.prove.locate import LocatedTensor, Rows
from distlab.tools.prove.reference import STEPS, Dealing, Dense, contributions
from distlab.tools.prove.user_file import UserFile

CONTROL = "tests/tools/prove/test_bugs.py::test_it_is_named"
DROPOUT, BEGINNING, WHOLE_MODEL = "dropout by axis", "ranks begin with the model", "all is trained"
MOST_MODULES = 40


Say = Callable[..., None]  # reports one result: its kind ("finding", "record", "said") and values


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


class Mine(NamedTuple):
    """The records of one rank."""

    offs: list[Deviation]
    rows: dict[str, Rows]
    misfits: dict[str, str]
    shares: list[float | None]
    drawn: list[compare.Draw]
    carried: reference.Buffers
    by_strategy: bool


class Everything(NamedTuple):
    """The records of all ranks."""

    theirs: UserFile
    dealing: Dealing
    grid: Grid
    dense: Dense
    canonical: Mapping[str, str]
    ranks: Sequence[Mine]

    def offs(self, step: int | None = None, kind: str = "") -> list[Deviation]:
        """Return the deviations of all ranks; only of a `step`, only of a `kind`, if given."""
        offs = [each for mine in self.ranks for each in mine.offs]
        return [each for each in offs if step in (None, each.step) and kind in ("", each.kind)]

    def wrong(self) -> list[Deviation]:
        return [each for each in self.offs() if each.is_wrong]

    def first(self) -> Deviation | None:
        place = {name: index for index, name in enumerate(self.dense.order)}

        def turn(each: Deviation) -> tuple[int, bool, int, int]:
            return each.step, each.kind == WEIGHTS, place[self.canonical[each.name]], each.rank

        return min(self.wrong(), key=turn, default=None)

    def _of_shard(self, shares: Sequence[float]) -> float:
        """Return the loss of one shard: the one that all of its ranks have (tensor parallelism), or their sum."""
        alike = max(shares) - min(shares) <= self.loss_tolerance()
        return shares[0] if alike else math.fsum(shares)

    def without_gradient(self) -> list[str]:
        """Return the parameters whose gradient was missing on all ranks in some step, but not in one process."""
        given = {(each.step, self.canonical[each.name]) for each in self.offs(kind=GRADIENTS)}
        missing = [
            name for step, alone in enumerate(self.dense.steps) for name in alone.gradients if (step, name) not in given
        ]
        return list(dict.fromkeys(missing))

    def loss_tolerance(self) -> float:
        """Return the difference in a loss that rounding, and a clip's epsilon in the weights, may cause."""
        clip = self.theirs.found.get("clip") or 0.0
        by_clip = STEPS * LEARNING_RATE * clip * CLIP_EPSILON
        return TOLERANCE * max(1.0, *(abs(each.loss) for each in self.dense.steps)) + by_clip

    def is_wrong(self) -> bool:
        off = any(each is not None and each > self.loss_tolerance() for each in self.losses())
        return off or self.first() is not None

    def losses(self) -> list[float | None]:
        """Return each step's largest difference from one process's loss; None if no rank had a loss."""
        found: list[float | None] = []
        for step, alone in enumerate(self.dense.steps):
            by_shard = defaultdict[int, list[float]](list)
            for rank, mine in enumerate(self.ranks):
                if (share := mine.shares[step]) is not None:
                    by_shard[rank if mine.by_strategy else self.grid.index(rank, "dp")].append(share)
            total = math.fsum(self._of_shard(each) for each in by_shard.values())
            off = abs(total - alone.loss) if math.isfinite(total) else math.inf
            found.append(off if by_shard else None)
        return found


def tell(
    all_: Everything, first: Deviation | None, tensors: Sequence[LocatedTensor | None], parted: Sequence[str], say: Say
) -> None:
    """Report findings, checks and the table to rank 0's coordinator."""
    sentences = defaultdict[str, list[str]](list)

    def find(check: str, sentence: str, ranks: Sequence[int]) -> None:
        sentences[check].append(sentence)
        say("finding", check, sentence, list(ranks))

    for name, rows in not_held([mine.rows for mine in all_.ranks], all_.canonical, all_.dense):
        which = f" rows {rows[0]} to {rows[-1]} of" if rows else ""
        find(WHOLE_MODEL, f"no rank trains{which} {name}", range(len(all_.ranks)))
    if ungiven := all_.without_gradient():
        more = f", nor of {len(ungiven) - 1} more" if len(ungiven) > 1 else ""
        find(WHOLE_MODEL, f"no rank gave the gradient of {ungiven[0]}{more}", range(len(all_.ranks)))
    for rank, mine in enumerate(all_.ranks):
        for name, misfit in list(mine.misfits.items())[:1]:
            more = f", and {len(mine.misfits) - 1} more" if len(mine.misfits) > 1 else ""
            find(BEGINNING, f"{name} on rank {rank} {misfit}{more}", [rank])
    for sentence, odd in reference.wrong([mine.carried for mine in all_.ranks], all_.dense.carried):
        find(reference.BUFFERS, sentence, odd)
    odd = [rank for rank, each in enumerate(parted) if each]
    where = f"; the forward pass parts first on rank {odd[0]}: {parted[odd[0]]}" if odd else ""
    losses, allowed = all_.losses(), all_.loss_tolerance()
    if first is not None:
        said = sentence_of(all_, first, tensors)
        find(first.kind, said + (where if UNEXPLAINED in said else ""), sorted({each.rank for each in all_.wrong()}))
    step = next((step for step, each in enumerate(losses) if each is not None and each > allowed), None)
    if step is not None and (first is None or step <= first.step):  # else the wrong weights explain it
        find(LOSSES, loss_sentence(all_, step) + where, odd or range(len(all_.ranks)))
    for sentence, odd in compare.wrong_draws([mine.drawn for mine in all_.ranks], all_.grid.neighbours):
        find(DROPOUT, sentence, odd)
    seen = [each for each in losses if each is not None]
    for check in written(all_, sentences, seen, allowed):
        say("record", to_line(check))
    if first is not None:
        say("record", to_line(modules(all_, first)))
    if any(mine.drawn for mine in all_.ranks):
        say("said", "dropout", "nothing is dropped here; who draws what is compared along the axes")
    for sentence in reference.written([mine.carried for mine in all_.ranks], all_.dense.carried):
        say("said", "buffers", sentence)
    if not seen:
        say("said", "losses", "not compared: train_step returned none on any rank")


def written(
    all_: Everything, sentences: Mapping[str, list[str]], losses: Sequence[float], allowed: float
) -> Iterator[records.Check]:
    if losses:
        said = "; ".join(sentences[LOSSES])
        yield records.Check("", LOSSES, max(losses), allowed, detail=said, control=CONTROL)
    for kind in (GRADIENTS, WEIGHTS):
        worst = max(all_.offs(kind=kind), key=lambda each: each.difference / each.allowed, default=None)
        if worst is not None:
            detail = "; ".join(sentences[kind])
            yield records.Check("", kind, worst.difference, worst.allowed, detail=detail, control=CONTROL)
    drops, carries = any(mine.drawn for mine in all_.ranks), bool(all_.dense.carried.start)
    for name in [BEGINNING, WHOLE_MODEL, *[DROPOUT] * drops, *[reference.BUFFERS] * carries]:
        found = sentences[name]
        yield records.Check("", name, len(found), 0, detail="; ".join(found[:4]), control=CONTROL, unit=FINDINGS)


def sentence_of(all_: Everything, off: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    name = all_.canonical[off.name]
    others = [alias for alias, target in all_.canonical.items() if target == name and alias != off.name]
    shown = f"{off.name} (tied to {', '.join(others)})" if others else off.name
    wrong = [each for each in all_.offs(off.step, off.kind) if each.is_wrong]
    names = {all_.canonical[each.name] for each in wrong}
    ranks = name_ranks(sorted({each.rank for each in wrong}))
    rest = f"the first of {len(names)} of {len(all_.dense.start)} parameters" if len(names) > 1 else "alone"
    where = f"step {off.step}, {rest}, on {ranks}"
    if off.kind == WEIGHTS:
        return f"weights of {shown} on rank {off.rank} {update(all_, off, tensors)} ({where})"
    common = norm(all_, off, wrong) or norm_by_shard(all_, off, tensors[off.rank])
    return f"gradients of {shown} on rank {off.rank} are {common or reason(all_, off, tensors)} ({where})"


def reason(all_: Everything, off: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    name, dense = all_.canonical[off.name], all_.dense
    if name not in dense.steps[off.step].gradients:
        return "there, where one process has none: the loss does not depend on it"
    parts = contributions(all_.theirs, all_.dealing, dense.before(off.step), off.step, name)
    alone = dense.steps[off.step]
    clip = all_.theirs.found.get("clip")
    if clip is not None and alone.norm > clip:
        parts = {part: each * (clip / alone.norm) for part, each in parts.items()}
    terms = {
        (shard, index): all_.theirs.terms(part.targets)
        for shard in range(all_.dealing.num_shards)
        for index, part in enumerate(all_.dealing.dealt(off.step, shard))
    }
    grid, shard = all_.grid, all_.grid.index(off.rank, "dp")
    scene = Scene(off.rank, shard, grid.axes, grid.neighbours(off.rank), terms, grid.size)
    return why(scene, tensors, alone.gradients[name], parts)


def norm(all_: Everything, off: Deviation, wrong: Sequence[Deviation]) -> str:
    """Return a sentence if clipping explains it: all gradients of a rank have one factor, so the norm is wrong."""
    clip = all_.theirs.found.get("clip")
    factors = [each.factor for each in all_.offs(off.step, off.kind) if each.rank == off.rank and each.factor]
    if clip is None or off.factor is None or len(factors) < 2 or not all(near(each, off.factor) for each in factors):
        return ""
    alone = all_.dense.steps[off.step].norm
    implied = clip / (off.factor * min(1.0, clip / alone))
    by_rank = {each.rank: each.factor for each in wrong if each.factor}
    apart = ", another on each rank" if len({round(value, 6) for value in by_rank.values()}) > 1 else ""
    longer = f"{implied / alone:.4g} times as long as one process's {alone:.4g}{apart}"
    own = own_norm(all_, off) / min(1.0, clip / alone)
    if own < alone and math.isclose(implied, own, rel_tol=1e-4):  # within a clip's epsilon
        longer += "; it is that of this rank's own part alone: sum its square over the ranks that have the other parts"
    return f"{off.factor:.4g} x one process's, as all of this rank's: the norm that clips them to {clip:g} is {longer}"


def norm_by_shard(all_: Everything, off: Deviation, mine: LocatedTensor | None) -> str:
    """Return the same for a parameter whose rows, from several ranks, each have their own factor."""
    clip, alone = all_.theirs.found.get("clip"), all_.dense.steps[off.step]
    if clip is None or mine is None or mine.tensor is None or mine.tensor.dim() == 0:
        return ""
    found = blocks(mine.tensor.double(), mine.rows.of(alone.gradients[all_.canonical[off.name]]))
    norms = [clip / (times * min(1.0, clip / alone.norm)) for _, times in found if times > 0]
    if not 1 < len(found) == len(norms) <= all_.grid.size or math.hypot(*norms) > alone.norm * (1 + 1e-4):
        return ""
    shown = ", ".join(f"rows {rows[0]} to {rows[-1]} {times:.4g} x" for rows, times in found)
    own = ", ".join(f"{each:.4g}" for each in norms)
    return (
        f"{shown} one process's: each rank's shard is clipped by its own norm ({own} where that of all is"
        f" {alone.norm:.4g}); sum the squares of the shards' norms over the ranks before the root"
    )


def own_norm(all_: Everything, off: Deviation) -> float:
    """Return the norm of one process's clipped gradients in this rank's parts of the parameters."""
    gradients = all_.dense.steps[off.step].gradients
    rows = {all_.canonical[name]: mine for name, mine in all_.ranks[off.rank].rows.items()}
    return math.hypot(*(float(rows[name].of(gradients[name]).norm()) for name in rows if name in gradients))


def update(all_: Everything, off: Deviation, tensors: Sequence[LocatedTensor | None]) -> str:
    """Return how weights are wrong although their gradient is right."""
    mine, name = tensors[off.rank], all_.canonical[off.name]
    if mine is None or mine.tensor is None:
        return "are missing"
    both = all_.dense.before(off.step), all_.dense.steps[off.step].weights
    start, wanted = (mine.rows.of(each[name]) for each in both)
    moved, right = mine.tensor - start, wanted - start
    if not moved.any():
        return "have not moved, though their gradient is there: the optimizer does not have this parameter"
    times = factor(moved, right)
    if times is not None:
        return f"moved {times:.4g} x as far as one process's, though their gradient is right: another learning rate"
    after = f"a step of plain SGD at {LEARNING_RATE:g}"
    return f"differ by {off.difference:.2g} after {after}, though their gradient is right: something else writes them"


def loss_sentence(all_: Everything, step: int) -> str:
    shares = [mine.shares[step] for mine in all_.ranks]
    shown = ", ".join("none" if share is None else f"{share:.6g}" for share in shares[:8])
    return (
        f"the loss of step {step} is {all_.dense.steps[step].loss:.6g} in one process, and the ranks returned {shown}:"
        " these are to add up to it over dp (loss * share of each microbatch)"
    )


def modules(all_: Everything, first: Deviation) -> records.Table:
    """Return a table by module of the first wrong step, in the order of the backward pass."""
    place = {name: index for index, name in enumerate(all_.dense.order)}
    rows = defaultdict[str, list[Deviation]](list)
    for each in sorted(all_.offs(first.step, first.kind), key=lambda each: place[all_.canonical[each.name]]):
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
