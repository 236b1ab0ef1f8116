"""Compare a resumed run with the whole one: samples lost or read twice, weights to the bit, and the first state that
differs, with the line that loads or should load it.

A run goes on from the step whose weights it begins with. On as many ranks as before, every checksum has to be that of
the whole run from there on; where the whole run does not repeat to the bit, weights may differ by ten times what its
second run differed. On another number of ranks weights are compared where each step has the same samples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.tools.drill.runs import Recorded
from distlab.tools.prove.script_verdict import dense_of, largest_of

TIMES_NOISE = 10
ROUNDED = 1e-4  # of the largest weight, that another order of summation may change
STATES = (
    ("state", "the optimizer's state", "the optimizer"), ("rates", "the learning rate", "the schedule"),
    ("random", "the random state", "the random state"),
)  # fmt: skip

Sample = tuple[int, Any]  # epoch and number, or name


class Row(NamedTuple):
    """What became of one resume."""

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


class Whole(NamedTuple):
    """The whole run, and by how much it differs from its second run."""

    run: Recorded
    noise: float  # 0: it repeats to the bit
    drawn: Sequence[int]  # the random states that decide what it trains: 0 torch's, 1 Python's, 2 numpy's

    @property
    def size(self) -> int:
        return len(self.run.facts)


def whole_of(run: Recorded, again: Recorded) -> Whole:
    one, two = (final(each) for each in (run, again))
    same = all(
        [each["weights"] for each in run.steps(rank)] == [each["weights"] for each in again.steps(rank)]
        for rank in range(len(run.facts))
    )
    noise = 0.0 if same else max(difference(one, two), 1e-30)
    return Whole(run, noise, [kind for kind in range(3) if is_drawn(run, again, kind)])


def is_drawn(run: Recorded, again: Recorded, kind: int) -> bool:
    """Whether a random state goes on between two steps without a new pass over a loader, and the same way in both
    runs: what is never seeded need not be put back."""
    steps = run.steps()
    both = [(one, two) for one, two in pairwise(steps) if one["passes"] == two["passes"]]
    repeats = [each["random"][kind] for each in steps] == [each["random"][kind] for each in again.steps()]
    return repeats and sum(one["random"][kind] != two["random"][kind] for one, two in both) > len(both) // 2


# Samples


def trained(run: Recorded, steps: range) -> Counter[Sample]:
    """How often each sample was trained on in these steps; ranks that read the same ones count once."""
    found = Counter[Sample]()
    for number in steps:
        parts = {tuple(samples_of(mine)) for mine in at_step(run, number)}
        for part in parts:
            found.update(part)
    return found


def at_step(run: Recorded, number: int) -> list[Mapping[str, Any]]:
    return [each for rank in range(len(run.facts)) for each in run.steps(rank)[number : number + 1]]


def samples_of(fact: Mapping[str, Any]) -> Iterator[Sample]:
    for epoch, samples in fact["read"]:
        yield from ((epoch, each) for each in samples)


class Ledger(NamedTuple):
    """Samples of the whole run beside those of a killed and a resumed one."""

    total: int
    lost: int
    twice: int
    other_epoch: int
    lost_of: Counter[Sample]
    twice_of: Counter[Sample]


def ledger(whole: Whole, before: Recorded, after: Recorded, begins: int) -> Ledger:
    wanted = trained(whole.run, range(whole.run.num_steps))
    found = trained(before, range(begins)) + trained(after, range(after.num_steps))
    lost, twice = wanted - found, found - wanted
    if len(after.facts) != whole.size:
        lost, twice = on_other_ranks(whole, found, lost, twice, after)
    names, again = (Counter(name for _, name in each.elements()) for each in (lost, twice))
    moved = (names & again).total()
    return Ledger(found.total(), lost.total() - moved, twice.total() - moved, moved, lost, twice)


def on_other_ranks(
    whole: Whole, found: Counter[Sample], lost: Counter[Sample], twice: Counter[Sample], after: Recorded
) -> tuple[Counter[Sample], Counter[Sample]]:
    """Without what another number of ranks reads by right: a sampler pads each epoch to a multiple of the ranks, and
    the last epoch ends where the steps do. DistributedSampler's padding is counted, in epochs that the resumed run
    reads from their beginning; any other is less than the ranks, or than a step."""
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
        counted = pads and epoch > first
        mine = Counter({each: count for each, count in lost.items() if each[0] == epoch})
        if counted:  # what was padded before, and is there once now, is not lost
            mine = Counter({each for each in mine if not found[each]})
        among = found if counted else twice
        more = Counter({each: found[each] - 1 for each in among if each[0] == epoch and found[each] > 1})
        if mine.total() > (0 if counted else drops) and (epoch != last or more):
            kept_lost += mine
        if more.total() > (-num_samples % size if counted else spare):
            kept_twice += more
    return kept_lost, kept_twice


# Weights


def final(run: Recorded) -> dict[str, Tensor]:
    return weights_at(run, max((each["ended"] for each in run.ended), default=-1))


def weights_at(run: Recorded, number: int) -> dict[str, Tensor]:
    """The whole weights before a step, where they were kept."""
    files = [run.folder / f"rank{rank}-{number}.pt" for rank in range(len(run.facts))]
    return dense_of([torch.load(each, weights_only=True) for each in files if each.exists()])


def difference(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """The largest difference between two models; infinite where they have other tensors."""
    if set(one) != set(two) or any(one[name].shape != two[name].shape for name in one):
        return float("inf")
    return max((largest_of(one[name].double() - two[name].double()) for name in one), default=float("inf"))


def begins_at(whole: Whole, before: Recorded, after: Recorded) -> int | None:
    """How many steps were done when the resumed run went on, by the weights that it began with; None where these are
    no step's."""
    if not after.num_steps:
        return None
    first, runs = [mine["weights"] for mine in at_step(after, 0)], (before, whole.run)
    for run in runs:
        for number in reversed(range(run.num_steps)):
            theirs = [mine["weights"] for mine in at_step(run, number)]
            if theirs == first if len(first) == len(theirs) else {*first} == {*theirs} and len({*first}) == 1:
                return number
    kept = weights_at(after, 0)
    kept_at = ((run, int(file.stem.partition("-")[2])) for run in runs for file in run.folder.glob("rank0-*.pt"))
    same = (number for run, number in kept_at if kept and difference(kept, weights_at(run, number)) == 0)
    return max(same, default=None)


