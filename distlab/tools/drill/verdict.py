"""Compare a resumed run with the whole run: samples lost or read twice, the weights, and the first state that differs,
with the line that loads it.

A run continues from the step whose weights it begins with. With the same number of ranks, every later checksum must
equal the whole run's. If two whole runs differ, weights may differ by ten times as much. With another number of ranks
only the weights are compared, and only if each step has the same samples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.tools.drill.runs import RecordedRun
from distlab.tools.prove.script_verdict import dense_of, largest_of

TIMES_NOISE = 10
ROUNDED = 1e-4  # relative to the largest weight: what another order of summation may change
STATES = (
    ("state", "the optimizer's state", "the optimizer"), ("rates", "the learning rate", "the schedule"),
    ("random", "the random state", "the random state"),
)  # fmt: skip

Sample = tuple[int, Any]  # epoch and number, or name


class Row(NamedTuple):
    """The result of one resume."""

    run: str
    ranks: int
    steps: int
    weights: str
    samples: int
    lost: int
    twice: int
    begins: str
    why: str  # of a failure; empty where it passed
    other_epoch: int = 0
    by_rank: Sequence[str] = ()


class WholeRun(NamedTuple):
    """The run without a fault, and by how much it differs from a repetition."""

    run: RecordedRun
    noise: float  # 0: the repetition is equal to the bit
    drawn: Sequence[int]  # the random states that affect the training: 0 torch's, 1 Python's, 2 numpy's

    @property
    def size(self) -> int:
        return len(self.run.facts)


def whole_run_of(run: RecordedRun, again: RecordedRun) -> WholeRun:
    one, two = (final(each) for each in (run, again))
    same = all(
        [each["weights"] for each in run.steps(rank)] == [each["weights"] for each in again.steps(rank)]
        for rank in range(len(run.facts))
    )
    noise = 0.0 if same else max(difference(one, two), 1e-30)
    return WholeRun(run, noise, [kind for kind in range(3) if is_drawn(run, again, kind)])


def is_drawn(run: RecordedRun, again: RecordedRun, kind: int) -> bool:
    """Return whether a random state changes between most steps, not counting new passes over a loader, and equally in
    both runs: a state that is never seeded need not be restored."""
    steps = run.steps()
    both = [(one, two) for one, two in pairwise(steps) if one["passes"] == two["passes"]]
    repeats = [each["random"][kind] for each in steps] == [each["random"][kind] for each in again.steps()]
    return repeats and sum(one["random"][kind] != two["random"][kind] for one, two in both) > len(both) // 2


# Samples


def trained(run: RecordedRun, steps: range) -> Counter[Sample]:
    """Return how often each sample was trained on in these steps; ranks that read the same samples count once."""
    found = Counter[Sample]()
    for number in steps:
        parts = {tuple(samples_of(mine)) for mine in at_step(run, number)}
        for part in parts:
            found.update(part)
    return found


def at_step(run: RecordedRun, number: int) -> list[Mapping[str, Any]]:
    return [each for rank in range(len(run.facts)) for each in run.steps(rank)[number : number + 1]]


def samples_of(fact: Mapping[str, Any]) -> Iterator[Sample]:
    for epoch, samples in fact["read"]:
        yield from ((epoch, each) for each in samples)


class SampleCounts(NamedTuple):
    """The samples of an interrupted and its resumed run, compared with the whole run's."""

    total: int
    lost: int
    twice: int
    other_epoch: int
    lost_of: Counter[Sample]
    twice_of: Counter[Sample]


def count_samples(whole: WholeRun, before: RecordedRun, after: RecordedRun, begins: int) -> SampleCounts:
    wanted = trained(whole.run, range(whole.run.num_steps))
    found = trained(before, range(begins)) + trained(after, range(after.num_steps))
    lost, twice = wanted - found, found - wanted
    if len(after.facts) != whole.size:
        lost, twice = on_other_ranks(whole, found, lost, twice, after)
    names, again = (Counter(name for _, name in each.elements()) for each in (lost, twice))
    moved = (names & again).total()
    return SampleCounts(found.total(), lost.total() - moved, twice.total() - moved, moved, lost, twice)


