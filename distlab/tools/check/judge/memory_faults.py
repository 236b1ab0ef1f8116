"""What rank 0 says of the tensors of calls: of layouts that gloo does not know, and of writes between call and wait."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.rank_state import (
    AT_REST,
    MATCH,
    Call,
    CallPlace,
    Finding,
    GroupKey,
    RankState,
    call_text,
    ranks_do,
)

# Tensors that are not contiguous, in the calls for which gloo takes the bytes as they lie.
#
# A rank knows by itself of a tensor with gaps. One without, such as a transposed matrix, is right where all ranks have
# the same strides, so it is looked for at the end whether all told the same.

Turn = tuple[GroupKey, str, int]  # the n-th call of this kind of a group


class Layouts:
    """The calls that were given such tensors."""

    def __init__(self) -> None:
        self._wrong: dict[tuple[str, CallPlace], tuple[str, list[int]]] = {}  # by operation and line
        self._permuted: dict[Turn, dict[int, tuple[Call, list[int], list[int]]]] = defaultdict(dict)

    def take(self, case: Any, call: Call, shape: list[int], strides: list[int], wrong: bool) -> None:
        if wrong:
            self._add(call, shape, strides)
        else:
            self._permuted[call.group, call.kind.op, call.turn][case.rank] = call, shape, strides

    def _add(self, call: Call, shape: list[int], strides: list[int]) -> None:
        text = f"{call_text(call)} a tensor of {tuple(shape)} with the strides {tuple(strides)}"
        self._wrong.setdefault((call.kind.op, call.place), (text, []))[1].append(call.rank)

    def apart(self) -> Iterator[Finding]:
        """Each line once."""
        for (group, _, _), seen in sorted(self._permuted.items(), key=lambda each: each[0][2]):
            if set(seen) != set(group.ranks) or len({str(layout(*each[1:])) for each in seen.values()}) > 1:
                for call, shape, strides in seen.values():
                    self._add(call, shape, strides)
        for (_, place), (text, of_ranks) in self._wrong.items():
            ranks = tuple(sorted(set(of_ranks)))
            sentence = (
                f"{ranks_do(ranks, 'give')} {text} at {place}: it is not contiguous, and gloo ignores strides, so it"
                " reads and writes other elements than these; call it with tensor.contiguous() and copy the result"
                " back"
            )
            yield Finding(MATCH, sentence, ranks)


def layout(shape: list[int], strides: list[int]) -> list[int]:
    """The strides of dimensions with more than one element: those of the others mean nothing."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


# What an all_reduce gave beside what went into it.
#
# The sums of a tensor's elements over all ranks before the call are, but for rounding, its sum after it: for n ranks
# each element is off by n roundings of the absolute values at most. Who differs from that was written meanwhile.

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Summed(NamedTuple):
    """Of one rank: the sum of its elements before, that of their absolute values, the sum after the wait."""

    call: Call
    before: float
    size: float
    after: float
    waited_at: CallPlace


class Contents:
    """The sums of all ranks."""

    def __init__(self) -> None:
        self._seen: dict[Turn, dict[int, Summed]] = defaultdict(dict)

    def take(self, case: Any, call: Call, before: float, size: float, after: float, waited_at: CallPlace) -> None:
        self._seen[call.group, call.kind.op, call.turn][case.rank] = Summed(call, before, size, after, waited_at)

    def written(self) -> Iterator[Finding]:
        """Each line once."""
        told: set[CallPlace] = set()
        for (group, _, _), seen in self._seen.items():
            call = next(iter(seen.values())).call
            if set(seen) != set(group.ranks) or call.kind.dtypes[0] not in EPSILON or call.place in told:
                continue
            total, size = sum(each.before for each in seen.values()), sum(each.size for each in seen.values())
            allowed = 2 * len(seen) * EPSILON[call.kind.dtypes[0]] * size
            odd = tuple(rank for rank in sorted(seen) if abs(seen[rank].after - total) > allowed)
            if odd:
                told.add(call.place)
                who = name_ranks(odd) if len({each.after for each in seen.values()}) > 1 else "a rank"
                sentence = (
                    f"{who} wrote into the tensor of {call_text(call)} between its call at {call.place} and the wait at"
                    f" {seen[odd[0]].waited_at}, through another alias of its memory: its elements add up to"
                    f" {seen[odd[0]].after:g} then, and what went in to {total:g}; write after wait()"
                )
                yield Finding(AT_REST, sentence, odd)


# What a call gives and nobody can use: asked, as a script may want the wait alone, or the values without a gradient.


class Lost:
    """Results in temporaries, and gathered tensors without a gradient, by line."""

    def __init__(self) -> None:
        self._unread: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        self._cut: dict[str, None] = {}

    def take_unread(self, case: RankState, op: str, group: int, place: int) -> None:  # noqa: ARG002
        self._unread[case.place(place).line, case.group(group).ranks].add(case.rank)

    def take_cut(self, case: RankState, op: str, group: int, place: int) -> None:  # noqa: ARG002
        if len(case.group(group).ranks) > 1:
            self._cut[case.place(place).line] = None

    def questions(self) -> Iterator[str]:
        for (line, ranks), told in self._unread.items():
            if len(ranks) > 1 and told == set(ranks):
                yield (
                    f"is it meant that nobody reads the result of the all_reduce at {line}? Its tensor is a temporary,"
                    " gone as the call returns: give it a name before, and read it after"
                )
        for line in self._cut:
            yield (
                f"is it meant that no gradient comes back through the all_gather at {line}? The loss is made of what it"
                " copied: put this rank's own tensor into its place in the list, or call"
                " torch.distributed.nn.functional.all_gather"
            )
