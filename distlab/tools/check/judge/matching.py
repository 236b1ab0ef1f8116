"""Matches the n-th calls of a group on all its ranks, during training, and reports the first mismatch.

gloo does not check: with different operations, shapes, dtypes or roots it hangs, aborts or returns wrong sums without
an error. Collectives are numbered per group, messages per pair of ends and tag. Only the first mismatch of a group is
reported, since all later calls are shifted by it.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.call_tensors import ParameterCalls
from distlab.tools.check.judge.divergence import Divergence, called_from, explain_divergence
from distlab.tools.check.judge.framework_remedies import call_remedy
from distlab.tools.check.judge.rank_state import (
    MADE,
    MATCH,
    Call,
    CallPlace,
    Finding,
    GroupKey,
    Kind,
    RankState,
    call_text,
    group_text,
    ranks_by,
    ranks_do,
)
from distlab.tools.check.judge.source_lines import branch_of, source_line

# Statistics of late ranks: which rank comes last to a line's collectives, and how long the others wait.

RECENT = 64  # calls that are kept for a hint


@dataclass
class Line:
    """All matched calls of one line of the script."""

    op: str
    place: CallPlace
    calls: int = 0
    nbytes: int = 0
    size: int = 0  # of the group
    last: Counter[int] = field(default_factory=Counter)  # how often each rank came last
    waited_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by rank, in total for the last one
    unfinished: list[dict[int, Call]] = field(default_factory=list)  # calls that have not ended yet
    took_s: float = 0.0  # from the last rank's call to its end


class Lateness:
    """Statistics of all lines; a call counts for the line of its lowest rank."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, CallPlace], Line] = {}
        self.recent: deque[Call] = deque(maxlen=RECENT)

    def add(self, matched: dict[int, Call]) -> None:
        """Record a collective that all its ranks have begun."""
        first = matched[min(matched)]
        self.recent.append(first)
        line = self.lines.setdefault((first.kind.op, first.place), Line(first.kind.op, first.place))
        line.calls += 1
        line.nbytes += first.kind.nbytes
        line.size = len(matched)
        last = max(matched.values(), key=lambda call: call.began_s)
        line.last[last.rank] += 1
        for call in matched.values():
            line.waited_s[call.rank] += last.began_s - call.began_s
        line.unfinished.append(matched)

    def add_durations(self) -> None:
        """Add the times of calls that have ended meanwhile."""
        for line in self.lines.values():
            rest = []
            for matched in line.unfinished:
                ended = [call.ended_s for call in matched.values() if call.ended_s is not None]
                if len(ended) < len(matched):
                    rest.append(matched)
                else:
                    line.took_s += max(ended) - max(call.began_s for call in matched.values())
            line.unfinished = rest[-1000:]


SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "barrier")  # usually called from one line

Messages = dict[str, dict[int, Call]]  # by "send" and "recv", by number


