"""Faults of calls' handles and tensors: not waited for, overwritten in flight, of different parameters, in a layout
that gloo cannot read, or with an unused result."""

from collections import defaultdict
from collections.abc import Iterator

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import Fault, Table
from distlab.tools.check.judge.rank_state import (
    AT_REST,
    MATCH,
    WAITED,
    Call,
    CallPlace,
    Finding,
    GroupKey,
    RankState,
    call_text,
    group_text,
    ranks_by,
    ranks_do,
    typed,
)


class Handles(Fault):
    """Calls whose handles or tensors were misused, one finding per line; certain however a run ends."""

    def __init__(self) -> None:
        self._misused: dict[tuple[CallPlace, CallPlace | None], tuple[str, list[int]]] = {}  # by call and its wait

    def on_unwaited(self, state: RankState, number: int) -> None:
        self._add(state, number, None)

    def on_written(self, state: RankState, number: int, place: int) -> None:
        self._add(state, number, state.place(place))

    def _add(self, state: RankState, number: int, waited_at: CallPlace | None) -> None:
        if (call := state.known_call(number)) is not None:
            self._misused.setdefault((call.place, waited_at), (call_text(call), []))[1].append(state.rank)

    def findings(self) -> Iterator[Finding]:
        for (place, waited_at), (called, of_ranks) in self._misused.items():
            ranks = sorted(set(of_ranks))
            if waited_at is None:
                sentence = (
                    f"{ranks_do(ranks, 'never wait')} for {called} at {place}: its tensor may be read or freed before"
                    " the call has ended; keep the handle and call wait()"
                )
            else:
                sentence = (
                    f"{ranks_do(ranks, 'write')} into the tensor of {called} between its call at {place} and the wait"
                    f" at {waited_at}: the values sent or summed may be the old or the new ones"
                )
            yield Finding(WAITED if waited_at is None else AT_REST, sentence, tuple(ranks))


Line = tuple[GroupKey, str]  # a line of the script, and its calls' group


class ParameterCalls(Fault):
    """Manual calls on weights and gradients: the first ones per line where ranks pass different parameters.

    Tensors of one shape fit, so torch does not notice: if one rank skips a gradient that is None, the next parameter's
    takes its place. Ranks with different parts of a model may mean it (tied embeddings of the first and last stage), so
    all ranks must have both parameters, and other calls of the line must pass the same one.
    """

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = defaultdict(set)  # of all parameters, by rank
        self._equal: set[Line] = set()  # lines whose calls had the same parameter on all ranks
        self._different: dict[Line, dict[int, Call]] = {}

    def on_parameters(self, state: RankState, names: list[str]) -> None:
        self._names[state.rank] |= {str(name) for name in names}

    def compare(self, matched: dict[int, Call]) -> None:
        """Compare a collective that all its ranks have called."""
        names = {call.kind.parameter for call in matched.values()}
        lines = {call.place.line for call in matched.values()}
        if "" not in names and len(lines) == 1:
            line = matched[min(matched)].group, lines.pop()
            if len(names) == 1:
                self._equal.add(line)
            else:
                self._different.setdefault(line, matched)

    def findings(self) -> Iterator[Finding]:
        for line, matched in self._known_to_all():
            if line in self._equal:
                rule = (
                    "their sum mixes them; pass one parameter to the call on all ranks (zeros for a gradient of None)"
                )
                yield Finding(MATCH, f"{self._describe(matched)}: {rule}", tuple(sorted(matched)))

    def questions(self) -> Iterator[str]:
        for line, matched in self._known_to_all():
            if line not in self._equal:
                yield f"ranks pass different parameters to a call ({self._describe(matched)}); is that intended?"

    def _known_to_all(self) -> Iterator[tuple[Line, dict[int, Call]]]:
        for line, matched in self._different.items():
            names = {call.kind.parameter for call in matched.values()}
            if all(names <= self._names[rank] for rank in matched):
                yield line, matched

    def _describe(self, matched: dict[int, Call]) -> str:
        ranks = ranks_by({rank: call.kind.parameter for rank, call in matched.items()})
        sides = ", ".join(f"{name} on {name_ranks(of)}" for name, of in ranks.items())
        call = matched[min(matched)]
        return f"{call_text(call)} of {group_text(call.group, len(self._names))} at {call.place.line}: {sides}"


class Layouts(Fault):
    """Non-contiguous tensors in calls for which gloo ignores strides.

    A tensor with gaps is a fault on its own rank. One without, such as a transposed matrix, is correct if all ranks
    have the same strides, which is checked at the end.
    """

    def __init__(self) -> None:
        self._wrong: dict[tuple[str, CallPlace], tuple[str, list[int]]] = {}  # by operation and line
        self._permuted: dict[tuple[GroupKey, str, int], dict[int, tuple[Call, list[int], list[int]]]] = defaultdict(
            dict
        )

    def on_strided(self, state: RankState, number: int, shape: list[int], strides: list[int], wrong: bool) -> None:
        typed([*shape, *strides], [int] * len(shape + strides))
        if len(shape) != len(strides):
            raise ValueError(f"{len(strides)} strides of {len(shape)} dimensions")
        if (call := state.known_call(number)) is None:
            return
        if wrong:
            self._add(call, shape, strides)
        else:
            self._permuted[call.group, call.kind.op, call.seq][state.rank] = call, shape, strides

    def _add(self, call: Call, shape: list[int], strides: list[int]) -> None:
        text = f"{call_text(call)} a tensor of {tuple(shape)} with the strides {tuple(strides)}"
        self._wrong.setdefault((call.kind.op, call.place), (text, []))[1].append(call.rank)

    def findings(self) -> Iterator[Finding]:
        """Yield one finding per line."""
        for (group, _, _), seen in sorted(self._permuted.items(), key=lambda each: each[0][2]):
            if set(seen) != set(group.ranks) or len({str(layout(*each[1:])) for each in seen.values()}) > 1:
                for call, shape, strides in seen.values():
                    self._add(call, shape, strides)
        for (_, place), (text, of_ranks) in self._wrong.items():
            ranks = tuple(sorted(set(of_ranks)))
            sentence = (
                f"{ranks_do(ranks, 'give')} {text} at {place}: it is not contiguous, and gloo ignores strides, so it"
                " reads and writes the wrong elements; pass tensor.contiguous() and copy the result back"
            )
            yield Finding(MATCH, sentence, ranks)


def layout(shape: list[int], strides: list[int]) -> list[int]:
    """Return the strides of dimensions with more than one element; other strides have no meaning."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


class UnusedResults(Fault):
    """Results in temporaries, which cannot be read; a question per line, as a script may only want to wait."""

    def __init__(self) -> None:
        self._unused: Table[str, int, bool] = Table()

    def on_unread(self, state: RankState, op: str, group: int, place: int) -> None:  # noqa: ARG002
        self._unused.put(state, state.place(place).line, state.group(group).ranks, 0, value=True)

    def questions(self) -> Iterator[str]:
        for line, _, _ in self._unused.complete():
            yield (
                f"the result of the all_reduce at {line} is not used; is that intended? Its tensor is a temporary,"
                " freed when the call returns: give it a name before the call, and read it after the call"
            )
