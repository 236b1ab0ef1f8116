"""The interface of faults that do not hang: the reports that a fault takes from each rank, and its findings.

watch/ reports with `say(KIND, ...)`, and the fault's method `take_KIND` receives it: they match by name, and the
method's parameter types are those required of the values. Values that must be equal on some ranks, or differ, are kept
in a table by name and ranks, and compared once all these ranks have reported.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from distlab.tools.check.judge.rank_state import Finding, RankState

What = TypeVar("What")
Turn = TypeVar("Turn")
Value = TypeVar("Value")
At = tuple[str, str, int]  # a line, its callers, and how often it was reached before


class Fault:
    """One kind of fault, on all ranks."""

    def findings(self) -> Iterator[Finding]:
        """Yield what is certain, once all scripts have ended."""
        yield from ()

    def questions(self) -> Iterator[str]:
        """Yield what may be a mistake: questions, which do not fail the run."""
        yield from ()


class Table(Generic[What, Turn, Value]):
    """The ranks' reports by name, ranks and turn."""

    def __init__(self) -> None:
        self._told: dict[tuple[What, tuple[int, ...]], dict[Turn, dict[int, Value]]] = {}
        self.lines: dict[tuple[What, tuple[int, ...]], str] = {}  # the line of the last report

    def put(
        self, case: RankState, what: What, ranks: Sequence[int], turn: Turn, value: Value, place: int | None = None
    ) -> None:  # fmt: skip
        """Store a value of the rank `case`; raises ValueError if `ranks` are invalid."""
        if case.rank not in ranks or not all(type(each) is int and 0 <= each < case.world_size for each in ranks):
            raise ValueError(f"the ranks {ranks} told by rank {case.rank} of {case.world_size}")
        whose = what, tuple(ranks)
        if place is not None:
            self.lines[whose] = case.place(place).line
        self._told.setdefault(whose, defaultdict(dict))[turn][case.rank] = value

    def whole(self, least: int = 2) -> Iterator[tuple[What, tuple[int, ...], dict[Turn, dict[int, Value]]]]:
        """Yield the turns that all ranks reported, if there are at least `least`."""
        for (what, ranks), turns in sorted(self._told.items(), key=lambda each: each[0]):
            found = {turn: seen for turn, seen in turns.items() if len(seen) == len(ranks)}
            if found and len(ranks) >= least:
                yield what, ranks, found


def world(case: RankState) -> range:
    return range(case.world_size)


def at(case: RankState, place: int, turn: int) -> At:
    """Return a key for repeated events: a line and its count there, since a rank may have more of them at other
    lines."""
    found = case.place(place)
    return found.line, found.callers, turn


def and_more(names: Sequence[Any]) -> str:
    """Return "bias and 2 more"."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else str(names[0])


def all_of(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group))
