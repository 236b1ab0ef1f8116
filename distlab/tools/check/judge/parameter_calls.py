"""Calls by hand on weights and gradients: whether ranks that meet in one give it the same parameter.

Tensors of one shape fit, whoever's they are, so nothing of torch sees it: where one rank leaves out a gradient that is
None, the next parameter's takes its place. Ranks that hold other parts of a model may mean it (tied embeddings of the
first and the last stage); so all of them must have both parameters, and the line must else give the same one.
"""

from collections import defaultdict
from collections.abc import Iterator

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import Fault
from distlab.tools.check.judge.rank_state import MATCH, Call, Finding, GroupKey, RankState, call_text, group_words

Line = tuple[GroupKey, str]  # a line of the script, and the group of its calls


class ParameterCalls(Fault):
    """The first calls of each line in which ranks differ."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = defaultdict(set)  # of all parameters, by rank
        self._alike: set[Line] = set()  # lines whose calls have given all ranks' same parameter
        self._apart: dict[Line, dict[int, Call]] = {}

    def take_parameters(self, case: RankState, names: list[str]) -> None:
        self._names[case.rank] |= {str(name) for name in names}

    def take(self, met: dict[int, Call]) -> None:
        """A collective that all its ranks have made."""
        names = {call.kind.parameter for call in met.values()}
        lines = {call.place.line for call in met.values()}
        if "" not in names and len(lines) == 1:
            line = met[min(met)].group, lines.pop()
            if len(names) == 1:
                self._alike.add(line)
            else:
                self._apart.setdefault(line, met)

    def findings(self) -> Iterator[Finding]:
        for line, met in self._known_to_all():
            if line in self._alike:
                rule = (
                    "their sum is of neither; give the call one parameter on all ranks (zeros for a gradient of None)"
                )
                yield Finding(MATCH, f"{self._differ(met)}: {rule}", tuple(sorted(met)))

    def questions(self) -> Iterator[str]:
        for line, met in self._known_to_all():
            if line not in self._alike:
                yield f"is it meant that ranks give a call other parameters ({self._differ(met)})?"

    def _known_to_all(self) -> Iterator[tuple[Line, dict[int, Call]]]:
        for line, met in self._apart.items():
            names = {call.kind.parameter for call in met.values()}
            if all(names <= self._names[rank] for rank in met):
                yield line, met

    def _differ(self, met: dict[int, Call]) -> str:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(met):
            ranks[met[rank].kind.parameter].append(rank)
        sides = ", ".join(f"{name} on {name_ranks(of)}" for name, of in ranks.items())
        call = met[min(met)]
        return f"{call_text(call)} of {group_words(call.group, len(self._names))} at {call.place.line}: {sides}"
