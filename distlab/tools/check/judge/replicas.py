"""Compare parameters that must be equal on all ranks, and find the first step at which they differ, and why.

DDP sums the n-th parameter of each rank and checks only shapes. Weights are compared by checksums: replicas with the
same sums and the same updates are equal to the bit. Ranks may differ temporarily (local SGD), so the end decides, and
earlier steps give the first difference: of each step some elements are known, of steps 1, 2, 4, 8, ... all. The cause
is the first quantity that differs, in the order in which one leads to another.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import Fault
from distlab.tools.check.judge.rank_state import MATCH, REPLICAS, Finding, RankState, ranks_by

END, BEGINNING = -1, 0  # used as step numbers
BROADCAST = "broadcast"  # the key of parameters that were broadcast and whose gradients were never averaged
MOST_PENDING = 1000  # steps that some ranks have not reported
MOST_OPTIONS = 1000  # changes of options that are remembered
SHOWN = 3  # ranks or parameters

Sums = dict[int, dict[int, dict[str, int]]]  # checksums by step, rank and name


@dataclass
class Unaveraged:
    """A reason why gradients are not averaged, at its first steps."""

    kind: str
    step: int
    names: list[str]
    place: str  # empty if unknown


@dataclass
class Replica:
    """All ranks' reports about parameters that must be equal."""

    key: str  # the module or optimizer of the parameters
    ranks: tuple[int, ...]
    weights: Sums = field(default_factory=lambda: defaultdict(dict))
    gradients: Sums = field(default_factory=lambda: defaultdict(dict))
    states: Sums = field(default_factory=lambda: defaultdict(dict))
    buffers: Sums = field(default_factory=lambda: defaultdict(dict))
    traces: dict[int, dict[int, tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(dict))
    orders: dict[str, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(dict))  # names on each rank
    told: bool = False  # whether an order differs
    differ: dict[str, int] = field(default_factory=dict)  # the first step at which gradients, options or weights differ
    agreed: int = 0  # the last step after which the weights were equal
    options: dict[tuple[int, int], dict[int, list[dict[str, str]]]] = field(default_factory=lambda: defaultdict(dict))
    by_name: bool = True  # else a copy of all its elements was reduced, perhaps the weights' (local SGD)
    elsewhere: bool = False  # its gradients were also averaged in other groups (gossip)
    faults: list[Unaveraged] = field(default_factory=list)
    made_at: str = ""  # where the DDP was created, or gradients are averaged explicitly
    stepped_at: str = "an unknown line"

    def are_apart(self, sums: dict[int, dict[str, int]]) -> bool:
        """Return whether all these ranks have reported, with differences in the names that all have."""
        return set(sums) == set(self.ranks) and any(
            len({sums[rank][name] for rank in self.ranks}) > 1 for name in common(sums)
        )

    def apart_at(self, what: Sums) -> list[int]:
        """Return the steps at which all have reported this, with differences."""
        return [step for step, sums in sorted(what.items()) if self.are_apart(sums)]

    def sides(self, sums: dict[int, dict[str, int]]) -> tuple[list[str], str, str, str]:
        """Return the names that differ, in words with their number, the minority of ranks, and the others."""
        odd, names = smaller_side(sums)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        which = f"parameter {names[0]}{more}" if names else "parameter"
        return names, which, name_ranks(odd), name_ranks(sorted(set(self.ranks) - set(odd)))

    @property
    def was_averaged(self) -> bool:
        """Return whether the gradients of all ranks were equal at some observed step."""
        return any(set(sums) == set(self.ranks) and not self.are_apart(sums) for sums in self.gradients.values())

    @property
    def since(self) -> tuple[int, int]:
        """Return the last step with equal weights, and the first one with different weights."""
        agreed, apart = self.agreed, self.differ.get("weights", 0)
        for step in sorted(step for step in self.weights if step > 0):
            if self.are_apart(self.weights[step]):
                apart = min(apart or step, step)
            elif set(self.weights[step]) == set(self.ranks) and not apart:
                agreed = max(agreed, step)
        return min(agreed, apart - 1) if apart else agreed, apart


class Replicas(Fault):
    """All ranks' parameters and checksums."""

    def __init__(self, parameter_calls: Fault) -> None:
        self._mixed_up = parameter_calls
        self._known: dict[tuple[str, tuple[int, ...]], Replica] = {}

    def _of(self, case: RankState, key: str, group: int, stepped_at: int = -1) -> Replica:
        ranks = case.group(group).ranks
        found = self._known.setdefault((key, ranks), Replica(key, ranks))
        found.stepped_at = line_of(case, stepped_at) or found.stepped_at
        return found

    def take_module(
        self, case: RankState, key: str, group: int, place: int, order: list[str], buffers: list[str]
    ) -> Iterator[Finding]:
        known = self._of(case, key, group)
        known.made_at = case.place(place).line
        for what, names in (("parameter", order), ("buffer", buffers)):
            seen = known.orders[what]
            seen[case.rank] = names
            odd = next((rank for rank in sorted(seen) if seen[rank] != seen[min(seen)]), None)
            if odd is not None and not known.told:
                known.told = True
                yield Finding(MATCH, other_order(f"{key} at {known.made_at}", what, seen, odd), (odd,), ends=True)

    def take_averaged(self, case: RankState, key: str, group: int, by_name: bool, place: int) -> None:
        known = self._of(case, key, group)
        known.made_at, known.by_name = line_of(case, place), by_name

    def take_elsewhere(self, case: RankState, key: str, group: int) -> None:
        self._of(case, key, group).elsewhere = True

    def take_sums(
        self, case: RankState, what: str, key: str, group: int, step: int, sums: list[list[Any]], place: int
    ) -> None:
        """Record checksums of weights, gradients, states of the optimizer, or buffers."""
        found = {str(name): int(checksum) for name, checksum in sums}
        known = self._of(case, key, group, place)
        of = {"weights": known.weights, "gradients": known.gradients, "states": known.states, "buffers": known.buffers}
        of[what][step][case.rank] = found

    def take_trace(
        self, case: RankState, key: str, group: int, step: int, gradients: int, options: int, weights: int
    ) -> None:
        known = self._of(case, key, group)
        seen = known.traces[step]
        seen[case.rank] = gradients, options, weights
        if set(seen) == set(known.ranks):
            del known.traces[step]
            self._compare(known, step, seen)
        elif len(known.traces) > MOST_PENDING:
            del known.traces[min(known.traces)]

    @staticmethod
    def _compare(known: Replica, step: int, seen: dict[int, tuple[int, int, int]]) -> None:
        for index, what in enumerate(("gradients", "options", "weights")):
            if len({each[index] for each in seen.values()}) > 1:
                known.differ.setdefault(what, step)
            elif what == "weights":
                known.agreed = max(step, known.agreed)
                known.differ.clear()
            elif what == "options":
                known.differ.pop(what, None)

    def take_options(
        self, case: RankState, key: str, group: int, number: int, step: int, groups: list[Any], place: int
    ) -> None:
        for each in groups:
            if not all(type(name) is str and type(value) is str for name, value in each.items()):
                raise TypeError(f"{each!r} is no parameter group's options")
        found = self._of(case, key, group, place).options[number, case.rank]
        found[step] = groups
        if len(found) > MOST_OPTIONS:
            del found[min(found)]

    def take_fault(
        self, case: RankState, key: str, group: int, kind: str, step: int, names: list[str], place: int, stepped_at: int
    ) -> None:
        found = Unaveraged(kind, step, [str(each) for each in names], line_of(case, place))
        self._of(case, key, group, stepped_at).faults.append(found)

    def findings(self) -> Iterator[Finding]:
        """Yield findings; groups whose explicit calls mix parameters up have only that finding."""
        explained = {finding.ranks for finding in self._mixed_up.findings()}
        for known in self._known.values():
            hand = not known.key.startswith(("DDP", "FSDP"))
            parted = not known.elsewhere and (known.by_name or known.was_averaged)
            apart = known.key != BROADCAST and known.are_apart(known.weights.get(END, {}))
            if parted and apart and not (hand and known.ranks in explained):
                odd, _ = smaller_side(known.weights[END])
                yield Finding(REPLICAS, why_apart(known), tuple(odd))

    def questions(self) -> Iterator[str]:
        for known in self._known.values():
            last = known.weights.get(END, {})
            if known.key == BROADCAST and known.are_apart(last):
                _, which, odd, others = known.sides(last)
                yield (
                    f"{odd} ended with another {which} than {others}; is that intended?"
                    " They were broadcast at the start, and their gradients are never averaged over these ranks; the"
                    f" optimizer steps at {known.stepped_at}"
                )


def line_of(case: RankState, place: int) -> str:
    return case.place(place).line if place >= 0 else ""


def other_order(what: str, kind: str, seen: dict[int, list[str]], odd: int) -> str:
    """Return the first difference between two orders of names."""
    first = min(seen)
    theirs, order = seen[first], seen[odd]
    length = min(len(theirs), len(order))
    index = next((each for each in range(length) if theirs[each] != order[each]), length)
    rule = "DDP sends rank 0's buffers to all by their order, whatever they are called"
    if kind == "buffer":  # each with its shape
        (name, _, shape), (another, _, other_shape) = (
            each[index].partition(" (") if index < len(each) else ("", "", "") for each in (theirs, order)
        )
        if name == another:
            differ = f"buffer {name} has shape ({shape} on rank {first} and ({other_shape} on rank {odd}"
            return f"{what}: {differ}: {rule}; give it one shape on all ranks, or set broadcast_buffers=False"
        theirs, order = ([each.partition(" (")[0] for each in names] for names in (theirs, order))
    one, other = (repr(each[index]) if index < len(each) else f"no {kind}" for each in (theirs, order))
    differ = f"{kind} {index} is {one} on rank {first} and {other} on rank {odd}"
    if kind == "buffer":
        return f"{what}: {differ}: {rule}; register them in one order on all ranks (sorted(...), not a set)"
    return f"{what}: {differ}: DDP sums gradients by their order, whatever they are called"


def common(sums: dict[int, dict[str, int]]) -> list[str]:
    """Return the names that all ranks have reported, in one rank's order."""
    return [name for name in next(iter(sums.values()), {}) if all(name in each for each in sums.values())]


def smaller_side(sums: dict[int, dict[str, int]]) -> tuple[list[int], list[str]]:
    """Return the minority of ranks, and the parameters in which the first of them differs from the others."""
    names = common(sums)
    sides = ranks_by({rank: tuple(sums[rank][name] for name in names) for rank in sums})
    right = max(sides.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in sides.values() if ranks is not right for rank in ranks)
    return odd, [name for name in names if sums[odd[0]][name] != sums[right[0]][name]]


# Causes of differing replicas: each function returns its clause with the remedy, or nothing if the cause is another.


def why_apart(known: Replica) -> str:
    """Return the whole sentence."""
    names, which, odd, others = known.sides(known.weights[END])
    if known.key.startswith("FSDP"):
        return (
            f"FSDP does not shard {which}, which the optimizer steps at {known.stepped_at}, so its gradient is"
            f" never averaged: {odd} ended with another one than {others}; put it into the module"
            " before FSDP wraps it, and wrap the whole model too (fully_shard(model)), not its layers alone"
        )
    if known.are_apart(known.weights.get(BEGINNING, {})):
        return from_beginning(known)
    who = f"{known.key} ({known.made_at})"
    if not known.key.startswith("DDP"):
        who = f"those whose gradients are averaged by hand at {known.made_at}"
    cause = (
        late_parameters(known, names)
        or other_options(known)
        or without_average(known)
        or other_gradients(known)
        or other_state(known)
        or other_buffers(known)
        or "gradients, options and state of the optimizer were seen equal, so something else writes the weights between"
        " the steps of some ranks: let all ranks do it"
    )
    return (
        f"the replicas of {who} have drifted apart: {odd} ended with another {which} than {others},"
        f" {since_words(known)}: {cause}; the optimizer steps at {known.stepped_at}"
    )


def since_words(known: Replica) -> str:
    agreed, apart = known.since
    if not apart:
        return f"after step {agreed}" if agreed else "at some step"
    return f"since step {apart}" if agreed >= apart - 1 else f"since step {agreed + 1} to {apart}"


def from_beginning(known: Replica) -> str:
    """Return the clause if weights differed before the first step."""
    _, which, odd, others = known.sides(known.weights[BEGINNING])
    before = f"before the first step, at {known.stepped_at}"
    if known.key.startswith("DDP"):
        return (
            f"the replicas of {known.key} ({known.made_at}) have drifted apart: {odd} had another {which}"
            f" than {others} already {before}; it was written after DDP was made, and DDP averages gradients, not"
            " weights: write it before DDP is made, or on all ranks alike"
        )
    return (
        f"weights of {odd} and of {others} differ from the beginning: {which}, {before}; their"
        f" gradients are averaged at {known.made_at}, which leaves the difference as it is: broadcast the weights"
        " before the first step, or give all ranks one seed while the model is made"
    )


def late_parameters(known: Replica, names: list[str]) -> str:
    """Return the clause for parameters that a DDP does not know, or did not when it was created."""
    texts = {
        "added": f"was added after DDP at {known.made_at}; its gradient is never averaged: put it into the model before"
        " DDP is made",
        "unfrozen": f"was frozen when DDP was made at {known.made_at} and wants a gradient since; it is never averaged:"
        " set requires_grad before DDP is made, or make DDP anew",
    }
    for fault in known.faults:
        found = [name for name in fault.names if name in names]
        if fault.kind in texts and found and set(names) <= set(fault.names):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"{found[0]}{more} {texts[fault.kind]}"
    return ""


def other_options(known: Replica) -> str:
    """Return the clause for the first option of a parameter group that differs."""
    _, apart = known.since
    step = known.differ.get("options", 0)
    if not step or (apart and step > apart):
        return ""
    for number in sorted({number for number, _ in known.options}):
        in_effect = {rank: at_step(known.options.get((number, rank), {}), step) for rank in known.ranks}
        first = in_effect[known.ranks[0]]
        if len({len(groups) for groups in in_effect.values()}) > 1:
            return "other parameter groups: " + by_value({r: f"{len(each)} of them" for r, each in in_effect.items()})
        for index, options in enumerate(first):
            for name in options:
                values = {rank: in_effect[rank][index].get(name, "none") for rank in known.ranks}
                if len(set(values.values())) > 1:
                    shown = "another number of parameters" if name == "parameters" else f"another {name}"
                    shown = "another learning rate (lr)" if name == "lr" else shown
                    return (
                        f"{shown} in parameter group {index} since step {step}: {by_value(values)}; let it depend on"
                        " what all ranks have alike (all_reduce a loss or a metric before it decides)"
                    )
    return ""


def at_step(told: dict[int, list[dict[str, str]]], step: int) -> list[dict[str, str]]:
    """Return the options in effect at a step."""
    steps = [each for each in told if each <= step]
    return told[max(steps)] if steps else []


def by_value(values: dict[int, str]) -> str:
    """Return "0.1 on rank 0, 0.05 on ranks 1 and 2"."""
    return ", ".join(f"{value} on {name_ranks(of)}" for value, of in list(ranks_by(values).items())[:SHOWN])


def without_average(known: Replica) -> str:
    """Return the clause for backward passes of a DDP without an average."""
    agreed, apart = known.since
    first = known.differ.get("gradients", 0)
    for fault in known.faults:
        if not agreed < fault.step <= (apart or fault.step) or (first and fault.step < first):
            continue
        here, there = (f" at {fault.place}", f" ({fault.place})") if fault.place else ("", "")
        if fault.kind == "past":
            through = f"through .module{here}" if here else "in another way"
            return (
                f"the gradients of step {fault.step} came past {known.key.split()[0]}: its forward pass was not called,"
                f" but its module {through}, so nothing is averaged; call the DDP itself in training"
            )
        if fault.kind == "unaveraged":
            return (
                f"step {fault.step} came after backward passes in no_sync alone{there}, so each rank"
                " steps by its own gradients; leave no_sync in the last backward pass before each step, the last of an"
                " epoch too"
            )
        if fault.kind == "after the average":
            return (
                f"before step {fault.step} backward passes in no_sync{there} came after the one that"
                " averages, and what they add stays each rank's own; average in the last backward pass before the step"
            )
    return ""


def other_gradients(known: Replica) -> str:
    full = known.apart_at(known.gradients)
    step = min([*full, *([known.differ["gradients"]] if "gradients" in known.differ else [])], default=0)
    if not step or step > (known.since[1] or step):
        return ""
    of = f" ({known.sides(known.gradients[step])[1]})" if step in full else ""
    return (
        f"the ranks step by other gradients{of} from step {step} on; average all gradients at each step, after the last"
        " backward pass and before anything else changes them"
    )


def other_state(known: Replica) -> str:
    (agreed, apart), (step, *_) = known.since, (*known.apart_at(known.states), 0)
    if not step or step > (apart or step) or (agreed < step - 1 and apart != step):
        return ""
    which = known.sides(known.states[step])[1]
    return (
        f"another state of the optimizer ({which}) at step {step}, with the same gradients: load or make it on all"
        " ranks alike"
    )


def other_buffers(known: Replica) -> str:
    step, *_ = *known.apart_at(known.buffers), 0
    if not step or step > (known.since[1] or step):
        return ""
    which = known.sides(known.buffers[step])[1].replace("parameter", "buffer")
    return (
        f"other buffers ({which}) at step {step}, with the same gradients: what is written into the weights from"
        " them is each rank's own; all_reduce them on all ranks, or let DDP send rank 0's (broadcast_buffers=True)"
    )
