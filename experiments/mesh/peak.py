"""The most that a rank of a mesh holds in a step, predicted: what it keeps between the steps, what ZeRO has whole on
top of that, and the passes of this rank alone.

    working   activations of the microbatches in flight, what operations leave for the next, and a fresh gradient
              (alone.py)
    kept      weights, gradients and optimizer state at rest (rest.py)
    added     of buckets and ZeRO-1, the sum beside a gradient and the one of an earlier microbatch
    zero1-3   what workers/measure/formulas/zero_peaks.py says
    update    in place of the passes AdamW's scratch, where that is more

A peak is held from below and from above: within TOLERANCE of their sum.
"""

from collections.abc import Iterator, Mapping

from experiments.mesh.alone import passes_of
from experiments.mesh.held import HOW, Rank
from experiments.mesh.rest import at_rest
from experiments.mesh.sent import owned
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening, Holding, adamw_scratch_bytes, pass_peak, shown_on
from workers.measure.formulas.zero_peaks import Sharding, Units
from workers.parallel.schedules import Action
from workers.workload.model import outline

TOLERANCE = 0.02  # the farthest of 20 settings was off by 1.2 %, numbers of a toy between two slices
TERMS = {0: "", 1: "", 2: " + a unit's gradients twice", 3: " + a unit's gradients twice + two units of weights"}


class Buckets:
    """All gradients have their room, and what comes is added to what is there.

    Where memory is seen torch adds out of place, so their sum stands beside both: it takes any tensor for a subclass of
    its own then (torch/csrc/autograd/functions/accumulate_grad.h).
    """

    def __init__(self, constant: float, itemsize: int) -> None:
        self.constant, self.itemsize, self.seen = constant, itemsize, set[str]()

    def held(self) -> float:
        return self.constant

    def after(self, happening: Happening) -> Iterator[float]:
        """Of a second microbatch on there is a gradient to add to."""
        if happening.what == "taken" and happening.name in self.seen:
            yield self.constant + happening.numel * self.itemsize
        if happening.what == "taken":
            self.seen.add(happening.name)
        yield self.held()


class Together:
    """ZeRO's units, and beside them those that another stage holds too, which are sums of their own."""

    def __init__(self, parts: list[Sharding], constant: float) -> None:
        self.parts, self.constant = parts, constant

    def held(self) -> float:
        return self.constant + sum(part.held() for part in self.parts)

    def after(self, happening: Happening) -> Iterator[float]:
        """One after the other."""
        for part in self.parts:
            for amount in part.after(happening):
                yield self.held() - part.held() + amount


def units_of(rank: Rank) -> tuple[Units, Units]:
    """A unit of each layer of this rank's stage, one of both ends of gpt that share a weight; and what another stage
    holds too."""
    own, shared = Units([], {}, {}), Units([], {}, {})
    layers = outline(rank.config).layers
    (run,) = rank.stages.values()  # ZeRO's pipelines have one stage a rank
    for index in run:
        behind = rank.config.tie and rank.is_gpt and rank.p == 1 and index == len(layers) - 1
        own.of_layer[index] = 0 if behind else len(own.numels)
        own.numels.extend([] if behind else [0])
        for local in rank.of_layer(layers[index]):
            if local.shared:
                shared.numels.append(local.numel)
                shared.of_name[f"{index}.{local.name}"] = 0
            elif not (behind and local.name == "project.weight"):
                own.numels[own.of_layer[index]] += local.numel
                own.of_name[f"{index}.{local.name}"] = own.of_layer[index]
    return own, shared


def holding_of(rank: Rank) -> Holding:
    """What this rank holds beside its passes."""
    constant, zero = at_rest(rank), rank.how.zero
    if not zero:
        return Buckets(constant, rank.itemsize)
    place, parts = (rank.replica, rank.replicas), []
    for stage, units in zip((zero, min(zero, 2)), units_of(rank), strict=True):
        constant -= sum(units.own(*place)) * rank.itemsize * (stage > 1)
        parts.append(Sharding(stage, units, *place, rank.itemsize, 0.0, microbatches=len(rank.microbatches)))
    return Together(parts, constant)


def update_bytes(rank: Rank) -> float:
    """What the update holds on top of what is kept: gradients for masters, and AdamW's scratch."""
    units = [unit for stage in rank.stages for unit in rank.units(stage)]
    zero, masters = rank.how.zero, rank.config.dtype == "bfloat16"
    stepped = [owned(rank, unit) for unit in units] if zero else [local.numel for unit in units for local in unit]
    adam = rank.config.optimizer == "adamw"
    return 4.0 * masters * sum(stepped) + adam * adamw_scratch_bytes(stepped, 4 if masters else rank.itemsize)


def peak_bytes(rank: Rank, passes: list[Happening]) -> float:
    """The highest of the passes, or of the update."""
    return max(pass_peak(passes, holding_of(rank)), at_rest(rank) + update_bytes(rank))


def compare_peaks(
    lab: Lab, ranks: Mapping[str, Rank], actions: Mapping[str, list[Action]], measured: Mapping[str, Measured]
) -> None:
    """Hold the most that each variant of ours held against that."""
    known: dict[tuple[object, ...], list[Happening]] = {}  # variants that only keep something else pass alike
    for name, rank in ranks.items():
        alike = (rank.rows, rank.how.swaps, rank.chunks, *actions[name])
        if alike not in known:
            lab.at(0, f"the passes of {name} alone")
            known[alike] = passes_of(lab, rank, actions[name])
        predicted = peak_bytes(rank, known[alike])
        lab.compare(
            "peak bytes", predicted, sum(measured[name].peak.values()), "B", TOLERANCE * predicted, name,
            f"kept + passes of the rank alone{TERMS[HOW[name].zero]}", shown=shown_on(lab.config.device),
            control="tests/experiments/test_mesh.py::test_gradients_that_stay_whole_show_in_the_peak",
        )  # fmt: skip