# One resume


def judged(name: str, whole: Whole, before: Recorded, after: Recorded, note: str = "") -> Row:
    """The row of one resume; `note` is what became of the file that was being written."""
    size, steps = len(after.facts), after.num_steps
    why = f"the resumed run failed: {after.failed}" if after.failed else ""
    if not (why or steps or before.ended):
        why = "the resumed run took no step, and the one before it was not at its end"
    if why:
        return Row(name, size, steps, "-", 0, 0, 0, note or "-", why)
    known = begins_at(whole, before, after) if steps else before.num_steps
    begins = max(0, whole.run.num_steps - steps) if known is None else known
    saved = [each["after"] for _, each in before.all("saves")]
    if known is None:
        why = f"the resumed run begins with weights that no step had: {loaded(after, 'the weights')}"
    elif known == 0 and steps and saved and max(saved) > min(saved):
        why = f"the resumed run begins from step 0, though a file was written after step {max(saved)}"
    told = ledger(whole, before, after, begins)
    far, allowed = apart(whole, before, after)
    why = why or first_difference(whole, after, begins)
    if not why and told.lost + told.twice + told.other_epoch:
        why = samples_sentence(told, after)
    if not why and far > allowed:
        why = f"the weights at the end are {far:.0e} off, and {allowed:.0e} is allowed"
    shown = "to the bit" if far == 0 else "-" if far == float("inf") else f"{far:.0e} off"
    begin = f"step {begins} ({note})" if note and not note.startswith(f"step {begins} ") else f"step {begins}"
    return Row(
        name, size, begins + steps, shown, told.total, told.lost, told.twice, begin, why, told.other_epoch,
        by_rank(after, told),
    )  # fmt: skip


