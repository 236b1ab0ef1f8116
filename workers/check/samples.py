"""What the ranks train on: whether it is the same on all, and whether all have as much of it.

Data parallel ranks that see the same samples compute one rank's gradient as often as there are ranks, and nothing but
the loss curve shows it. The first inputs of a DDP are compared to the bit: one pair may be equal by chance, two are
not.
"""

from collections import defaultdict
from collections.abc import Iterator

from workers.check.casebook import Case
from workers.check.finding import DATA, Finding
from workers.cluster import name_ranks

ENOUGH = 2  # inputs that have to be alike


class Samples:
    """Checksums of first inputs and batches, and how many batches there were."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._inputs: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, int]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._forwards: dict[str, str] = {}
        self._batches: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # by pass over a loader, and number
        self._counts: dict[int, dict[int, int]] = defaultdict(dict)  # by pass, and rank

    def take_input(self, case: Case, key: str, group: int, index: int, found: int, place: int) -> None:
        """The checksum of a DDP's input."""
        self._inputs[key, case.group(group).ranks][index][case.rank] = found
        self._forwards[key] = case.place(place).line

    def take_batch(self, case: Case, turn: int, index: int, found: int) -> None:
        """The checksum of a loader's batch."""
        self._batches[turn, index][case.rank] = found

    def take_count(self, case: Case, turn: int, count: int, place: int) -> None:  # noqa: ARG002
        """How many batches a pass over a loader gave."""
        self._counts[turn][case.rank] = count

    def shared(self) -> Iterator[Finding]:
        """Ranks that train on the same data."""
        for (key, ranks), by_index in self._inputs.items():
            alike = [seen for seen in by_index.values() if set(seen) == set(ranks) and len(set(seen.values())) == 1]
            if len(ranks) > 1 and len(alike) >= ENOUGH:
                yield Finding(
                    DATA,
                    f"{name_ranks(ranks)} train on the same data at {self._forwards[key]} ({key}): their first"
                    f" {len(alike)} inputs are equal to the bit, so each sample counts as often as there are ranks;"
                    " give the loader a DistributedSampler",
                    ranks,
                )

    def questions(self) -> Iterator[str]:
        """What may be meant so."""
        size = self._world_size
        for turn, counts in self._counts.items():
            if len(set(counts.values())) > 1 and len(counts) == size:
                listed = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
                yield f"are unequal numbers of batches meant (pass {turn} over a DataLoader: {listed})?"
        for (turn, index), seen in sorted(self._batches.items()):
            again = self._batches.get((turn + 1, index), {})
            if index == 0 and seen == again and len(seen) == len(set(seen.values())) == size > 1:
                yield (
                    f"is it meant that pass {turn + 1} over a DataLoader begins with the same batches as pass {turn}? A"
                    " DistributedSampler shuffles anew only after set_epoch(epoch)"
                )
                return
