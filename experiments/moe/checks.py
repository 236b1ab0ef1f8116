"""Record what every strategy of a run routes, compare it with the rule of capacity, and draw it.

Every rank has the routing table of all ranks (distlab/techniques/expert_parallel/layer.py), so each can say how many
rows every rank computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle
from statistics import mean, median
from typing import Any, TypeAlias

from distlab.contract import Build, Claims, Mode, Strategy
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.experts import Mixing
from distlab.techniques.expert_parallel.layer import Placement, Routed

from .predictions import expert_places

COLUMNS = ["", "experts", "choices", "dropped", "rows", "x the mean", "ms computing", "ms waiting"]

PASSES = 3  # through an expert, in time: a forward, and a backward that takes two

Notes: TypeAlias = dict[str, list[Routed]]  # of each layer by name, a batch after the other


class Routes:
    """What each strategy of a run routes, by variant, in the order of the passes."""

    def __init__(self) -> None:
        self.notes_by_variant: dict[str, list[Notes]] = {}
        self.timed: dict[str, Notes] = {}
        self.counted: dict[str, Notes] = {}

    def watching(self, mode: Mode) -> Mode:
        """Return the mode with variants that note what they route."""
        variants = [
            replace(each, build=self._noting(each.name, each.build)) if each.build else each for each in mode.variants
        ]
        return replace(mode, variants=tuple(variants))

    def _noting(self, name: str, build: Build) -> Build:
        def built(model: Any, *args: Any) -> Strategy:
            strategy = build(model, *args)
            mixtures = getattr(getattr(strategy, "model", None), "mixtures", {})
            notes: Notes = {layer: [] for layer in mixtures}
            for layer, mixture in mixtures.items():
                mixture.seen = notes[layer]
            self.notes_by_variant.setdefault(name, []).append(notes)
            return strategy

        return built

    def timed_steps_are_done(self) -> None:
        """Keep the last strategies' notes as those of the timed steps."""
        self.timed = {name: made[-1] for name, made in self.notes_by_variant.items()}

    def all_is_done(self) -> None:
        """Keep the next strategies' notes as those of the counted steps."""
        for name, notes in self.timed.items():
            later = self.notes_by_variant[name][self.notes_by_variant[name].index(notes) + 1 :]
            self.counted |= {name: later[0]} if later else {}


def tokens_of(config: Config) -> list[int]:
    """Return the tokens of each microbatch on all ranks together: bytes of text, or samples of an mlp."""
    per_sample = config.seq if config.model == "gpt" else 1
    return [size * per_sample for size in shard_sizes(config.batch, config.num_microbatches)]


