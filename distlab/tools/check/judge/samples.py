"""The ranks' training data: whether each rank has its own samples, equally many, from the same permutation.

If data-parallel ranks use the same samples, they compute the same gradient, and only the loss curve shows it. Inputs
are compared to the bit: one equal pair may be chance, two are not.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import At, Fault, Table, all_of, at, world
from distlab.tools.check.judge.rank_state import DATA, Finding, RankState, ranks_do, typed

ENOUGH = 2  # equal inputs, or steps, that are needed for a finding
PassKey = tuple[str, str, int]  # line, callers and number of a pass over a DataLoader


class SameInputs(Fault):
    """The first inputs of a DDP."""

    def __init__(self) -> None:
        self._told: Table[str, int, int] = Table()

    def take_input(self, case: RankState, key: str, group: int, index: int, found: int, place: int) -> None:
        self._told.put(case, key, case.group(group).ranks, index, found, place)

    def findings(self) -> Iterator[Finding]:
        for key, ranks, turns in self._told.whole():
            alike = [seen for seen in turns.values() if len(set(seen.values())) == 1]
            if len(alike) >= ENOUGH:
                sentence = (
                    f"{name_ranks(ranks)} train on the same data at {self._told.lines[key, ranks]} ({key}): their first"
                    f" {len(alike)} inputs are equal to the bit, so each sample counts as often as there are ranks;"
                    " give the loader a DistributedSampler"
                )
                yield Finding(DATA, sentence, ranks)


class SameShares(Fault):
    """Equal inputs along a data-parallel axis.

    For FullyShardedDataParallel and fully_shard the first inputs of a step are compared. If a script sums gradients
    itself, the inputs are unknown, so the gradients before the sum are compared, which differ if ranks have different
    samples, or different parts of one.
    """

    def __init__(self) -> None:
        self._told: Table[str, int, int] = Table()

    def take_given(self, case: RankState, step: int, axis: str, ranks: list[int], found: int, place: int) -> None:
        self._told.put(case, f"the axis {axis}", ranks, step, found, place)

    def take_summands(self, case: RankState, step: int, group: int, found: int, place: int) -> None:
        self._told.put(case, "", case.group(group).ranks, step, found, place)

    def findings(self) -> Iterator[Finding]:
        """Yield one sentence per axis, for any number of groups."""
        found: dict[tuple[str, str, int], list[tuple[int, ...]]] = defaultdict(list)
        for axis, ranks, turns in self._told.whole():
            same = [set(seen.values()) for seen in turns.values()]
            alike = [each for each in same if len(each) == 1]
            # The input must change between steps, otherwise it is a constant.
            if len(alike) == len(same) >= ENOUGH and len(set.union(*alike)) > 1:
                found[axis, self._told.lines[axis, ranks], len(alike)].append(ranks)
        for (axis, line, steps), groups in sorted(found.items()):
            which = f"along {axis} train on the same data at {line}: the inputs of their first {steps} steps"
            if not axis:
                which = (
                    f"train on the same data: the gradients that go into their sum at {line} in the first {steps} steps"
                )
            sentence = (
                f"{', and '.join(map(name_ranks, sorted(groups)))} {which} are equal to the bit, so each sample counts"
                " as often as there are ranks; give the loader a DistributedSampler, or seed what draws the samples by"
                " the rank"
            )
            yield Finding(DATA, sentence, all_of(groups))


class Batches(Fault):
    """Passes over DataLoaders: their numbers of batches, and whether they begin equally."""

    def __init__(self) -> None:
        self._first: Table[str, tuple[PassKey, int], int] = Table()  # by pass over a loader, and batch number
        self._counts: Table[str, PassKey, int] = Table()
        self._shuffled: dict[int, list[PassKey]] = defaultdict(list)  # training passes, by rank 0's sampler

    def take_batch(self, case: RankState, turn: int, index: int, found: int) -> None:
        self._first.put(case, "", world(case), (case.course.key(turn), index), found)

    def take_batches(self, case: RankState, turn: int, count: int) -> None:
        self._counts.put(case, "", world(case), case.course.key(turn), count)

    def take_shuffled(self, case: RankState, turn: int, sampler: int) -> None:
        if case.rank == 0:
            self._shuffled[sampler].append(case.course.key(turn))

    def questions(self) -> Iterator[str]:
        for _, _, passes in self._counts.whole():
            for (line, _, turn), counts in passes.items():
                if len(set(counts.values())) > 1:
                    listed = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
                    yield (
                        f"ranks read different numbers of batches in pass {turn} over the DataLoader at {line}"
                        f" ({listed}); is that intended?"
                    )
        for _, _, seen in self._first.whole():
            for first, then in (two for passes in self._shuffled.values() for two in pairwise(passes)):
                batches = seen.get((first, 0), {})
                if batches and batches == seen.get((then, 0)) and len(set(batches.values())) == len(batches):
                    yield (
                        f"pass {then[2]} over the DataLoader at {then[0]} begins with the same batches as the pass"
                        " before; is that intended? A DistributedSampler shuffles again only after set_epoch(epoch)"
                    )
                    return


SAMPLING = (
    ("it has another seed", "give the sampler of all ranks one seed"),
    ("it is in another epoch", "call set_epoch(epoch) on all ranks"),
    (
        "its data set is another Subset",
        "seed the split of the data set alike: generator=torch.Generator().manual_seed(n)",
    ),
)


class Draws(Fault):
    """Permutations that ranks must draw equally, to take different parts of them: of a DistributedSampler, and of
    random_split."""

    def __init__(self) -> None:
        self._drawn: Table[str, At, tuple[int, ...]] = Table()
        self._splits: Table[str, At, tuple[tuple[int, ...], int]] = Table()

    def take_drawn(
        self, case: RankState, turn: int, seed: int, epoch: int, subset: int, size: int, replicas: int, place: int
    ) -> None:
        self._drawn.put(case, "", world(case), at(case, place, turn), (seed, epoch, subset, size, replicas))

    def take_split(self, case: RankState, turn: int, sizes: list[int], found: int, place: int) -> None:
        typed(sizes, [int] * len(sizes))
        self._splits.put(case, "", world(case), at(case, place, turn), (tuple(sizes), found))

    def findings(self) -> Iterator[Finding]:
        """Yield the first pass in which ranks have different permutations."""
        passes = [each for _, _, turns in self._drawn.whole() for each in turns.items()]
        for (line, _, turn), seen in passes:
            if len({each[3:] for each in seen.values()}) > 1:
                continue  # different data sets, or different passes
            for index, (what, remedy) in enumerate(SAMPLING):
                odd = [rank for rank in sorted(seen) if seen[rank][index] != seen[0][index]]
                if odd:
                    values = f" ({seen[odd[0]][index]}, and {seen[0][index]} on rank 0)" if index < 2 else ""
                    sentence = (
                        f"{ranks_do(odd, 'draw')} from another permutation in pass {turn} over a DistributedSampler at"
                        f" {line}: {what}{values}; some samples come twice and some never; {remedy}"
                    )
                    yield Finding(DATA, sentence, tuple(odd))
                    return

    def questions(self) -> Iterator[str]:
        for (line, _, _), seen in (each for _, _, turns in self._splits.whole() for each in turns.items()):
            sizes, found = zip(*seen.values(), strict=True)
            if len(set(sizes)) == 1 and len(set(found)) > 1:
                yield (
                    f"random_split at {line} gives each rank another permutation; is that intended? Other ranks train"
                    " on one rank's validation samples: pass generator=torch.Generator().manual_seed(n)"
                )
                return