def on_other_ranks(
    whole: WholeRun, found: Counter[Sample], lost: Counter[Sample], twice: Counter[Sample], after: RecordedRun
) -> tuple[Counter[Sample], Counter[Sample]]:
    """Leave out the differences that another number of ranks explains: a sampler pads each epoch to a multiple of the
    ranks, and the last epoch ends with the last step. DistributedSampler's padding is known exactly in epochs that the
    resumed run reads from the beginning; other padding is less than the number of ranks, or than one step."""
    wanted, size = found - twice + lost, len(after.facts)
    in_epoch = Counter(epoch for epoch, _ in wanted)
    last, num_samples = max(in_epoch, default=-1), max(in_epoch.values(), default=0)
    first = next((epoch for each in after.steps() for epoch, _ in samples_of(each)), last)
    pads = all(each.get("pads") for each in (*whole.run.steps(), *after.steps()))
    spare = max(size, whole.size) - 1
    batch = max((len(tuple(samples_of(each))) for each in whole.run.steps()), default=0)
    drops = spare if found.total() == wanted.total() else max(spare, batch * max(size, whole.size) - 1)
    kept_lost, kept_twice = Counter[Sample](), Counter[Sample]()
    for epoch in {epoch for epoch, _ in (*lost, *twice)}:
        is_exact = pads and epoch > first
        mine = Counter({each: count for each, count in lost.items() if each[0] == epoch})
        if is_exact:  # a sample that was padding before, and occurs once now, is not lost
            mine = Counter({each for each in mine if not found[each]})
        among = found if is_exact else twice
        more = Counter({each: found[each] - 1 for each in among if each[0] == epoch and found[each] > 1})
        if mine.total() > (0 if is_exact else drops) and (epoch != last or more):
            kept_lost += mine
        if more.total() > (-num_samples % size if is_exact else spare):
            kept_twice += more
    return kept_lost, kept_twice


# Weights


def final(run: RecordedRun) -> dict[str, Tensor]:
    return weights_at(run, max((each["ended"] for each in run.ended), default=-1))


def weights_at(run: RecordedRun, number: int) -> dict[str, Tensor]:
    """Return the full weights before a step; empty if they were not saved."""
    files = [run.folder / f"rank{rank}-{number}.pt" for rank in range(len(run.facts))]
    return dense_of([torch.load(each, weights_only=True) for each in files if each.exists()])


