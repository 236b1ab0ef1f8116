"""The most that a rank holds in a step of each stage, predicted: the rules of ZeRO, applied to one process's passes.

zero1 to 3  what workers/measure/formulas/zero_peaks.py says
naive       as stage 3, with nothing ahead: a layer computes again, and its gradients stand there twice for the sum
optimizer   of the rank's shards; in 16 bits with float32 masters, whose gradients in float32 stand there in the
            update alone
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from experiments.fsdp.predictions import BY_HAND, at_rest, owned, tied, units
from workers.config import Config
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening, adamw_scratch_bytes, pass_peak, shown_on
from workers.measure.formulas.zero_peaks import Sharding, Units
from workers.passes.outline import check_recomputed, checks_recomputed, most_of_a_layer, outlined
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


def laid_out(config: Config) -> Units:
    """A unit of each layer, one of both ends where they share a weight."""
    layers = list(outline(config).layers)
    last = len(layers) - 1
    of_layer = {index: 0 if tied(config) and index == last else index for index in range(len(layers))}
    names: dict[str, int] = {}
    seen = set()
    for index, layer in enumerate(layers):
        fresh = {name: parameter for name, parameter in layer.named_parameters() if parameter not in seen}
        names |= {f"{index}.{name}": of_layer[index] for name in fresh}
        seen |= set(fresh.values())
    return Units(list(units(config)), of_layer, names)


def holding_of(name: str, config: Config, rank: int, *, reshard: bool) -> Sharding:
    """What a rank of variant `name` holds beside the passes."""
    stage, laid, ranks = BY_HAND[name], laid_out(config), config.world_size
    itemsize: int = getattr(torch, config.dtype).itemsize
    kept = sum(laid.chunks(ranks)) * (ranks if stage < 3 else 1)
    kept += sum(laid.chunks(ranks)) * ranks if stage == 1 else 0  # gradients
    constant = kept * itemsize + remembered(config, rank)
    kind = Naively if name == "naive" else Sharding
    microbatches = config.num_microbatches
    return kind(stage, laid, rank, ranks, itemsize, constant, microbatches=microbatches, reshard=reshard)


class Naively(Sharding):
    """A layer is whole while it computes, and once more while it computes again and is summed."""

    fresh = 0  # numbers in a layer's gradients that lie where autograd made them

    def after(self, happening: Happening) -> Iterator[float]:
        what, unit = happening.what, self.unit_of.get(happening.layer, -1)
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
    holding = holding_of(name, config, rank, reshard=reshard)
    masters, adam = config.dtype == "bfloat16", config.optimizer == "adamw"
    update = at_rest(config, name).value[rank] + 4 * masters * owned(config, rank)
    update += adam * adamw_scratch_bytes(holding.own, 4 if masters else itemsize)
    return max(pass_peak(passes, holding), update)


def compare_peak(lab: Lab, measured: Mapping[str, Measured], *, reshard: bool) -> None:
    """Hold the most that each variant of ours held against the rules, within 5 %."""
    config, dealt = lab.config, partial(as_many_as_all, config=lab.config)
    recomputes = checks_recomputed(lab)
    again = outlined(lab, again=True, recompute=False, dealt=dealt) if recomputes else []
    layer_bytes = most_of_a_layer(lab, dealt) if recomputes else 0
    outlines: dict[str, list[Happening]] = {}  # naive computes every layer again, whatever LAB_RECOMPUTE says
    for name in [name for name in BY_HAND if name in measured]:
        kind = name if name in ("naive", "zero3_kept") else ""
        if kind not in outlines:
            recompute = None if not kind else False
            outlines[kind] = outlined(lab, again=kind == "naive", recompute=recompute, dealt=dealt)
        predicted, held = (
            peak_bytes(name, config, lab.rank, outlines[kind], reshard=reshard),
            sum(measured[name].peak.values()),
        )
        lab.compare(
            "peak bytes", predicted, held, tolerance=0.05 * predicted, variant=name,
            formula=f"{TERMS[name]} + one process's passes", shown=shown_on(config.device),
            control="tests/experiments/test_orders.py::test_fsdp_gradients_that_wait_show_in_the_peak",
        )  # fmt: skip
        if recomputes and not kind:
            bound = peak_bytes(name, config, lab.rank, again, reshard=reshard)
            check_recomputed(lab, name, held, bound, layer_bytes)
