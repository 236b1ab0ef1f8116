"""Rank 0's server: ranks join, send heartbeats, use the store and leave, each through one connection, plus the store's.

It runs on a thread of rank 0, on MASTER_PORT; under torchrun, whose agent has that port, on one that rank 0 publishes.
It decides which processes it admits (admission.py), which ranks are lost (failure_detector.py), and when a finished
run's verdict is final: after all others have acknowledged it, rank 0 writes it, and then informs all. It sends its
decisions to all ranks in the same words, including rank 0.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.admission import Admission, differences
from distlab.lab.cluster.failure_detector import FailureDetector, verdict_on
from distlab.lab.cluster.messages import (
    PURPOSE,
    AboutViews,
    Acknowledge,
    Committed,
    Ending,
    FromRank,
    Heartbeat,
    Join,
    Killed,
    Leave,
    MayLeave,
    Member,
    Places,
    RanksLost,
    Refused,
    Returned,
    RunEnded,
    Sealed,
    Verdict,
    Waiting,
)
from distlab.lab.cluster.views import Views
from distlab.lab.report.records import Lost
from distlab.techniques.transport.handshake import NOBODY
from distlab.techniques.transport.store_server import Message, Peer, StoreServer, framed

PERIOD_S = 0.25  # between two heartbeats, in both directions
FROZEN_S = 1.0  # between two polls, of which there are ten per second: then this process did not run
STALLED_S = 0.5  # the same for its thread: with up to PERIOD_S since its last message, below the least LAB_LOST_AFTER_S
REPEAT_S = PERIOD_S  # to a waiting process, as a heartbeat


class Strangers:
    """Connections without the run's key or with an invalid message: counted, and reported once per fault."""

    MAX_SOURCES = 16  # sources that are counted separately
    OTHER_KEY = "with another key"

    def __init__(self, say: Callable[[str], None]) -> None:
        self.by_fault: Counter[str] = Counter()
        self.by_source: Counter[str] = Counter()
        self.last_source: dict[str, str] = {}
        self._say = say

    def on_rejected(self, fault: str, source: tuple[str, int]) -> None:
        """Count a connection from `source`, an address and a port, and report it if its fault is new."""
        self.by_fault[fault] += 1
        self.last_source[fault] = source[0]
        known = source[0] in self.by_source or len(self.by_source) < self.MAX_SOURCES
        self.by_source[source[0] if known else "others"] += 1
        if self.by_fault[fault] == 1:
            advice = ": is LAB_KEY the same on all ranks?" if fault == self.OTHER_KEY else ""
            self._say(f"dropped    a connection {fault}, from {source[0]} port {source[1]}{advice}; others are counted")

    @property
    def total(self) -> int:
        return self.by_fault.total()

    def wrong_key_note(self) -> str:
        """Return how many processes had another key, if any: missing ranks may be among them."""
        count = self.by_fault[self.OTHER_KEY]
        if not count:
            return ""
        return (
            f"; {count} connections had another key, the last one from {self.last_source[self.OTHER_KEY]}:"
            " set the same LAB_KEY on all ranks"
        )


