"""The ranks' training data: whether each rank has its own samples, equally many, from the same permutation.

If data-parallel ranks use the same samples, they compute the same gradient, and only the loss curve shows it. Inputs
are compared to the bit: one equal pair may be chance, two are not.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import Fault, Occurrence, Table, every_rank, occurrence, ranks_of
from distlab.tools.check.judge.rank_state import DATA, Finding, RankState, ranks_do, typed

ENOUGH = 2  # equal inputs, or steps, that are needed for a finding
PassKey = tuple[str, str, int]  # line, callers and number of a pass over a DataLoader


class SameInputs(Fault):
    """The first inputs of a DDP."""

    def __init__(self) -> None:
        self._inputs: Table[str, int, int] = Table()

    def on_input(self, state: RankState, key: str, group: int, index: int, checksum: int, place: int) -> None:
        self._inputs.put(state, key, state.group(group).ranks, index, checksum, place)

    def findings(self) -> Iterator[Finding]:
        for key, ranks, reports in self._inputs.complete():
            equal = [seen for seen in reports.values() if len(set(seen.values())) == 1]
            if len(equal) >= ENOUGH:
                sentence = (
                    f"{name_ranks(ranks)} train on the same data at {self._inputs.lines[key, ranks]} ({key}): their"
                    f" first {len(equal)} inputs are equal to the bit, so each sample counts once per rank; give the"
                    " loader a DistributedSampler"
                )
                yield Finding(DATA, sentence, ranks)


class SameInputsOnAxis(Fault):
    """Equal inputs along a data-parallel axis.

    For FullyShardedDataParallel and fully_shard the first inputs of a step are compared. If a script sums gradients
    itself, the inputs are unknown, so the gradients before the sum are compared, which differ if ranks have different
    samples, or different parts of one.
    """

    def __init__(self) -> None:
        self._checksums: Table[str, int, int] = Table()

    def on_given(self, state: RankState, step: int, axis: str, ranks: list[int], checksum: int, place: int) -> None:
        self._checksums.put(state, f"the axis {axis}", ranks, step, checksum, place)

    def on_summands(self, state: RankState, step: int, group: int, checksum: int, place: int) -> None:
        self._checksums.put(state, "", state.group(group).ranks, step, checksum, place)

    def findings(self) -> Iterator[Finding]:
        """Yield one sentence per axis, for any number of groups."""
        found: dict[tuple[str, str, int], list[tuple[int, ...]]] = defaultdict(list)
        for axis, ranks, reports in self._checksums.complete():
            same = [set(seen.values()) for seen in reports.values()]
            equal = [each for each in same if len(each) == 1]
            # The input must change between steps, otherwise it is a constant.
            if len(equal) == len(same) >= ENOUGH and len(set.union(*equal)) > 1:
                found[axis, self._checksums.lines[axis, ranks], len(equal)].append(ranks)
        for (axis, line, steps), groups in sorted(found.items()):
            which = f"along {axis} train on the same data at {line}: the inputs of their first {steps} steps"
            if not axis:
                which = f"train on the same data: the gradients that they sum at {line} in the first {steps} steps"
            sentence = (
                f"{', and '.join(map(name_ranks, sorted(groups)))} {which} are equal to the bit, so each sample counts"
                " once per rank; give the loader a DistributedSampler, or draw the samples with a seed per rank"
            )
            yield Finding(DATA, sentence, ranks_of(groups))


class Batches(Fault):
    """Passes over DataLoaders: their numbers of batches, and whether they begin equally."""

    def __init__(self) -> None:
        self._first: Table[str, tuple[PassKey, int], int] = Table()  # by pass over a loader, and batch number
        self._counts: Table[str, PassKey, int] = Table()
        self._shuffled: dict[int, list[PassKey]] = defaultdict(list)  # training passes, by rank 0's sampler

    def on_batch(self, state: RankState, number: int, index: int, checksum: int) -> None:
        self._first.put(state, "", every_rank(state), (state.history.key(number), index), checksum)

    def on_batches(self, state: RankState, number: int, count: int) -> None:
        self._counts.put(state, "", every_rank(state), state.history.key(number), count)

    def on_shuffled(self, state: RankState, number: int, sampler: int) -> None:
        if state.rank == 0:
            self._shuffled[sampler].append(state.history.key(number))

    def questions(self) -> Iterator[str]:
        for _, _, passes in self._counts.complete():
            for (line, _, number), counts in passes.items():
                if len(set(counts.values())) > 1:
                    listed = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
                    yield (
                        f"ranks read different numbers of batches in pass {number} over the DataLoader at {line}"
                        f" ({listed}); is that intended?"
                    )
        for _, _, seen in self._first.complete():
            for first, then in (two for passes in self._shuffled.values() for two in pairwise(passes)):
                batches = seen.get((first, 0), {})
                if batches and batches == seen.get((then, 0)) and len(set(batches.values())) == len(batches):
                    yield (
                        f"pass {then[2]} over the DataLoader at {then[0]} begins with the same batches as the pass"
                        " before; is that intended? A DistributedSampler shuffles again only after set_epoch(epoch)"
                    )
                    return


SAMPLING = (
    ("it has a different seed", "use one seed for the samplers of all ranks"),
    ("it is in a different epoch", "call set_epoch(epoch) on all ranks"),
    (
        "its data set is a different Subset",
        "use one seed to split the data set: generator=torch.Generator().manual_seed(n)",
    ),
)


class Permutations(Fault):
    """Permutations that ranks must draw equally, to take different parts of them: of a DistributedSampler, and of
    random_split."""

    def __init__(self) -> None:
        self._samplers: Table[str, Occurrence, tuple[int, ...]] = Table()
        self._splits: Table[str, Occurrence, tuple[tuple[int, ...], int]] = Table()

    def on_drawn(
        self, state: RankState, count: int, seed: int, epoch: int, subset: int, size: int, replicas: int, place: int
    ) -> None:
        self._samplers.put(
            state, "", every_rank(state), occurrence(state, place, count), (seed, epoch, subset, size, replicas)
        )

    def on_split(self, state: RankState, count: int, sizes: list[int], checksum: int, place: int) -> None:
        typed(sizes, [int] * len(sizes))
        self._splits.put(state, "", every_rank(state), occurrence(state, place, count), (tuple(sizes), checksum))

    def findings(self) -> Iterator[Finding]:
        """Yield the first pass in which ranks have different permutations."""
        passes = [each for _, _, reports in self._samplers.complete() for each in reports.items()]
        for (line, _, count), seen in passes:
            if len({each[3:] for each in seen.values()}) > 1:
                continue  # different data sets, or different passes
            for index, (what, remedy) in enumerate(SAMPLING):
                differing = [rank for rank in sorted(seen) if seen[rank][index] != seen[0][index]]
                if differing:
                    values = f" ({seen[differing[0]][index]}, and {seen[0][index]} on rank 0)" if index < 2 else ""
                    sentence = (
                        f"{ranks_do(differing, 'draw')} from a different permutation in pass {count} over a"
                        f" DistributedSampler at {line}: {what}{values}; some samples are read twice and some never;"
                        f" {remedy}"
                    )
                    yield Finding(DATA, sentence, tuple(differing))
                    return

    def questions(self) -> Iterator[str]:
        for (line, _, _), seen in (each for _, _, reports in self._splits.complete() for each in reports.items()):
            sizes, checksums = zip(*seen.values(), strict=True)
            if len(set(sizes)) == 1 and len(set(checksums)) > 1:
                yield (
                    f"random_split at {line} draws a different permutation on each rank; is that intended? Then ranks"
                    " train on validation samples of other ranks: pass generator=torch.Generator().manual_seed(n)"
                )
                return
