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
    order_reported: bool = False  # whether an order differs
    first_differing: dict[str, int] = field(default_factory=dict)  # by what: gradients, options or weights; the step
    last_equal: int = 0  # the last step after which the weights were equal
    options: dict[tuple[int, int], dict[int, list[dict[str, str]]]] = field(default_factory=lambda: defaultdict(dict))
    by_name: bool = True  # else a copy of all its elements was reduced, perhaps the weights' (local SGD)
    averaged_elsewhere: bool = False  # its gradients were also averaged in other groups (gossip)
    faults: list[Unaveraged] = field(default_factory=list)
    made_at: str = ""  # where the DDP was created, or gradients are averaged explicitly
    stepped_at: str = "an unknown line"

    def are_different(self, sums: dict[int, dict[str, int]]) -> bool:
        """Return whether all these ranks have reported, with differences in the names that all have."""
        return set(sums) == set(self.ranks) and any(
            len({sums[rank][name] for rank in self.ranks}) > 1 for name in common_names(sums)
        )

    def differing_steps(self, what: Sums) -> list[int]:
        """Return the steps at which all have reported this, with differences."""
        return [step for step, sums in sorted(what.items()) if self.are_different(sums)]

    def sides(self, sums: dict[int, dict[str, int]]) -> tuple[list[str], str, str, str]:
        """Return the names that differ, in words with their number, the minority of ranks, and the others."""
        outliers, names = smaller_side(sums)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        which = f"parameter {names[0]}{more}" if names else "parameter"
        return names, which, name_ranks(outliers), name_ranks(sorted(set(self.ranks) - set(outliers)))

    @property
    def was_averaged(self) -> bool:
        """Return whether the gradients of all ranks were equal at some observed step."""
        return any(set(sums) == set(self.ranks) and not self.are_different(sums) for sums in self.gradients.values())

    @property
    def since(self) -> tuple[int, int]:
        """Return the last step with equal weights, and the first one with different weights."""
        equal, unequal = self.last_equal, self.first_differing.get("weights", 0)
        for step in sorted(step for step in self.weights if step > 0):
            if self.are_different(self.weights[step]):
                unequal = min(unequal or step, step)
            elif set(self.weights[step]) == set(self.ranks) and not unequal:
                equal = max(equal, step)
        return min(equal, unequal - 1) if unequal else equal, unequal