def apart(whole: Whole, before: Recorded, after: Recorded) -> tuple[float, float]:
    """How far the weights are at the end, and how far they may be."""
    mine, theirs = final(after if after.num_steps else before), final(whole.run)
    if not mine or not theirs:
        return float("inf"), float("inf")
    far = difference(mine, theirs)
    if len(after.facts) == whole.size:
        return far, TIMES_NOISE * whole.noise
    last, steps = whole.run.num_steps, after.num_steps
    same = steps and all(
        trained(after, range(number, number + 1)) == trained(whole.run, range(other, other + 1))
        for number, other in enumerate(range(last - steps, last))
    )
    largest = max((largest_of(each) for each in theirs.values()), default=0.0)
    return far, max(TIMES_NOISE * whole.noise, ROUNDED * largest) if same and not whole.drawn else float("inf")


def first_difference(whole: Whole, after: Recorded, begins: int) -> str:
    """The first state that is not the whole run's, by step and then by kind, as long as the samples are the same; for
    as many ranks."""
    for number in range(after.num_steps if len(after.facts) == whole.size else 0):
        mine, theirs = at_step(after, number), at_step(whole.run, begins + number)
        if not theirs:
            return f"the resumed run goes on after step {whole.run.num_steps}, where the whole run ends"
        for rank, (one, two) in enumerate(zip(mine, theirs, strict=False)):
            for key, what, loads in STATES:
                parts = whole.drawn if key == "random" else range(len(two[key]))
                same = len(one[key]) == len(two[key]) and all(one[key][each] == two[key][each] for each in parts)
                if same or (key == "state" and whole.noise):
                    continue
                values = f" ({shown(one[key])}, not {shown(two[key])})" if key == "rates" else ""
                since = f"from step {begins + number + 1} on{values}"
                return f"{what} of rank {rank} is not the whole run's {since}: {loaded(after, loads)}"
            if not whole.noise and one["weights"] != two["weights"]:
                return f"the weights of rank {rank} are not the whole run's before step {begins + number + 1}"
        if [[*samples_of(one)] for one in mine] != [[*samples_of(two)] for two in theirs]:
            return ""
    return ""


def shown(rates: Any) -> str:
    return " ".join(f"{each:g}" for each in rates)


def loaded(run: Recorded, what: str) -> str:
    """Where the script loads a state, or that it does not."""
    found = next((each for _, each in run.all("did") if each["did"] == f"loads {what}"), None)
    if found is not None:
        return f"it is loaded at {found['at']}"
    file = next((each for _, each in run.all("did") if each["did"] in ("loads a file", "loads the weights")), None)
    where = f" where {file['at']} {file['did']}" if file else ""
    return f"nothing loads {what}{where}"


def samples_sentence(told: Ledger, after: Recorded) -> str:
    counts = [
        f"{count} {what}" for count, what in (
            (told.lost, "lost"), (told.twice, "read twice"), (told.other_epoch, "read in another epoch")) if count
    ]  # fmt: skip
    some = ", ".join(str(name) for _, name in sorted({*told.lost_of, *told.twice_of}, key=str)[:4])
    file = next((each for _, each in after.all("did") if each["did"] == "loads a file"), None)
    where = f"; what is read next follows {file['at']}, which loads a file" if file else ""
    return f"samples: {' and '.join(counts)} (such as {some}){where}"


def by_rank(after: Recorded, told: Ledger) -> list[str]:
    """Which ranks read samples twice."""
    found = []
    for rank in range(len(after.facts)):
        count = sum((Counter(each for fact in after.steps(rank) for each in samples_of(fact)) & told.twice_of).values())
        found += [f"rank {rank} reads {count} samples again"] if count else []
    return found