def difference(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two models; infinite if they have different tensors."""
    if set(one) != set(two) or any(one[name].shape != two[name].shape for name in one):
        return float("inf")
    return max((largest_of(one[name].double() - two[name].double()) for name in one), default=float("inf"))


def begins_at(whole: WholeRun, before: RecordedRun, after: RecordedRun) -> int | None:
    """Return after how many steps the resumed run continued, by its first weights; None if no step had these."""
    if not after.num_steps:
        return None
    first, runs = [mine["weights"] for mine in at_step(after, 0)], (before, whole.run)
    for run in runs:
        for number in reversed(range(run.num_steps)):
            weights = [mine["weights"] for mine in at_step(run, number)]
            if weights == first if len(first) == len(weights) else {*first} == {*weights} and len({*first}) == 1:
                return number
    kept = weights_at(after, 0)
    kept_at = ((run, int(file.stem.partition("-")[2])) for run in runs for file in run.folder.glob("rank0-*.pt"))
    same = (number for run, number in kept_at if kept and difference(kept, weights_at(run, number)) == 0)
    return max(same, default=None)


# One resume


def judged(name: str, whole: WholeRun, before: RecordedRun, after: RecordedRun, note: str = "") -> Row:
    """Return the row of one resume; `note` describes the file that was being written."""
    size, steps = len(after.facts), after.num_steps
    why = f"the resumed run failed: {after.failed}" if after.failed else ""
    if not (why or steps or before.ended):
        why = "the resumed run took no step, though the interrupted run had not finished"
    if why:
        return Row(name, size, steps, "-", 0, 0, 0, note or "-", why)
    known = begins_at(whole, before, after) if steps else before.num_steps
    begins = max(0, whole.run.num_steps - steps) if known is None else known
    saved = [each["after"] for _, each in before.all("saves")]
    if known is None:
        why = f"the resumed run begins with weights that no step had; {where_loaded(after, 'the weights')}"
    elif known == 0 and steps and saved and max(saved) > min(saved):
        why = f"the resumed run begins from step 0, though a file was written after step {max(saved)}"
    counts = count_samples(whole, before, after, begins)
    far, allowed = final_difference(whole, before, after)
    why = why or first_difference(whole, after, begins)
    if not why and counts.lost + counts.twice + counts.other_epoch:
        why = samples_sentence(counts, after)
    if not why and far > allowed:
        why = f"the final weights differ by {far:.0e} from the whole run's, where {allowed:.0e} is allowed"
    text = "to the bit" if far == 0 else "-" if far == float("inf") else f"{far:.0e} off"
    begin = f"step {begins} ({note})" if note and not note.startswith(f"step {begins} ") else f"step {begins}"
    return Row(
        name, size, begins + steps, text, counts.total, counts.lost, counts.twice, begin, why, counts.other_epoch,
        by_rank(after, counts),
    )  # fmt: skip


def final_difference(whole: WholeRun, before: RecordedRun, after: RecordedRun) -> tuple[float, float]:
    """Return the difference of the final weights, and the allowed one."""
    mine, theirs = final(after if after.num_steps else before), final(whole.run)
    if not mine or not theirs:
        return float("inf"), float("inf")
    off = difference(mine, theirs)
    if len(after.facts) == whole.size:
        return off, TIMES_NOISE * whole.noise
    last, steps = whole.run.num_steps, after.num_steps
    same = steps and all(
        trained(after, range(number, number + 1)) == trained(whole.run, range(other, other + 1))
        for number, other in enumerate(range(last - steps, last))
    )
    largest = max((largest_of(each) for each in theirs.values()), default=0.0)
    return off, max(TIMES_NOISE * whole.noise, ROUNDED * largest) if same and not whole.drawn else float("inf")


def first_difference(whole: WholeRun, after: RecordedRun, begins: int) -> str:
    """Describe the first state that differs from the whole run's, by step and then by kind, while the samples are the
    same; empty for another number of ranks."""
    for number in range(after.num_steps if len(after.facts) == whole.size else 0):
        mine, theirs = at_step(after, number), at_step(whole.run, begins + number)
        if not theirs:
            return f"the resumed run continues after step {whole.run.num_steps}, where the whole run ends"
        for rank, (one, two) in enumerate(zip(mine, theirs, strict=False)):
            for key, what, loads in STATES:
                parts = whole.drawn if key == "random" else range(len(two[key]))
                same = len(one[key]) == len(two[key]) and all(one[key][each] == two[key][each] for each in parts)
                if same or (key == "state" and whole.noise):
                    continue
                values = f" ({shown(one[key])}, not {shown(two[key])})" if key == "rates" else ""
                since = f"from step {begins + number + 1} on{values}"
                return f"{what} of rank {rank} differs from the whole run's {since}; {where_loaded(after, loads)}"
            if not whole.noise and one["weights"] != two["weights"]:
                return f"the weights of rank {rank} differ from the whole run's before step {begins + number + 1}"
        if [[*samples_of(one)] for one in mine] != [[*samples_of(two)] for two in theirs]:
            return ""
    return ""


def shown(rates: Any) -> str:
    return " ".join(f"{each:g}" for each in rates)


def where_loaded(run: RecordedRun, what: str) -> str:
    """Return where the script loads a state, or that it does not."""
    found = next((each for _, each in run.all("did") if each["did"] == f"loads {what}"), None)
    if found is not None:
        return f"{found['at']} loads {what}"
    file = next((each for _, each in run.all("did") if each["did"] in ("loads a file", "loads the weights")), None)
    where = f", though {file['at']} {file['did']}" if file else ""
    return f"nothing loads {what}{where}"


def samples_sentence(counts: SampleCounts, after: RecordedRun) -> str:
    texts = [
        f"{count} {what}" for count, what in (
            (counts.lost, "lost"), (counts.twice, "read twice"), (counts.other_epoch, "read in another epoch")) if count
    ]  # fmt: skip
    some = ", ".join(str(name) for _, name in sorted({*counts.lost_of, *counts.twice_of}, key=str)[:4])
    file = next((each for _, each in after.all("did") if each["did"] == "loads a file"), None)
    where = f"; the resumed position in the data depends on the file that {file['at']} loads" if file else ""
    return f"samples: {' and '.join(texts)} (such as {some}){where}"


def by_rank(after: RecordedRun, counts: SampleCounts) -> list[str]:
    """Return one line per rank that reads samples twice."""
    found = []
    for rank in range(len(after.facts)):
        count = sum(
            (Counter(each for fact in after.steps(rank) for each in samples_of(fact)) & counts.twice_of).values()
        )
        found += [f"rank {rank} reads {count} samples again"] if count else []
    return found
