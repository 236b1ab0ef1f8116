"""Replicas that ranks should hold alike: their parameters in the same order, and the same weights at the end.

DDP sums the n-th parameter of a rank with the n-th of the others and looks at shapes alone. Weights are compared as
checksums: replicas that got the same sums and do the same with them agree to the bit. Ranks may part on the way (local
SGD), so the end decides, and the way only says since when.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from workers.check.casebook import Case
from workers.check.finding import MATCH, REPLICAS, Finding
from workers.cluster import name_ranks

Group = tuple[str, tuple[int, ...]]  # what holds the parameters, and on which ranks
END = -1  # in the place of a step
BY_HAND = "optimizer"  # the key of parameters that the script has broadcast itself


class Replicas:
    """The parameters and checksums that ranks have told."""

    def __init__(self) -> None:
        self._orders: dict[Group, dict[int, list[str]]] = defaultdict(dict)
        self._sums: dict[Group, dict[int, dict[int, list[list[Any]]]]] = defaultdict(lambda: defaultdict(dict))
        self._steps_at: dict[str, str] = {}
        self._told: set[Group] = set()

    def take_module(self, case: Case, key: str, group: int, place: int, order: list[str]) -> Iterator[Finding]:
        """The parameters of a DDP, as it is made."""
        which = key, case.group(group).ranks
        seen = self._orders[which]
        seen[case.rank] = order
        odd = next((rank for rank in sorted(seen) if seen[rank] != seen[min(seen)]), None)
        if odd is None or which in self._told:
            return
        self._told.add(which)
        first = min(seen)
        theirs, order = seen[first], seen[odd]
        length = min(len(theirs), len(order))
        index = next((each for each in range(length) if theirs[each] != order[each]), length)
        one, other = (repr(each[index]) if index < len(each) else "no parameter" for each in (theirs, order))
        yield Finding(
            MATCH,
            f"{key} at {case.place(place).line}: parameter {index} is {one} on rank {first} and {other} on rank"
            f" {odd}: DDP sums gradients by their order, whatever they are called",
            (odd,),
            ends=True,
        )

    def take_weights(self, case: Case, key: str, group: int, step: int, sums: list[list[Any]], place: int) -> None:
        """Checksums by parameter, after so many steps."""
        self._sums[key, case.group(group).ranks][step][case.rank] = sums
        self._steps_at[key] = case.place(place).line if place >= 0 else "an unknown line"

    def drifted(self) -> Iterator[Finding]:
        """Replicas that differ at the end."""
        for (key, ranks), by_step in self._sums.items():
            if not differ(by_step.get(END, {}), ranks):
                continue
            odd, names = apart(by_step[END])
            since = next((step for step in sorted(by_step) if step > 0 and differ(by_step[step], ranks)), None)
            when = f", since step {since} or before" if since is not None else ""
            which = f"parameter {names[0]}" if names else "parameter"
            which += f" and {len(names) - 1} more" if len(names) > 1 else ""
            who = "the parameters that were broadcast at the start" if key == BY_HAND else key
            yield Finding(
                REPLICAS,
                f"the replicas of {who} have drifted apart: {name_ranks(odd)} ended with another {which} than"
                f" {name_ranks(sorted(set(ranks) - set(odd)))}{when}; the optimizer steps at {self._steps_at[key]}",
                tuple(odd),
            )


def differ(sums: dict[int, list[list[Any]]], ranks: tuple[int, ...]) -> bool:
    """Whether all these ranks have told, and not the same."""
    return set(sums) == set(ranks) and any(sums[rank] != sums[ranks[0]] for rank in ranks)


def apart(sums: dict[int, list[list[Any]]]) -> tuple[list[int], list[str]]:
    """The ranks that are fewer, and the parameters in which the first of them differs from the others."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(sums):
        sides[repr(sums[rank])].append(rank)
    right = max(sides.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in sides.values() if ranks is not right for rank in ranks)
    pairs = zip(sums[odd[0]], sums[right[0]], strict=False)
    return odd, [str(name) for (name, mine), (_, theirs) in pairs if mine != theirs]