class Replicas(Fault):
    """All ranks' parameters and checksums."""

    def __init__(self, parameter_calls: Fault) -> None:
        self._parameter_calls = parameter_calls
        self._replicas: dict[tuple[str, tuple[int, ...]], Replica] = {}

    def _of(self, state: RankState, key: str, group: int, stepped_at: int = -1) -> Replica:
        ranks = state.group(group).ranks
        found = self._replicas.setdefault((key, ranks), Replica(key, ranks))
        found.stepped_at = line_of(state, stepped_at) or found.stepped_at
        return found

    def on_module(
        self, state: RankState, key: str, group: int, place: int, order: list[str], buffers: list[str]
    ) -> Iterator[Finding]:
        replica = self._of(state, key, group)
        replica.made_at = state.place(place).line
        for what, names in (("parameter", order), ("buffer", buffers)):
            seen = replica.orders[what]
            seen[state.rank] = names
            other = next((rank for rank in sorted(seen) if seen[rank] != seen[min(seen)]), None)
            if other is not None and not replica.order_reported:
                replica.order_reported = True
                yield Finding(MATCH, other_order(f"{key} at {replica.made_at}", what, seen, other), (other,), ends=True)

    def on_averaged(self, state: RankState, key: str, group: int, by_name: bool, place: int) -> None:
        replica = self._of(state, key, group)
        replica.made_at, replica.by_name = line_of(state, place), by_name

    def on_elsewhere(self, state: RankState, key: str, group: int) -> None:
        self._of(state, key, group).averaged_elsewhere = True

    def on_sums(
        self, state: RankState, what: str, key: str, group: int, step: int, sums: list[list[Any]], place: int
    ) -> None:
        """Record checksums of weights, gradients, states of the optimizer, or buffers."""
        found = {str(name): int(checksum) for name, checksum in sums}
        replica = self._of(state, key, group, place)
        of: dict[str, Sums] = {name: getattr(replica, name) for name in ("weights", "gradients", "states", "buffers")}
        of[what][step][state.rank] = found

    def on_trace(
        self, state: RankState, key: str, group: int, step: int, gradients: int, options: int, weights: int
    ) -> None:
        replica = self._of(state, key, group)
        seen = replica.traces[step]
        seen[state.rank] = gradients, options, weights
        if set(seen) == set(replica.ranks):
            del replica.traces[step]
            self._compare(replica, step, seen)
        elif len(replica.traces) > MOST_PENDING:
            del replica.traces[min(replica.traces)]

    @staticmethod
    def _compare(replica: Replica, step: int, seen: dict[int, tuple[int, int, int]]) -> None:
        for index, what in enumerate(("gradients", "options", "weights")):
            if len({each[index] for each in seen.values()}) > 1:
                replica.first_differing.setdefault(what, step)
            elif what == "weights":
                replica.last_equal = max(step, replica.last_equal)
                replica.first_differing.clear()
            elif what == "options":
                replica.first_differing.pop(what, None)

    def on_options(
        self, state: RankState, key: str, group: int, number: int, step: int, groups: list[Any], place: int
    ) -> None:
        for each in groups:
            if not all(type(name) is str and type(value) is str for name, value in each.items()):
                raise TypeError(f"{each!r} is no parameter group's options")
        found = self._of(state, key, group, place).options[number, state.rank]
        found[step] = groups
        if len(found) > MOST_OPTIONS:
            del found[min(found)]

    def on_fault(
        self, state: RankState, key: str, group: int, kind: str, step: int, names: list[str], place: int,
        stepped_at: int,
    ) -> None:  # fmt: skip
        found = Unaveraged(kind, step, [str(each) for each in names], line_of(state, place))
        self._of(state, key, group, stepped_at).faults.append(found)

    def findings(self) -> Iterator[Finding]:
        """Yield findings; groups whose explicit calls mix parameters up have only that finding."""
        explained = {finding.ranks for finding in self._parameter_calls.findings()}
        for replica in self._replicas.values():
            by_hand = not replica.key.startswith(("DDP", "FSDP"))
            averaged = not replica.averaged_elsewhere and (replica.by_name or replica.was_averaged)
            different = replica.key != BROADCAST and replica.are_different(replica.weights.get(END, {}))
            if averaged and different and not (by_hand and replica.ranks in explained):
                outliers, _ = smaller_side(replica.weights[END])
                yield Finding(REPLICAS, explain_difference(replica), tuple(outliers))

    def questions(self) -> Iterator[str]:
        for replica in self._replicas.values():
            last = replica.weights.get(END, {})
            if replica.key == BROADCAST and replica.are_different(last):
                _, which, outliers, others = replica.sides(last)
                yield (
                    f"{outliers} ended with different values of {which} than {others}; is that intended?"
                    " They were broadcast at the start, and their gradients are never averaged over these ranks; the"
                    f" optimizer steps at {replica.stepped_at}"
                )


def line_of(state: RankState, place: int) -> str:
    return state.place(place).line if place >= 0 else ""


def other_order(what: str, kind: str, seen: dict[int, list[str]], outlier: int) -> str:
    """Return the first difference between two orders of names."""
    first = min(seen)
    theirs, order = seen[first], seen[outlier]
    length = min(len(theirs), len(order))
    index = next((each for each in range(length) if theirs[each] != order[each]), length)
    rule = "DDP sends rank 0's buffers to all in their order, whatever their names"
    if kind == "buffer":  # each with its shape
        (name, _, shape), (another, _, other_shape) = (
            each[index].partition(" (") if index < len(each) else ("", "", "") for each in (theirs, order)
        )
        if name == another:
            difference = f"buffer {name} has shape ({shape} on rank {first} and ({other_shape} on rank {outlier}"
            return f"{what}: {difference}: {rule}; use one shape on all ranks, or set broadcast_buffers=False"
        theirs, order = ([each.partition(" (")[0] for each in names] for names in (theirs, order))
    one, other = (repr(each[index]) if index < len(each) else f"no {kind}" for each in (theirs, order))
    difference = f"{kind} {index} is {one} on rank {first} and {other} on rank {outlier}"
    if kind == "buffer":
        return f"{what}: {difference}: {rule}; register them in one order on all ranks (sorted(...), not a set)"
    return f"{what}: {difference}: DDP sums gradients in their order, whatever their names"


