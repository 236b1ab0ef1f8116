"""The interface of faults that do not hang: the reports that a fault receives from each rank, and its findings.

watch/ sends a report of some KIND, and the fault's method `on_KIND` receives it: they match by name, and the values
must have the types of the method's parameters. Values that must be equal on some ranks, or differ, are kept
in a table by name and ranks, and compared once all these ranks have reported.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from distlab.tools.check.judge.rank_state import Finding, RankState

Name = TypeVar("Name")
Key = TypeVar("Key")
Value = TypeVar("Value")
Occurrence = tuple[str, str, int]  # a line, its callers, and how often it was reached before


class Fault:
    """One kind of fault, on all ranks."""

    def findings(self) -> Iterator[Finding]:
        """Yield what is certain, once all scripts have ended."""
        yield from ()

    def questions(self) -> Iterator[str]:
        """Yield what may be a mistake: questions, which do not fail the run."""
        yield from ()


class Table(Generic[Name, Key, Value]):
    """The ranks' values by name, ranks and key, such as a step."""

    def __init__(self) -> None:
        self._values: dict[tuple[Name, tuple[int, ...]], dict[Key, dict[int, Value]]] = {}
        self.lines: dict[tuple[Name, tuple[int, ...]], str] = {}  # the line of the last report

    def put(
        self, state: RankState, name: Name, ranks: Sequence[int], key: Key, value: Value, place: int | None = None
    ) -> None:  # fmt: skip
        """Store a value of one rank; raises ValueError if `ranks` are invalid."""
        if state.rank not in ranks or not all(type(each) is int and 0 <= each < state.world_size for each in ranks):
            raise ValueError(f"the ranks {ranks} reported by rank {state.rank} of {state.world_size}")
        about = name, tuple(ranks)
        if place is not None:
            self.lines[about] = state.place(place).line
        self._values.setdefault(about, defaultdict(dict))[key][state.rank] = value

    def complete(self) -> Iterator[tuple[Name, tuple[int, ...], dict[Key, dict[int, Value]]]]:
        """Yield the values that all ranks reported, if there are at least two ranks."""
        for (name, ranks), reports in sorted(self._values.items(), key=lambda each: each[0]):
            complete = {key: seen for key, seen in reports.items() if len(seen) == len(ranks)}
            if complete and len(ranks) > 1:
                yield name, ranks, complete


def every_rank(state: RankState) -> range:
    return range(state.world_size)


def occurrence(state: RankState, place: int, count: int) -> Occurrence:
    """Return a key for repeated events: a line and its count there, since a rank may have more of them at other
    lines."""
    found = state.place(place)
    return found.line, found.callers, count


def and_more(names: Sequence[Any]) -> str:
    """Return "bias and 2 more"."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else str(names[0])


def ranks_of(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group))
