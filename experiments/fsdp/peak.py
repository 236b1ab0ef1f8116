"""The most that a rank holds in a step of each stage, predicted: the rules of ZeRO, applied to one process's passes.

What is whole when, in bytes of a flat vector [N·c] or of a chunk [c]:

    weights     stage 1 and 2 all; stage 3 the chunks, and the layer that computes and the next one whole
    gradients   stage 1 all; stage 2 and 3 the shards of what is summed, and the unit that is collected or summed whole
    scratch     (N-1)·c of what the other ranks send for the sum that is under way, until the next unit's begins
    optimizer   of the rank's shards; in 16 bits with float32 masters, whose gradients in float32 stand there in the
                update alone
    naive       as stage 3, with nothing ahead: a layer computes again, and its gradients stand there twice for the sum
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from experiments.fsdp.predictions import BY_HAND, at_rest, chunks, owned, tied, units
from workers.config import Config
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening, adamw_scratch_bytes, pass_peak, shown_on
from workers.passes.outline import outlined
from workers.strategies.sharded import as_many_as_all
from workers.workload.model import outline

ONE = "a layer whole, its gradients whole while they are summed, a layer of scratch"
TWO = f"two layers whole{ONE.removeprefix('a layer whole')}"
TERMS = {
    "naive": f"shards + {ONE.rpartition(',')[0]}",
    "zero1": "weights + gradients + a shard of the optimizer + a layer of scratch",
    "zero2": f"weights + shards{ONE.removeprefix('a layer whole')}",
    "zero3": f"shards + {TWO}",
    "zero3_kept": f"shards + {TWO}",
}


class Sharding:
    """What a rank holds beside the passes, while they go on."""

    def __init__(self, name: str, config: Config, rank: int, *, reshard: bool) -> None:
        self.stage, self.reshard, self.ranks = BY_HAND[name], reshard, config.world_size
        self.itemsize: int = getattr(torch, config.dtype).itemsize
        self.chunks = chunks(config)
        self.own = [
            max(0, min(chunk, numel - rank * chunk)) for numel, chunk in zip(units(config), self.chunks, strict=True)
        ]
        layers = list(outline(config).layers)
        last = len(layers) - 1
        self.unit_of = [0 if tied(config) and index == last else index for index in range(len(layers))]
        names: dict[str, int] = {}  # each parameter's unit
        seen = set()
        for index, layer in enumerate(layers):
            fresh = {name: parameter for name, parameter in layer.named_parameters() if parameter not in seen}
            names |= {f"{index}.{name}": self.unit_of[index] for name in fresh}
            seen |= set(fresh.values())
        self.names = names
        kept = sum(self.chunks) * (self.ranks if self.stage < 3 else 1)
        kept += sum(self.chunks) * self.ranks if self.stage == 1 else 0  # gradients
        self.constant: float = kept * self.itemsize + remembered(config, rank)
        self.number, self.microbatches = 0, config.num_microbatches
        self.whole: set[int] = set()  # units whose weights are whole, in stage 3
        self.collected: set[int] = set()  # units whose gradients are, from stage 2 on
        self.under_way: int | None = None  # the unit that is summed
        self.fresh = 0  # numbers in a layer's gradients that lie where autograd made them, in naive
        # Units whose shard has its gradient, from stage 2 on: those of the step before until the next one begins.
        self.summed = set(self.unit_of) if self.stage > 1 else set()
        self.backward = False
        self.missing = set(names)

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
        what, layer = happening.what, happening.layer
        if what == "dealt":
            self.summed = set()
        elif what == "passed":
            self.number, self.backward, self.missing = self.number + 1, False, set(self.names)
        elif what in ("layer", "output"):
            self.backward |= what == "output"
            self._gather(layer, ahead=what == "output" or not self.backward)
        elif what == "left" and not self.backward and self.reshard and self.unit_of.count(self.unit_of[layer]) == 1:
            self.whole.discard(layer)
        elif what == "gradient" and self.stage > 1 and self.names[happening.name] not in self.collected:
            yield from self._finish()
            self.collected.add(self.names[happening.name])
        elif what == "taken":
            yield from self._taken(happening.name)
        yield self.held()

    def _gather(self, layer: int, *, ahead: bool) -> None:
        if self.stage == 3:
            following = layer + (-1 if self.backward else 1)
            self.whole.add(self.unit_of[layer])
            if ahead and 0 <= following < len(self.unit_of):
                self.whole.add(self.unit_of[following])

    def _taken(self, name: str) -> Iterator[float]:
        """With the last gradient of a unit its sum begins; what was summed before it is done."""
        unit = self.names[name]
        self.missing.discard(name)
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


class Naively(Sharding):
    """A layer is whole while it computes, and once more while it computes again and is summed."""

    def after(self, happening: Happening) -> Iterator[float]:
        what, unit = happening.what, self.unit_of[happening.layer]
        if what == "dealt":
            self.summed = set()
        elif what in ("layer", "output"):
            self.whole = {unit}
        elif what == "left":
            self.whole = set()
        elif what == "taken":
            self.fresh += happening.numel
        elif what == "computed":
            yield self.held() + (self.chunks[unit] * self.ranks + self.fresh) * self.itemsize  # the flat ones, too
            self.fresh = 0
            self.summed.add(unit)
            yield self.held() + self.chunks[unit] * self.ranks * self.itemsize  # beside the flat ones the shard's
            self.whole = set()
        yield self.held() + self.fresh * self.itemsize


def remembered(config: Config, rank: int) -> float:
    """Bytes of optimizer state and master weights."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    masters, adam = config.dtype == "bfloat16", config.optimizer == "adamw"
    number = (2 * adam * (4 if masters else itemsize) + 4 * masters) * owned(config, rank)
    return number + 4.0 * adam * len(units(config))


def peak_bytes(name: str, config: Config, rank: int, passes: list[Happening], *, reshard: bool) -> float:
    """The highest moment of the passes of variant `name`; or, if it holds more, the update."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    holding = (Naively if name == "naive" else Sharding)(name, config, rank, reshard=reshard)
    masters, adam = config.dtype == "bfloat16", config.optimizer == "adamw"
    update = at_rest(config, name).value[rank] + 4 * masters * owned(config, rank)
    update += adam * adamw_scratch_bytes(holding.own, 4 if masters else itemsize)
    return max(pass_peak(passes, holding), update)


def compare_peak(lab: Lab, measured: Mapping[str, Measured], *, reshard: bool) -> None:
    """Hold the most that each variant of ours held against the rules, within 5 %."""
    config, dealt = lab.config, partial(as_many_as_all, config=lab.config)
    outlines: dict[str, list[Happening]] = {}  # naive computes every layer again, whatever LAB_RECOMPUTE says
    for name in [name for name in BY_HAND if name in measured]:
        kind = name if name in ("naive", "zero3_kept") else ""
        if kind not in outlines:
            recompute = None if not kind else False
            outlines[kind] = outlined(lab, again=kind == "naive", recompute=recompute, dealt=dealt)
        predicted = peak_bytes(name, config, lab.rank, outlines[kind], reshard=reshard)
        lab.compare(
            "peak bytes", predicted, sum(measured[name].peak.values()), tolerance=0.05 * predicted, variant=name,
            formula=f"{TERMS[name]} + one process's passes", shown=shown_on(config.device),
            control="tests/experiments/test_orders.py::test_fsdp_gradients_that_wait_show_in_the_peak",
        )  # fmt: skip
