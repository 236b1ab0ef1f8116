"""What a rank of ZeRO holds beside its passes, while they go on: the rules of its stages, moment by moment.

What is whole when, in numbers of a flat vector [N·c] or of a chunk [c]:

    weights     stage 1 and 2 all; stage 3 the chunks, and the layer that computes and the next one whole
    gradients   stage 1 all; stage 2 and 3 the shards of what is summed, and the unit that is collected or summed whole
    scratch     (N-1)·c of what the other ranks send for the sum that is under way, until the next unit's begins

The layers may be a whole model's or those of one stage of a pipeline, whose passes come in the order of a schedule.
"""

from collections.abc import Iterator
from typing import NamedTuple

from workers.measure.formulas.peaks import Happening


class Units(NamedTuple):
    """What is moved and kept as one."""

    numels: list[int]  # parameters of each, without padding
    of_layer: dict[int, int]  # each layer's, in the order in which they run
    of_name: dict[str, int]  # each parameter's, "<first layer that has it>.<name in it>"

    def chunks(self, ranks: int) -> list[int]:
        """Numbers of each on every rank, with padding."""
        return [-(-numel // ranks) for numel in self.numels]

    def own(self, rank: int, ranks: int) -> list[int]:
        """Parameters of each on one rank."""
        return [
            max(0, min(chunk, numel - rank * chunk))
            for numel, chunk in zip(self.numels, self.chunks(ranks), strict=True)
        ]


class Sharding:
    """Beside `constant` bytes, which stay, what comes and goes of `units` on rank `rank` of `ranks`; gradients from
    stage 2 on are no constant."""

    def __init__(
        self, stage: int, units: Units, rank: int, ranks: int, itemsize: int, constant: float, *, microbatches: int,
        reshard: bool = True,
    ) -> None:  # fmt: skip
        self.stage, self.reshard, self.ranks, self.itemsize = stage, reshard, ranks, itemsize
        self.chunks, self.own = units.chunks(ranks), units.own(rank, ranks)
        self.unit_of, self.names, self.constant = units.of_layer, units.of_name, constant
        spans = list(self.unit_of.values())
        self.spanning = {unit for unit in spans if spans.count(unit) > 1}  # whole from the first use to the last
        self.number, self.microbatches = 0, microbatches
        self.whole: set[int] = set()  # units whose weights are whole, in stage 3
        self.collected: set[int] = set()  # units whose gradients are, from stage 2 on
        self.under_way: int | None = None  # the unit that is summed
        # Units whose shard has its gradient, from stage 2 on: those of the step before until the next one begins.
        self.summed = set(range(len(self.chunks))) if stage > 1 else set[int]()
        self.backward = False
        self.missing = set(self.names)

    def held(self) -> float:
        flats = [self.chunks[unit] * self.ranks for unit in self.whole]
        flats += [self.chunks[unit] * self.ranks for unit in self.collected]
        if self.under_way is not None:
            whole = self.ranks if self.stage > 1 else 0
            flats.append(self.chunks[self.under_way] * (whole + self.ranks - 1))
        numbers: int = sum(flats) + sum(self.own[unit] for unit in self.summed)
        return self.constant + numbers * self.itemsize

    def after(self, happening: Happening) -> Iterator[float]:
        """Take and free memory as the rules say."""
        what, layer, name = happening.what, happening.layer, happening.name
        if what == "dealt":
            self.summed = set()
        elif what == "passed":
            self.number, self.backward, self.missing = self.number + 1, False, set(self.names)
        elif what in ("layer", "output"):
            self.backward |= what == "output"
            self._gather(layer, ahead=what == "output" or not self.backward)
        elif what == "left" and not self.backward and self.reshard and self.unit_of.get(layer) not in self.spanning:
            self.whole.discard(self.unit_of.get(layer, -1))
        elif what == "gradient" and self.stage > 1 and name in self.names:
            yield from self._collects(self.names[name])
        elif what == "taken" and name in self.names:
            yield from self._taken(happening)
        yield self.held()

    def _gather(self, layer: int, *, ahead: bool) -> None:
        if self.stage == 3:
            following = layer + (-1 if self.backward else 1)
            self.whole |= {self.unit_of[each] for each in (layer, following)[: 1 + ahead] if each in self.unit_of}

    def _collects(self, unit: int) -> Iterator[float]:
        """With a unit's first gradient begins its flat one."""
        if unit not in self.collected:
            yield from self._finish()
            self.collected.add(unit)

    def _taken(self, happening: Happening) -> Iterator[float]:
        """With the last gradient of a unit its sum begins; what was summed before it is done."""
        unit = self.names[happening.name]
        if self.stage == 1 and self.number:  # the sum with that of an earlier microbatch, beside both
            yield self.held() + happening.numel * self.itemsize
        self.missing.discard(happening.name)
        complete = not any(self.names[other] == unit for other in self.missing)
        if complete and (self.stage > 1 or self.number == self.microbatches - 1):
            yield from self._finish()
            self.collected.discard(unit)
            self.under_way = unit
            yield self.held()
            self.whole.discard(unit)

    def _finish(self) -> Iterator[float]:
        """The shard's gradient is copied while the vector that it is cut from is still there."""
        if self.under_way is not None:
            if self.stage > 1:
                self.summed.add(self.under_way)
            yield self.held()
            self.under_way = None