class Matching:
    """All calls that are not matched on all their ranks yet."""

    def __init__(self, world_size: int, parameter_calls: ParameterCalls | None = None) -> None:
        self.world_size = world_size
        self._parameter_calls = parameter_calls or ParameterCalls()
        self.lateness = Lateness()
        self._pending: dict[tuple[GroupKey, int], dict[int, Call]] = {}
        self._mismatched: dict[GroupKey, dict[int, Call]] = {}
        self._mismatched_messages: list[tuple[Call, Call]] = []
        self._diverged: dict[GroupKey, dict[int, Call]] = {}  # the first matched call with several lines
        self._messages: dict[tuple[int, int, GroupKey, int], Messages] = {}
        self._from_any: set[tuple[int, GroupKey, int]] = set()
        self._last_of: dict[tuple[GroupKey, int], dict[bool, Call]] = defaultdict(dict)  # inside and outside of threads

    def add(self, call: Call) -> bool:
        """Compare a call with the others'; return whether they mismatch."""
        if call.kind.op in ("send", "recv"):
            return self._add_message(call)
        matched = self._pending.setdefault((call.group, call.seq), {})
        matched[call.rank] = call
        self._last_of[call.group, call.rank][call.place.in_thread] = call
        if self._mismatched and call.group in self._mismatched:
            return False
        complete = len(matched) == len(call.group.ranks)
        equal_so_far = call.kind == next(iter(matched.values())).kind and call.kind.op != "all_to_all"
        if len(matched) > 1 and not equal_so_far and difference_of(matched, complete=complete):
            self._mismatched[call.group] = matched
            return True
        if complete:
            by_library = all(each.place.below for each in matched.values())
            if len({each.place for each in matched.values()}) > 1 and (call.kind.op in SYMMETRIC or by_library):
                self._diverged.setdefault(call.group, matched)
            self.lateness.add(matched)
            self._parameter_calls.compare(matched)
            del self._pending[call.group, call.seq]
        return False

    def _add_message(self, call: Call) -> bool:
        if call.kind.peer < 0:  # from any rank: the sender is not known yet
            self._from_any.add((call.rank, call.group, call.kind.tag))
            return False
        here = self._messages.setdefault(message_key(call), {"send": {}, "recv": {}})
        here[call.kind.op][call.seq] = call
        sent, received = (here[op].get(call.seq) for op in ("send", "recv"))
        if sent is None or received is None or self._may_match_any(call):
            return False
        del here["send"][call.seq], here["recv"][call.seq]
        elements = [sum(map(math.prod, each.kind.dims)) for each in (sent, received)]
        if elements[0] != elements[1] or sent.kind.dtypes != received.kind.dtypes:
            self._mismatched_messages.append((sent, received))
            return True
        return False

    def mismatches(self, states: Sequence[RankState]) -> Iterator[Finding]:
        for matched in self._mismatched.values():
            complete = len(matched) == len(next(iter(matched.values())).group.ranks)
            yield self._mismatch(matched, difference_of(matched, complete=complete), states)
        for sent, received in self._mismatched_messages:
            sentence = (
                f"message #{sent.seq} from rank {sent.rank} to rank {received.rank}: rank {sent.rank} sends"
                f" {content(sent.kind)} at {sent.place}, and rank {received.rank} receives {content(received.kind)} at"
                f" {received.place}"
            )
            yield Finding(MATCH, sentence, (sent.rank, received.rank), call_rows([sent, received]), ends=True)

    def absent(self, call: Call) -> set[int]:
        """Return the ranks that have not made this call yet."""
        if call.kind.op in ("send", "recv"):
            if call.kind.peer < 0:
                return set(call.group.ranks) - {call.rank}
            here = self._messages[message_key(call)][call.kind.op]
            return {call.kind.peer} if call.seq in here and not self._may_match_any(call) else set()
        matched = self._pending.get((call.group, call.seq))
        return set() if matched is None else set(call.group.ranks) - set(matched)

    def is_mismatched(self, call: Call) -> bool:
        """Return whether a running call mismatches, or follows a mismatch."""
        matched = self._mismatched.get(call.group)
        return matched is not None and call.ended_s is None and call.seq >= next(iter(matched.values())).seq

    def _may_match_any(self, call: Call) -> bool:
        """Return whether a receive from any rank may have received it, so that numbers do not count."""
        _, receiver, group, tag = message_key(call)
        return (receiver, group, tag) in self._from_any

    def last_call(self, group: GroupKey, rank: int) -> Call | None:
        """Return the last recorded call of a rank in a group."""
        return max(self._last_of.get((group, rank), {}).values(), key=lambda call: call.seq, default=None)

    def unmatched(self) -> Iterator[Finding]:
        """Yield for ended scripts each group's first call, and the messages, that some ranks lack."""
        seen: set[GroupKey] = set()
        for (group, _), matched in sorted(self._pending.items(), key=lambda item: (item[0][0], item[0][1])):
            if group in seen or group in self._mismatched:
                continue
            seen.add(group)
            call = next(iter(matched.values()))
            missing = sorted(set(group.ranks) - set(matched))
            called = f"{call_text(call)} of {group_text(group, self.world_size)}"
            there = f"{name_ranks(matched)} made it at {places(matched.values())}"
            without = f"{name_ranks(missing)} ended without it{self._last_call_text(group, missing)}"
            yield Finding(MATCH, f"{called}: {there}, and {without}", tuple(missing), call_rows(matched.values()))
        for here in self._messages.values():
            for call in [*here["send"].values(), *here["recv"].values()][:1]:
                two, meets = (call.rank, call.kind.peer), "recv" if call.kind.op == "send" else "send"
                sentence = f"rank {two[0]} made {call_text(call)} at {call.place}, and rank {two[1]} made no {meets}"
                if not self._may_match_any(call):
                    yield Finding(MATCH, sentence, two, call_rows([call]))

    def _last_call_text(self, group: GroupKey, ranks: Iterable[int]) -> str:
        found = [last for rank in ranks if (last := self.last_call(group, rank)) is not None]
        return f" (its last call there was {call_text(found[0])} at {found[0].place})" if len(found) == 1 else ""

    def line_divergence(self, group: GroupKey) -> str:
        """Return where a group's ranks, after matching calls, first called from different lines."""
        matched = self._diverged.get(group)
        if matched is None:
            return ""
        by_place = ranks_by({rank: str(call.place) for rank, call in matched.items()})
        sides = ", ".join(f"{name_ranks(ranks)} at {place}" for place, ranks in by_place.items())
        return f"; their lines first differ at {call_text(matched[min(matched)])}: {sides}"

    def shared_by_threads(self, group: GroupKey) -> Divergence:
        """Return the remark that two threads of a rank use one group, whose calls have no fixed order."""
        for rank in group.ranks:
            if len(found := self._last_of.get((group, rank), {})) > 1:
                one, other = found[False].place, found[True].place
                return Divergence(
                    f"; on rank {rank} the main thread ({one}) and another ({other}) share one"
                    f" process group ({group_text(group, self.world_size)}), and the order of their calls is not fixed",
                    "give the thread a group of its own: group = torch.distributed.new_group(backend='gloo')"
                    + (f", and {other.named_call}(..., process_group=group)" if other.named_call else ""),
                )
        return Divergence()

    def _mismatch(self, matched: dict[int, Call], fault: str, states: Sequence[RankState]) -> Finding:
        """Return a finding; the minority is called wrong, in a tie those unlike the lowest rank."""
        call = matched[min(matched)]
        sides: dict[Kind, list[Call]] = {}
        for rank in sorted(matched):
            sides.setdefault(compared_fields(matched[rank].kind, fault), []).append(matched[rank])
        count = Counter({kind: len(calls) for kind, calls in sides.items()})
        right = max(sides, key=lambda kind: (count[kind], -sides[kind][0].rank))
        others = [calls for kind, calls in sides.items() if kind != right]
        wrong = "; ".join(self._side(calls, fault) for calls in others)
        two = sides[right][0], others[0][0]
        cause = self.shared_by_threads(call.group)
        if not cause.remedy and two[0].place != two[1].place:  # two calls, whatever their difference
            cause = explain_divergence(states, two[0].rank, two[1].rank, matched)
            some = made_by_some(*two) if fault in ("operation", "shape", "type") else Divergence()
            cause = Divergence(cause.text if two[0].place.framework else "", some.remedy) if some.remedy else cause
        op = sides[right][0].kind.op if call.group.instance >= 0 else sides[right][0].kind.op.replace("_", " ")
        sentence = (
            f"{op} #{call.seq} of {group_text(call.group, self.world_size)}: {wrong}, but"
            f" {self._side(sides[right], fault)}: {'dtype' if fault == 'type' else fault} mismatch"
            f"{self._hint(others[0], sides[right])}{self.line_divergence(call.group)}{called_from(matched.values())}"
            f"{cause.text}; {cause.remedy or remedy(list(sides.values()), fault)}"
        )
        culprits = tuple(sorted(each.rank for calls in others for each in calls))
        return Finding(MATCH, sentence, culprits, call_rows(matched.values()), ends=call.group.instance >= MADE)

    @staticmethod
    def _side(calls: list[Call], fault: str) -> str:
        who = ranks_do((call.rank for call in calls), "call")
        called = calls[0].place.object_call or detailed(calls[0].kind, fault)
        return f"{who} {called} at {places(calls)}"

    def _hint(self, outliers: list[Call], others: list[Call]) -> str:
        """Return a hint if the outlier seems to have repeated a call; there is none if the sides are equal."""
        wrong, right = outliers[0], others[0]
        if len(outliers) >= len(others) or wrong.group.instance < 0 or wrong.kind.op == right.kind.op:
            return ""
        previous = right.group, right.seq - 1, wrong.kind, wrong.place
        if any((each.group, each.seq, each.kind, each.place) == previous for each in self.lateness.recent):
            return f"; rank {wrong.rank} repeated the previous call"
        return ""