def common_names(sums: dict[int, dict[str, int]]) -> list[str]:
    """Return the names that all ranks have reported, in one rank's order."""
    return [name for name in next(iter(sums.values()), {}) if all(name in each for each in sums.values())]


def smaller_side(sums: dict[int, dict[str, int]]) -> tuple[list[int], list[str]]:
    """Return the minority of ranks, and the parameters in which the first of them differs from the others."""
    names = common_names(sums)
    sides = ranks_by({rank: tuple(sums[rank][name] for name in names) for rank in sums})
    right = max(sides.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    outliers = sorted(rank for ranks in sides.values() if ranks is not right for rank in ranks)
    return outliers, [name for name in names if sums[outliers[0]][name] != sums[right[0]][name]]


# Causes of differing replicas: each function returns its clause with the remedy, or nothing if the cause is another.


def explain_difference(replica: Replica) -> str:
    """Return the whole sentence."""
    names, which, outliers, others = replica.sides(replica.weights[END])
    if replica.key.startswith("FSDP"):
        return (
            f"FSDP does not shard {which}, which the optimizer steps at {replica.stepped_at}, so its gradient is"
            f" never averaged: {outliers} ended with different values than {others}; put it into the module"
            " before FSDP wraps it, and wrap the whole model too (fully_shard(model)), not only its layers"
        )
    if replica.are_different(replica.weights.get(BEGINNING, {})):
        return from_beginning(replica)
    who = f"{replica.key} ({replica.made_at})"
    if not replica.key.startswith("DDP"):
        who = f"those whose gradients are averaged by hand at {replica.made_at}"
    cause = (
        late_parameters(replica, names)
        or other_options(replica)
        or without_average(replica)
        or other_gradients(replica)
        or other_state(replica)
        or other_buffers(replica)
        or "gradients, options and state of the optimizer were equal, so something else changes the weights between the"
        " steps on some ranks: let all ranks do it"
    )
    return (
        f"the replicas of {who} have drifted apart: {outliers} ended with different values of {which} than {others},"
        f" {since_words(replica)}: {cause}; the optimizer steps at {replica.stepped_at}"
    )


def since_words(replica: Replica) -> str:
    equal, unequal = replica.since
    if not unequal:
        return f"after step {equal}" if equal else "at some step"
    return f"since step {unequal}" if equal >= unequal - 1 else f"since step {equal + 1} to {unequal}"


def from_beginning(replica: Replica) -> str:
    """Return the clause if weights differed before the first step."""
    _, which, outliers, others = replica.sides(replica.weights[BEGINNING])
    before = f"before the first step, at {replica.stepped_at}"
    if replica.key.startswith("DDP"):
        return (
            f"the replicas of {replica.key} ({replica.made_at}) have drifted apart: {outliers} had different values of"
            f" {which} than {others} already {before}; they were written after DDP was created, and DDP averages"
            " gradients, not weights: write them before DDP is created, or equally on all ranks"
        )
    return (
        f"weights of {outliers} and of {others} differ from the beginning: {which}, {before}; their"
        f" gradients are averaged at {replica.made_at}, which keeps the difference: broadcast the weights"
        " before the first step, or create the model with one seed on all ranks"
    )


def late_parameters(replica: Replica, names: list[str]) -> str:
    """Return the clause for parameters that a DDP does not know, or did not when it was created."""
    texts = {
        "added": f"was added after DDP at {replica.made_at}; its gradient is never averaged: put it into the model"
        " before DDP is created",
        "unfrozen": f"was frozen when DDP was created at {replica.made_at}, and its gradient is never averaged since:"
        " set requires_grad before DDP is created, or create DDP again",
    }
    for fault in replica.faults:
        found = [name for name in fault.names if name in names]
        if fault.kind in texts and found and set(names) <= set(fault.names):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"{found[0]}{more} {texts[fault.kind]}"
    return ""


def other_options(replica: Replica) -> str:
    """Return the clause for the first option of a parameter group that differs."""
    _, unequal = replica.since
    step = replica.first_differing.get("options", 0)
    if not step or (unequal and step > unequal):
        return ""
    for number in sorted({number for number, _ in replica.options}):
        in_effect = {rank: at_step(replica.options.get((number, rank), {}), step) for rank in replica.ranks}
        first = in_effect[replica.ranks[0]]
        if len({len(groups) for groups in in_effect.values()}) > 1:
            return "different numbers of parameter groups: " + by_value({r: f"{len(g)}" for r, g in in_effect.items()})
        for index, options in enumerate(first):
            for name in options:
                values = {rank: in_effect[rank][index].get(name, "none") for rank in replica.ranks}
                if len(set(values.values())) > 1:
                    shown = "different numbers of parameters" if name == "parameters" else f"different {name}"
                    shown = "different learning rates (lr)" if name == "lr" else shown
                    return (
                        f"{shown} in parameter group {index} since step {step}: {by_value(values)}; let it depend on"
                        " values that are equal on all ranks (all_reduce a loss or a metric before it decides)"
                    )
    return ""


def at_step(options: dict[int, list[dict[str, str]]], step: int) -> list[dict[str, str]]:
    """Return the options in effect at a step."""
    steps = [each for each in options if each <= step]
    return options[max(steps)] if steps else []


def by_value(values: dict[int, str]) -> str:
    """Return "0.1 on rank 0, 0.05 on ranks 1 and 2"."""
    return ", ".join(f"{value} on {name_ranks(of)}" for value, of in list(ranks_by(values).items())[:SHOWN])


def without_average(replica: Replica) -> str:
    """Return the clause for backward passes of a DDP without an average."""
    equal, unequal = replica.since
    first = replica.first_differing.get("gradients", 0)
    for fault in replica.faults:
        if not equal < fault.step <= (unequal or fault.step) or (first and fault.step < first):
            continue
        here, there = (f" at {fault.place}", f" ({fault.place})") if fault.place else ("", "")
        if fault.kind == "past":
            through = f"through .module{here}" if here else "in another way"
            return (
                f"the gradients of step {fault.step} bypassed {replica.key.split()[0]}: its module was called {through}"
                ", and not DDP itself, so nothing is averaged; call the DDP itself in training"
            )
        if fault.kind == "unaveraged":
            return (
                f"before step {fault.step} all backward passes were in no_sync{there}, so each rank"
                " steps with its own gradients; leave no_sync for the last backward pass before each step, also at the"
                " end of an epoch"
            )
        if fault.kind == "after the average":
            return (
                f"before step {fault.step} backward passes in no_sync{there} came after the one that"
                " averages, and their gradients stay on their rank; average in the last backward pass before the step"
            )
    return ""


def other_gradients(replica: Replica) -> str:
    full = replica.differing_steps(replica.gradients)
    step = min([*full, *filter(None, [replica.first_differing.get("gradients")])], default=0)
    if not step or step > (replica.since[1] or step):
        return ""
    of = f" ({replica.sides(replica.gradients[step])[1]})" if step in full else ""
    return (
        f"the ranks step with different gradients{of} from step {step} on; average all gradients in each step, after"
        " the last backward pass and before anything else changes them"
    )


def other_state(replica: Replica) -> str:
    (equal, unequal), (step, *_) = replica.since, (*replica.differing_steps(replica.states), 0)
    if not step or step > (unequal or step) or (equal < step - 1 and unequal != step):
        return ""
    which = replica.sides(replica.states[step])[1]
    return (
        f"the state of the optimizer differs ({which}) at step {step}, with equal gradients: load or create it equally"
        " on all ranks"
    )


def other_buffers(replica: Replica) -> str:
    step, *_ = *replica.differing_steps(replica.buffers), 0
    if not step or step > (replica.since[1] or step):
        return ""
    which = replica.sides(replica.buffers[step])[1].replace("parameter", "buffer")
    return (
        f"different buffers ({which}) at step {step}, with equal gradients: weights that are computed from them"
        " then differ too; all_reduce them on all ranks, or let DDP send rank 0's (broadcast_buffers=True)"
    )
