"""Where a run stands: the batch that each step works on, the samples that this epoch has seen, the steps of each
variant.

The samples of a step are a function of (seed, epoch, batch), so a position in the data is these two numbers, and going
on means going on counting. Beside the position stands what was dealt, sample by sample, before and after a resume: that
each was seen exactly once an epoch is counted, not concluded from the position.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

from distlab.checkpoint.manifest import Manifest, data_digest
from distlab.contract import where_it_was
from distlab.workload.data import Batches


class TrainingPosition:
    """The way of a run through its data, from step 0 or from where a checkpoint leaves it."""

    def __init__(
        self, batches: Batches, variants: Iterable[str], resumed: Manifest | None = None,
        resumed_batch: Callable[[int], int] = where_it_was,
    ) -> None:  # fmt: skip
        """`resumed` holds all `variants`; `resumed_batch` is the batch to go on with, by the one that it names."""
        self.batches = batches
        self.first = resumed.step if resumed else 0
        self.done = {name: resumed.steps[name] if resumed else 0 for name in variants}
        self.losses: dict[str, list[float | None]] = {
            name: resumed.losses[name] if resumed else [] for name in self.done
        }
        self.heard: dict[str, list[float | None]] = {name: [] for name in self.done}  # since, see `hear`
        self.torn: str | None = None  # the variant whose update has begun and not ended
        self.seen: list[int] = list(resumed.seen) if resumed else []
        self.miscounted = 0  # samples of finished epochs that were not seen exactly once
        self._ahead = 0  # of the step: how far the data are; 0 in a run that resumes rightly
        if resumed:
            self._ahead = resumed.epoch * batches.num_batches + resumed_batch(resumed.batch) - resumed.step

    @cached_property
    def data(self) -> str:
        """What the samples are cut from, see `data_digest`."""
        return data_digest(self.batches.config)

    def data_step(self, step: int) -> int:
        """The global batch that `step` works on, counted over all epochs."""
        return step + self._ahead

    def position(self, step: int) -> tuple[int, int]:
        """The epoch, and the batch within it, that `step` works on."""
        return divmod(self.data_step(step), self.batches.num_batches)

    @contextmanager
    def updating(self, variant: str) -> Iterator[None]:
        """Around an update: what an error leaves behind here is neither the old step nor the new one."""
        self.torn = variant
        yield
        self.torn = None
        self.done[variant] += 1

    def hear(self, variant: str, shares: Iterable[list[float | None] | None]) -> None:
        """The next loss of a variant, from what each rank tells of its own share; None from one that has left."""
        told = list(shares)
        known = [share for each in told if each is not None for share in each if share is not None]
        self.heard[variant].append(math.fsum(known) if None not in told else None)

    def passed(self, step: int) -> None:
        """All variants have done `step`: its samples are seen."""
        self.seen += self.batches.full_ids(self.data_step(step))
        if len(self.seen) >= self.batches.num_batches * self.batches.batch:
            self.miscounted += self._wrong(whole=True)
            self.seen = []

    def wrongly_seen(self) -> int:
        """Samples that were not seen exactly once an epoch; in the epoch that is not over, more than once."""
        return self.miscounted + self._wrong(whole=False)

    def _wrong(self, *, whole: bool) -> int:
        times = Counter(self.seen)
        left_out = self.batches.num_batches * self.batches.batch - len(times) if whole else 0
        return left_out + sum(count > 1 for count in times.values())