BUFFERS = "torch/nn/parallel/distributed.py"  # DDP, which broadcasts buffers before a forward pass

# Remedies for mismatched calls, by their difference.
REMEDIES = {
    "list of ranks": "pass the same list to new_group on all ranks, also on those outside of it",
    "reduce operation": "use the same reduce operation on all ranks",
    "root": "pass the same root on all ranks",
    "type": "use tensors of one dtype on all ranks",
    "split": "make what each rank receives from another as large as what that rank sends it",
    "shape": "use tensors of one shape on all ranks",
}


def remedy(sides: Sequence[list[Call]], fault: str) -> str:
    """Return the remedy: for two operations, about the one that the script itself calls on fewer ranks."""
    if fault != "operation":
        return REMEDIES[fault]
    first = min(sides, key=lambda calls: (bool(calls[0].place.below), len(calls)))[0]
    return all_or_none(first)


def made_by_some(one: Call, other: Call | None) -> Divergence:
    """Return the remedy if one of two calls is in a branch that not all ranks take."""
    calls = [each for each in (one, other) if each is not None and each.kind.op not in ("send", "recv")]
    found = [each for each in calls if branch_of(each.place)]
    return Divergence("", all_or_none(found[0])) if len(found) == 1 else Divergence()


def all_or_none(call: Call) -> str:
    """Return the remedy for a call that only some ranks make."""
    branch = branch_of(call.place)
    under = f"; it {branch}" if branch else ""
    line, below = call.place.line or call.place, call.place.below
    named = call.place.typed if branch or not call.place.called_by else ""
    if named := named or call.place.named_call:
        if call.kind.op in ("send", "recv"):  # each rank has its part
            under = f" (called at {call.place.callers})" if call.place.callers else ""
        words = call_remedy(named)
        return f"let all ranks call {named} at {line}, or none{under}{words and f': {words}'}"
    if BUFFERS in below and call.kind.op == "broadcast":
        return (
            f"DDP sends rank 0's buffers to all ranks in each forward pass: let all ranks make that at {line}, or call"
            f" model.module on one rank{under}"
        )
    return f"let all ranks make the {call.place.object_call or call.kind.op} at {line}, or none{under}"