def by_step(notes: Notes, microbatches: int) -> list[list[Routed]]:
    """Return what was routed in each step: all microbatches of the step, in all layers."""
    (number,) = {len(of_layer) // microbatches for of_layer in notes.values()} or {0}
    return [
        [each for of_layer in notes.values() for each in of_layer[step * microbatches : (step + 1) * microbatches]]
        for step in range(number)
    ]


def check_capacity(lab: Lab, routes: Routes, mixing: Mixing) -> None:
    """Check in every step and layer that an expert takes all choices up to the capacity of the whole microbatch."""
    places = [
        expert_places(tokens, mixing.top_k, mixing.num_experts, mixing.capacity_factor)
        for tokens in tokens_of(lab.config)
    ]
    for name, notes in routes.timed.items():
        error = dropped = chosen = 0
        for capacity, routed in chain.from_iterable(zip(cycle(places), each, strict=False) for each in notes.values()):
            for expert, wanted in enumerate(by_expert(routed)):
                computed = sum(of_rank[expert] for of_rank in routed.admitted)
                error = max(error, abs(computed - min(wanted, capacity)))
                dropped, chosen = dropped + wanted - computed, chosen + wanted
        if chosen:
            lab.check(
                "capacity",
                error,
                0,
                name,
                f"{dropped} of {chosen} choices were dropped: all {max(places)} places of their expert were taken",
            )
            check_choices(lab, name, notes, chosen, dropped, mixing.top_k)


def check_choices(lab: Lab, name: str, notes: Notes, chosen: int, dropped: int, top_k: int) -> None:
    """Check that every token makes top_k choices per layer, and that experts take all that were not dropped."""
    tokens = sum(
        number for each in notes.values() for number, _ in zip(cycle(tokens_of(lab.config)), each, strict=False)
    )
    computed = sum(sum(map(sum, routed.admitted)) for each in notes.values() for routed in each)
    error = abs(chosen - top_k * tokens) + abs(chosen - dropped - computed)
    detail = f"{chosen} choices of {tokens} tokens with {top_k} each, {dropped} dropped, {computed} computed"
    lab.check("choices", error, 0, name, detail)


def by_expert(routed: Routed) -> list[int]:
    """Count how often all ranks' tokens wanted each expert."""
    return [
        sum(counts) for counts in zip(*(of_choice for of_rank in routed.wanted for of_choice in of_rank), strict=True)
    ]


def rows_of(placement: Placement, routed: Routed) -> list[int]:
    """Count the rows that each rank computes; a part of an expert's hidden units computes all rows of the expert."""
    ranks = range(len(routed.admitted))
    return [
        sum(
            routed.admitted[member][expert]
            for member in placement.members(rank)
            for expert in placement.experts_of(rank)
        )
        for rank in ranks
    ]


def busiest(rows: Sequence[int]) -> float:
    """Divide the rows of the busiest rank, for which the others wait, by the mean."""
    return max(rows) / mean(rows) if any(rows) else 1.0


def draw(lab: Lab, routes: Routes, placed: Mapping[str, Placement], mixing: Mixing) -> None:
    """Draw the imbalance: which experts tokens want, how much each rank computes, and how long the step takes."""
    seconds_by_rank = lab.exchange.gather("seconds of routed steps", lab.profiles())
    if seconds_by_rank is None:
        return
    curves = {}
    for name, notes in routes.timed.items():
        steps = by_step(notes, lab.config.num_microbatches)
        if not steps:
            continue
        ratios = [mean(busiest(rows_of(placed[name], routed)) for routed in step) for step in steps]
        curves[name] = [[float(step) for step in range(len(steps))], ratios]
        if name == "ep" or (name == "replicated" and "ep" not in routes.timed):
            draw_experts(lab, name, notes, mixing)
        title, rows = by_rank(name, placed[name], steps[-1], [of_rank[name] for of_rank in seconds_by_rank])
        lab.table(title, COLUMNS, rows)
    if curves:
        lab.chart("rows of the busiest rank over the mean, all layers", "step", "x the mean", curves)


def simulated_s(rows: Sequence[Sequence[int]], row_s: float) -> float:
    """Return the seconds of a step whose layers each take as long as their busiest rank; `rows` by layer and rank."""
    return PASSES * row_s * sum(map(max, rows))


def compare_pace(lab: Lab, routes: Routes, placed: Mapping[str, Placement], row_s: float) -> None:
    """Compare a step's time with the pretended compute of the busiest rank of each layer, added up."""
    for name, seconds in lab.profiles().items() if row_s and lab.rank == 0 else ():
        steps = [
            simulated_s([rows_of(placed[name], routed) for routed in step], row_s / len(placed[name].hidden))
            for step in by_step(routes.timed[name], lab.config.num_microbatches)
        ]
        if steps:
            formula = "3 x LAB_ROW_US x rows of each layer's busiest rank"
            lab.compare(
                "paced by the busiest", median(steps), sum(seconds.values()), "s", variant=name, formula=formula,
                shown="a time",
            )  # fmt: skip


def draw_experts(lab: Lab, name: str, notes: Notes, mixing: Mixing) -> None:
    """Draw how many tokens wanted each expert and how many it computed, in the most uneven layer's last microbatch."""
    layer, last = max(
        ((layer, of_layer[-1]) for layer, of_layer in notes.items()), key=lambda each: max(by_expert(each[1]))
    )
    experts = [float(expert) for expert in range(mixing.num_experts)]
    series = {
        "wanted": [experts, [float(each) for each in by_expert(last)]],
        "taken": [experts, [float(sum(each)) for each in zip(*last.admitted, strict=True)]],
    }
    if mixing.capacity_factor:
        series["places"] = [experts, [float(last.places)] * len(experts)]
    lab.chart(f"{name}, {layer}: tokens per expert in the last microbatch", "expert", "tokens", series)
    wanted_by_rank = {
        f"rank {rank}": [experts, [float(sum(each)) for each in zip(*of_choices, strict=True)]]
        for rank, of_choices in enumerate(last.wanted)
    }
    lab.chart(f"{name}, {layer}: tokens per expert, by the rank they come from", "expert", "tokens", wanted_by_rank)


def by_rank(
    name: str, placement: Placement, layers: Sequence[Routed], seconds: Sequence[Mapping[str, float]]
) -> tuple[str, list[list[Any]]]:
    """Return title and rows of a table: what each rank routed and computed, and where a median step's time went."""
    of_layers = [rows_of(placement, routed) for routed in layers]
    computed = [sum(rows) for rows in zip(*of_layers, strict=True)]
    pace = sum(max(rows) for rows in of_layers) / max(1.0, sum(mean(rows) for rows in of_layers))
    rows: list[list[Any]] = []
    for rank, rows_here in enumerate(computed):
        wanted = sum(sum(of_choice) for routed in layers for of_choice in routed.wanted[rank])
        computed_rows = sum(sum(routed.admitted[rank]) for routed in layers)
        experts = placement.experts_of(rank)
        which = f"{experts.start} to {experts.stop - 1}" if experts else "none"
        time = seconds[rank]
        work, waits = (1e3 * sum(time[kind] for kind in kinds) for kinds in (("forward", "backward"), ("waiting",)))
        share = rows_here / mean(computed) if any(computed) else 1.0
        rows.append(
            [
                f"rank {rank}",
                which,
                wanted,
                wanted - computed_rows,
                rows_here,
                f"{share:.2f}",
                f"{work:.3g}",
                f"{waits:.3g}",
            ]
        )
    title = f"{name}: the last step; each layer takes as long as its busiest rank, {pace:.2f} x the mean rank's rows"
    return title, rows


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """List the checks of a run: bytes, calls, what experts took, and that copies agree."""
    routed, fresh = (*mode.by_hand, *mode.by_torch), config.resume is None  # else there may be no step left
    return (
        *measured(mode, config),
        Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand),
        Claims(("capacity",), routed, when=fresh),
        Claims(("choices",), routed, when=fresh, fails_in="test_wrong_counts_of_choices_fail"),
        Claims(("copies",), ("ep_dp", "ep_dp_tp"), one=True, when=config.proof),
    )