class RankServer(StoreServer):
    """The server of one run, in the process of rank `host` at address `ip`. `deadline` limits the joining, and `name`
    claims a run's name if it has none.

    With `living`, the life of each living rank, it takes over a run that continues, of these `members`.
    """

    def __init__(
        self, listening: socket.socket, key: bytes, host: int, ip: str, admission: Admission, token: str,
        deadline: float, time_limit: str, strangers: Strangers,
        name: Callable[[], str] = lambda: "run", members: Mapping[int, Member] | None = None,
        living: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.host, self.ip, self.token, self.strangers = host, ip, token, strangers
        self.admission, self._deadline, self._time_limit, self._name = admission, deadline, time_limit, name
        self.ranks: dict[int, Peer] = {}  # the connection of each admitted rank
        self.members = dict(members or {})
        self.run_end: RunEnded | None = None
        self.has_verdict = False  # the host has the verdict, and waits for all others to acknowledge it
        self.is_final = False  # they have: losses do not change it any more
        self.cut_off = False  # by fault injection: it communicates with its own rank only
        self._detector = FailureDetector(host, (), admission.lost_after_s, 0.0)
        self._acknowledged: set[int] = set()
        self._may_leave = living is not None
        self.views = Views(self._send_to)
        if living is not None:  # it takes over a run that continues
            now = admission.sealed_at = time.monotonic()
            self._detector = FailureDetector(host, living, admission.lost_after_s, now)
            self.views.lives = dict(living)
        self._last_replies: dict[Peer, tuple[str, float]] = {}
        self.polled_at, self._beat_at, self._frozen_until = time.monotonic(), 0.0, 0.0
        super().__init__(listening, key, strangers.on_rejected, PURPOSE, FromRank)

    # Queries from other threads of this process.

    def unacknowledged(self) -> list[int]:
        """Return the ranks that have not acknowledged the verdict."""
        return sorted(set(self._detector.ranks) - self._acknowledged - {self.host})

    def staying(self) -> list[int]:
        """Return the other ranks that have not left and are not lost."""
        states = list(self._detector.ranks.items())
        return [rank for rank, each in states if not (each.left or each.ended_at) and rank != self.host]

    def is_stalled(self, now: float) -> bool:
        """Return whether its thread got no core for a while: then a missing message does not mean a silent rank."""
        return now - self.polled_at > STALLED_S

    def all_informed(self) -> bool:
        """Return whether all ranks have been sent the reason why the run, or its start, ends."""
        sent = not any(peer.unsent for peer in list(self.peers))
        return sent and (self.run_end is not None or self.admission.all_informed())

    def record_death(self, rank: int, how: str) -> None:
        """Record how the process of `rank` ended, as the launcher reports."""
        if (state := self._detector.ranks.get(rank)) is not None:
            state.how = how

    def record_loss(self, rank: int) -> None:
        """Record that the process of `rank` ended before this server took over."""
        self._detector.ranks[rank].ended_at = time.monotonic()

    # On the server's thread.

    def on_message(self, peer: Peer, message: Any) -> None:
        now = time.monotonic()
        rank = next((rank for rank, each in self.ranks.items() if each is peer), None)
        if self._is_cut_off(peer):
            return
        match message:
            case Join(claim, token):
                self._join(peer, claim, token, now)
            case Heartbeat(place):
                self.admission.on_heartbeat(peer, now)
                if rank is not None and (state := self._detector.ranks.get(rank)) is not None:
                    state.last_heartbeat_at, state.place = now, place
            case Ending(verdict, stopped) if rank is not None:
                frozen = now - self.polled_at > FROZEN_S or now < self._frozen_until
                self._end_by(rank, verdict, stopped, frozen=frozen)
            case Killed(dead, how):
                self.record_death(dead, how)
            case Acknowledge() if rank is not None:
                self._acknowledge(rank)
            case Leave() if rank in self._detector.ranks:
                self._detector.ranks[rank].left = True
            case MayLeave():
                self._may_leave = True
            case _ if isinstance(message, AboutViews):
                if rank is not None:
                    self.views.on_message(rank, message)
            case _:
                super().on_message(peer, message)

    def send_bytes(self, peer: Peer, message: bytes) -> None:
        if not self._is_cut_off(peer):
            super().send_bytes(peer, message)

    def _is_cut_off(self, peer: Peer) -> bool:
        """Return whether a connection is cut off; not the store's, whose lost data would be missing after the cut."""
        return self.cut_off and peer.who.rank not in (NOBODY.rank, self.host)

    def on_disconnect(self, peer: Peer) -> None:
        super().on_disconnect(peer)
        if self._is_cut_off(peer):
            return
        now = time.monotonic()
        self._last_replies.pop(peer, None)
        self.admission.end(peer, now)
        for rank, each in list(self.ranks.items()):
            if each is peer:
                self._detector.ranks[rank].ended_at = now
                del self.ranks[rank]

    def tick(self, now: float) -> None:
        super().tick(now)
        if now - self.polled_at > FROZEN_S:
            self._frozen_until = now + FROZEN_S  # the delayed messages are read by then
            self.admission.restart_timeouts(now)
            self._detector.restart_timeouts(now)
        self.polled_at = now
        self._reply_to_applicants(now)
        if self.admission.sealed_at is None:
            self._admit(now)
        else:
            self._watch(now)

    # Admission.

    def _join(self, peer: Peer, claim: Any, token: str, now: float) -> None:
        if token:
            self._rejoin(peer, claim, token, now)
        else:
            ip = self.ip if claim.uid == self.admission.own.uid else peer.source[0]
            self.admission.request(peer, claim, ip, now, peer.who.life)

    def _rejoin(self, peer: Peer, claim: Any, token: str, now: float) -> None:
        """Readmit a lost rank with a new process, or a rank that comes from a lost server."""
        fault = differences(claim, self.admission.own)
        if token != self.token or self.is_final or self.views.ended or not self._may_leave:
            fault = "the run that this rank had left is over"
        elif claim.rank in self.ranks:
            fault = f"rank {claim.rank} is still in the run"
        if fault:
            self.send(peer, Refused(fault))
            return
        state = self._detector.ranks.get(claim.rank)
        if state is not None and state.ended_at is not None:  # it has returned before its loss was named
            self._declare_lost(verdict_on({claim.rank: "its connection ended"}, self._detector.ranks))
        member = Member(claim.rank, claim.host, peer.source[0], claim.pid, peer.who.life, claim.next_port)
        is_back = claim.rank not in self._detector.ranks
        self.ranks[claim.rank], self.members[claim.rank] = peer, member
        self._detector.add(claim.rank, now)
        lost = tuple(sorted(set(self.members) - set(self._detector.ranks)))
        self.send(peer, Sealed(self.token, self.admission.run_id, list(self.members.values()), lost, self.host))
        if is_back:
            self._send_to([rank for rank in self.ranks if rank != claim.rank], Returned(member))
        self.views.joined(claim.rank, peer.who.life)

    def _reply_to_applicants(self, now: float) -> None:
        """Send each waiting process what it waits for, when that changes and once per second."""
        for reply in self.admission.replies(now):
            if not isinstance(reply.peer, Peer):
                continue
            last, at = self._last_replies.get(reply.peer, ("", 0.0))
            if last != reply.sentence or (not reply.refused and now - at > REPEAT_S):
                self._last_replies[reply.peer] = reply.sentence, now
                sent = Refused(reply.sentence) if reply.refused else Waiting(reply.sentence)
                self.send(reply.peer, sent)

    def _admit(self, now: float) -> None:
        admission = self.admission
        if admission.refusal:
            return
        missing = admission.missing()
        if not missing:
            admission.run_id = admission.run_id or self._name()  # not earlier: a failed start leaves no folder
            members = admission.seal(now)
            self.members = {member.rank: member for member in members}
            self.ranks = {rank: applicant.peer for rank, applicant in admission.members.items()}  # type: ignore[misc]
            self._detector = FailureDetector(self.host, self.ranks, admission.lost_after_s, now)
            self._send_to(self.ranks, Sealed(self.token, admission.run_id, members))
            for member in members:
                self.views.joined(member.rank, member.life)
        elif now > self._deadline:
            sentence = f"{name_ranks(missing)} of {admission.own.world_size} did not join {self._time_limit}"
            admission.refusal = sentence + self.strangers.wrong_key_note()

    # While the run continues.

    def _watch(self, now: float) -> None:
        if self.run_end is not None:
            return
        self.is_final = self.is_final or (self.has_verdict and not self.unacknowledged())
        if self.admission.refusal and not self.is_final:
            self._finish(Verdict(3, self.admission.refusal))
            return
        if now - self._beat_at >= PERIOD_S:
            self._beat_at = now
            self._send_places()
        verdict = self._detector.verdict(now)
        if verdict is not None:
            self._declare_lost(verdict)

    def _send_places(self) -> None:
        """Send the places of the ranks, as heartbeats of this server."""
        self._send_to(self.ranks, Places([(rank, state.place) for rank, state in self._detector.ranks.items()]))

    def _declare_lost(self, verdict: Verdict) -> None:
        lost = {entry.rank for entry in verdict.lost}
        if not (self.is_final or self._may_leave):
            self._finish(verdict)
            return
        self._detector.forget(lost)
        for rank in lost:
            if (peer := self.ranks.pop(rank, None)) is not None:  # if it wakes it reads that it was declared dead
                self.send(peer, RunEnded(verdict, False))
        self._send_to(self.ranks, RanksLost(list(verdict.lost), verdict.sentence))
        for rank in lost:
            self.views.lost(rank)

    def _end_by(self, rank: int, verdict: Verdict, stopped: bool, *, frozen: bool) -> None:
        """Let a rank end the run. If it reports the loss of this host because it receives nothing, then this process
        was frozen, or else the path from here to that rank is broken."""
        self._detector.ranks[rank].left = True
        if self.host in {entry.rank for entry in verdict.lost} and rank != self.host and not frozen:
            state = self._detector.ranks[rank]
            reason = f"no heartbeat from rank {self.host}, though both are alive: the link between them is broken"
            verdict = Verdict(
                3, f"rank {rank} is partitioned from the cluster {state.place}: {reason}",
                (Lost(rank, state.place.step, reason),),
            )  # fmt: skip
        if self.is_final:
            return
        if self._may_leave and self.host not in {entry.rank for entry in verdict.lost} and verdict.exit_code == 3:
            self._declare_lost(verdict)
        else:
            self._finish(verdict, stopped, except_rank=rank)

    def _finish(self, verdict: Verdict, stopped: bool = False, except_rank: int | None = None) -> None:
        """End the run with this verdict for all ranks except `except_rank`, which has ended with it already."""
        if self.run_end is None:
            run_end = RunEnded(verdict, stopped)
            self._send_to([rank for rank in self.ranks if rank != except_rank], run_end)
            self.run_end = run_end  # set after it was sent to all: see `all_informed`

    def _acknowledge(self, rank: int) -> None:
        """Let the host write the verdict once all others have acknowledged it; after that, tell all ranks."""
        self._acknowledged.add(rank)
        if rank == self.host:
            self._send_to([each for each in self.ranks if each != self.host], Committed())

    def _send_to(self, ranks: Iterable[int], message: Message) -> None:
        sent = framed(message)
        for rank in sorted(ranks, key=lambda rank: rank == self.host):  # the host may end as soon as it knows
            if (peer := self.ranks.get(rank)) is not None:
                self.send_bytes(peer, sent)
