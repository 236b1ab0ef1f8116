"""Who comes last to the collectives of a line, and how long the others wait there."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from workers.check.casebook import Call, Place

RECENT = 64  # calls that are kept for a hint


@dataclass
class Line:
    """All calls of one line of the script that met."""

    op: str
    place: Place
    calls: int = 0
    nbytes: int = 0
    size: int = 0  # of the group
    last: Counter[int] = field(default_factory=Counter)  # how often each rank came last
    waited_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # each for the last one, in all
    met: list[dict[int, Call]] = field(default_factory=list)  # those whose ends are still to come
    took_s: float = 0.0  # from the last one's call to its end


class Lateness:
    """Of all lines; a call counts for the line of its lowest rank."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, Place], Line] = {}
        self.recent: deque[Call] = deque(maxlen=RECENT)

    def take(self, met: dict[int, Call]) -> None:
        """A collective that all its ranks have begun."""
        first = met[min(met)]
        self.recent.append(first)
        line = self.lines.setdefault((first.kind.op, first.place), Line(first.kind.op, first.place))
        line.calls += 1
        line.nbytes += first.kind.nbytes
        line.size = len(met)
        last = max(met.values(), key=lambda call: call.began_s)
        line.last[last.rank] += 1
        for call in met.values():
            line.waited_s[call.rank] += last.began_s - call.began_s
        line.met.append(met)

    def settle(self) -> None:
        """Add the times of those that have ended meanwhile."""
        for line in self.lines.values():
            rest = []
            for met in line.met:
                ended = [call.ended_s for call in met.values()]
                if None in ended:
                    rest.append(met)
                else:
                    line.took_s += max(end for end in ended if end is not None) - max(
                        call.began_s for call in met.values()
                    )
            line.met = rest[-1000:]
