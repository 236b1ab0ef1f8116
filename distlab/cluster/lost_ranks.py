"""Who is lost: a pure function of who hears whom, so that every rank that sees the same comes to the same sentence.

Lost is the rank that is heard by fewest, in a tie the higher; a rank hears itself, and silent ranks do not vote. Ranks
that nobody hears are all lost. Where a cluster falls apart, the smaller side is the one that is cut off, on both sides'
word; two halves name each other. Nobody goes on after a verdict, so it need not be right about whose fault it was: it
has to be the same on every survivor, and to name both ends of a broken link.
"""

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from distlab.cluster import name_ranks
from distlab.report.records import Lost

OOM_SHARE = 0.85  # a container that was killed for memory had at least this share in its last heartbeat


@dataclass(frozen=True)
class Verdict:
    """Why this rank ends, and whom the cluster has lost."""

    exit_code: int
    sentence: str
    lost: tuple[Lost, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lost": [msgspec.structs.asdict(lost) for lost in self.lost]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Verdict":
        return cls(values["exit_code"], values["sentence"], tuple(Lost(**lost) for lost in values["lost"]))


@dataclass(frozen=True)
class LastReport:
    """What a rank said of itself last."""

    step: int
    phase: str
    memory_share: float | None = None
    silent_s: float = 0.0
    killed: bool = False  # by the kernel, because memory ran out

    @property
    def place(self) -> str:
        return f"at step {self.step} in {self.phase}"


def lost_ranks(hears: Mapping[int, Set[int]], present: Set[int]) -> frozenset[int]:
    """The lost among `present`, from what each voter hears; empty where every rank votes and is heard by all."""
    voters = set(hears)
    heard_by = {rank: sum(rank in hears[voter] or rank == voter for voter in voters) for rank in present}
    if voters == present and min(heard_by.values(), default=0) == len(voters):
        return frozenset()
    if 2 * len(voters) < len(present):
        return frozenset(voters)
    silent = {rank for rank, count in heard_by.items() if count == 0}
    if silent:
        return frozenset(silent)
    fewest = min(heard_by.values())
    return frozenset({max(rank for rank, count in heard_by.items() if count == fewest)})


def diagnose(hears: Mapping[int, Set[int]], present: Set[int], seen: Mapping[int, LastReport]) -> Verdict | None:
    """The verdict on `lost_ranks`, or None; `seen` has the last words of every rank.

    A death that the kernel has told of is no matter of votes: one survivor of many is not the one that is cut off.
    """
    killed = frozenset(rank for rank in present if seen[rank].killed)
    lost = killed or lost_ranks(hears, present)
    if not lost:
        return None
    reasons = {rank: _reason(rank, lost, hears, present, seen) for rank in sorted(lost)}
    kind = "is partitioned from the cluster" if lost == set(hears) else "lost"
    sentence = "; ".join(f"rank {rank} {kind} {seen[rank].place}: {reason}" for rank, reason in reasons.items())
    return Verdict(3, sentence, tuple(Lost(rank, seen[rank].step, reason) for rank, reason in reasons.items()))


def _reason(
    rank: int, lost: frozenset[int], hears: Mapping[int, Set[int]], present: Set[int], seen: Mapping[int, LastReport]
) -> str:
    if seen[rank].killed:
        return "killed by the OOM killer: its container's limit is LAB_MEMORY"
    if lost == set(hears):  # this side is the smaller one
        others = present - lost
        return f"no heartbeat from {name_ranks(others)} for {max(seen[other].silent_s for other in others):.1f} s"
    if rank not in hears:
        reason = f"no heartbeat for {seen[rank].silent_s:.1f} s"
        share = seen[rank].memory_share
        if share is not None and share >= OOM_SHARE:
            reason += f", with memory at {share:.0%} of its limit in the last one: probably killed by the OOM killer"
        return reason
    deaf = {other for other in hears if rank not in hears[other] or other not in hears[rank]} - {rank}
    return (
        f"{name_ranks(deaf)} and rank {rank} lost heartbeats from each other, though both are alive: the link between"
        " them is broken"
    )
