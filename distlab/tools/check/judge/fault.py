"""The one shape of a fault that hangs nobody: the facts that it takes of each rank, and what it finds or asks of them.

watch/ tells a fact by `say(KIND, ...)`, and the method `take_KIND` of a fault takes it: by that name the two are one,
and the types of its parameters are those that a told value has to have. What ranks should have alike, or each for
itself, is a table by what it is and whose it is; it is looked at where all these ranks have told.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from distlab.tools.check.judge.rank_state import Finding, RankState

What = TypeVar("What")
Turn = TypeVar("Turn")
Value = TypeVar("Value")
At = tuple[str, str, int]  # a line, the lines that called it, and how often it was reached before


class Fault:
    """Of one kind, on all ranks."""

    def findings(self) -> Iterator[Finding]:
        """What is certain, once all scripts have ended."""
        yield from ()

    def questions(self) -> Iterator[str]:
        """What only looks wrong: asked, and it decides nothing."""
        yield from ()


class Table(Generic[What, Turn, Value]):
    """What ranks have told, by what it is and whose it is, turn by turn."""

    def __init__(self) -> None:
        self._told: dict[tuple[What, tuple[int, ...]], dict[Turn, dict[int, Value]]] = {}
        self.lines: dict[tuple[What, tuple[int, ...]], str] = {}  # where it was told last

    def put(
        self, case: RankState, what: What, ranks: Sequence[int], turn: Turn, value: Value, place: int | None = None
    ) -> None:  # fmt: skip
        """Of the rank `case`; raises ValueError where it is none of the ranks."""
        if case.rank not in ranks or not all(type(each) is int and 0 <= each < case.world_size for each in ranks):
            raise ValueError(f"the ranks {ranks} told by rank {case.rank} of {case.world_size}")
        whose = what, tuple(ranks)
        if place is not None:
            self.lines[whose] = case.place(place).line
        self._told.setdefault(whose, defaultdict(dict))[turn][case.rank] = value

    def whole(self, least: int = 2) -> Iterator[tuple[What, tuple[int, ...], dict[Turn, dict[int, Value]]]]:
        """The turns that all ranks told, of those that are at least so many."""
        for (what, ranks), turns in sorted(self._told.items(), key=lambda each: each[0]):
            found = {turn: seen for turn, seen in turns.items() if len(seen) == len(ranks)}
            if found and len(ranks) >= least:
                yield what, ranks, found


def world(case: RankState) -> range:
    return range(case.world_size)


def at(case: RankState, place: int, turn: int) -> At:
    """What comes again and again is known by its line and its number there: a rank may do more of it alone at other
    lines."""
    found = case.place(place)
    return found.line, found.callers, turn


def and_more(names: Sequence[Any]) -> str:
    """ "bias and 2 more"."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else str(names[0])


def all_of(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group))