def difference_of(matched: dict[int, Call], *, complete: bool) -> str:
    """Return the first difference between matched calls; empty if they agree."""
    kinds = [matched[rank].kind for rank in sorted(matched)]
    first = kinds[0]
    if any(kind.op != first.op for kind in kinds):
        return "operation"
    if first.op == "new_group":
        return "list of ranks" if any(kind.dims != first.dims for kind in kinds) else ""
    if any(kind.reduce and first.reduce and kind.reduce != first.reduce for kind in kinds):
        return "reduce operation"
    if any(kind.root != first.root for kind in kinds):
        return "root"
    if any(kind.dtypes != first.dtypes for kind in kinds):
        return "type"
    if first.op == "all_to_all":
        return "split" if complete and all(kind.splits for kind in kinds) and not splits_fit(matched) else ""
    if first.op not in ("barrier", "monitored_barrier") and any(kind.dims != first.dims for kind in kinds):
        return "shape"
    return ""


def splits_fit(matched: dict[int, Call]) -> bool:
    """Return whether in an all_to_all each rank's receive sizes equal the others' send sizes."""
    ranks = next(iter(matched.values())).group.ranks
    return all(
        matched[sender].kind.splits[0][ranks.index(receiver)] == matched[receiver].kind.splits[1][ranks.index(sender)]
        for sender in ranks
        for receiver in ranks
    )


def compared_fields(kind: Kind, fault: str) -> Kind:
    """Return the kind with only the fields that matter for this fault."""
    if fault == "split":
        return kind
    of = {"operation": "op", "reduce operation": "reduce", "root": "root", "type": "dtypes"}.get(fault, "dims")
    return Kind("")._replace(**{of: getattr(kind, of)})


def detailed(kind: Kind, fault: str) -> str:
    """Return the call with the differing field, and other distinguishing ones."""
    if kind.op == "new_group":
        return f"new_group({list(kind.dims[0])})"
    parts = [kind.op]
    if kind.dims and kind.op not in ("barrier", "monitored_barrier"):
        parts.append(f"of {content(kind)}" + (f" ({kind.parameter})" if kind.parameter else ""))
    if kind.reduce and fault in ("operation", "reduce operation"):
        parts.append(f"by {kind.reduce}")
    if kind.root >= 0:
        parts.append(f"from rank {kind.root}" if kind.op in ("broadcast", "scatter") else f"to rank {kind.root}")
    if fault == "split":
        parts.append(f"sending {list(kind.splits[0])} and receiving {list(kind.splits[1])}")
    return " ".join(parts)


def content(kind: Kind) -> str:
    shown = ", ".join(str(each) for each in kind.dims[:3]) + (", ..." if len(kind.dims) > 3 else "")
    return f"{shown} {', '.join(kind.dtypes)}"


def places(calls: Iterable[Call]) -> str:
    return " and ".join(dict.fromkeys(str(call.place) for call in calls))


def call_rows(calls: Iterable[Call]) -> list[list[str]]:
    return [
        [
            f"rank {call.rank}",
            str(call.place),
            f"{call_text(call)}: {detailed(call.kind, '')}",
            "",
            source_line(call.place),
        ]
        for call in sorted(calls, key=lambda call: call.rank)
    ]


def message_key(call: Call) -> tuple[int, int, GroupKey, int]:
    """Return a message's sender, receiver, group and tag."""
    two = (call.rank, call.kind.peer) if call.kind.op == "send" else (call.kind.peer, call.rank)
    return *two, call.group, call.kind.tag


def new_calls(states: Iterable[RankState]) -> Iterator[Call]:
    """Yield all calls since the last time, by start time."""
    found = [call for state in states for call in state.calls]
    for state in states:
        state.calls = []
    return iter(sorted(found, key=lambda call: call.began_s))
