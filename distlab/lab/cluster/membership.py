"""Let one rank agree with the others, again and again, on the next view: which ranks are members (views.py).

A view leaves out only ranks that are known to be lost: the connection ended, or the server has declared them dead.
When rank 0's process dies, the lowest survivor serves, at a port that all know since the start; all others connect to
it and repeat what they wait for.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from distlab.lab.cluster.admission import Admission
from distlab.lab.cluster.join import Cluster, dial, has_ended
from distlab.lab.cluster.messages import Ask, Decide, Done, Join, Living, Meet, Plan, Reborn
from distlab.lab.cluster.messages import View as Decided
from distlab.lab.cluster.rank_server import RankServer
from distlab.lab.cluster.views import AGAIN, BEGIN
from distlab.lab.cluster.watchdog import Watchdog
from distlab.techniques.transport.handshake import Who

Report = dict[str, Any]
POLL_S = 0.05


class Member(NamedTuple):
    rank: int
    life: int


class View(NamedTuple):
    """The members from `plan` on; `plan` is the result of `decide` for all reports."""

    number: int
    members: tuple[Member, ...]
    plan: Report

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)


Decision = Callable[[list[Member], dict[Member, Report]], Report]


class Membership:
    """The membership as one process knows it; each wait for the others takes at most `timeout_s`. Used by the main
    thread, except for messages that the watch's thread receives."""

    def __init__(
        self, cluster: Cluster, watch: Watchdog, timeout_s: float, publish: Callable[[], None], *, rejoined: bool
    ) -> None:
        self.publish, self.rejoined = publish, rejoined  # publish the addresses of this run, for ranks that rejoin
        self.cluster, self.watch, self.timeout_s = cluster, watch, timeout_s
        self.me = Member(cluster.rank, cluster.life)
        self.world = set(range(cluster.world_size))
        self.view = View(0, (), {})
        self.on_change: Callable[[], None] = lambda: None  # on the watch's thread: a rank left, or meets
        self._living = Living({rank: member.life for rank, member in cluster.members.items()}, [], {}, 0)
        self._decisions: queue.SimpleQueue[Decide | Decided] = queue.SimpleQueue()
        self._awaited: Meet | Ask | None = None  # repeated to a server that takes over
        self._dialling = threading.Lock()
        watch.on_message, watch.succeed = self._on_message, self._succeed

    # The known state.

    @property
    def requests(self) -> dict[Member, Report]:
        """Return the requests of ranks outside that want to join."""
        return {Member(rank, life): json.loads(request) for rank, life, request in self._living.requests}

    def lives(self, member: Member) -> bool:
        return member == self.me or self._living.lives.get(member.rank) == member.life

    def is_intact(self, members: tuple[Member, ...]) -> bool:
        """Return whether all members live, and none meets for another view."""
        return all(self.lives(each) for each in members) and not set(self._living.met) - {self.me.rank}

    def begun(self) -> str:
        """Return the new phase that all are called to; empty without a call."""
        return next((why for why in self._living.met.values() if why.startswith(BEGIN)), "")

    def _has_ended(self) -> bool:
        """Return whether the view has ended: a rank reports it, or calls all to something new."""
        return self._living.done >= self.view.number > 0 or bool(self.begun())

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Living):
            self._living = message
            if not self.is_intact(self.view.members):
                self.on_change()
        elif isinstance(message, Decide | Decided):
            self._decisions.put(message)

    def filenos(self) -> set[int]:
        """Return the sockets that connect this process to the run, whatever group it is in."""
        with self._dialling:
            server = self.cluster.server
            return {self.cluster.uplink.connection.fileno()} | (server.filenos() if server is not None else set())

    # Meetings.

    def meet(self, report: Report, decide: Decision) -> View | None:
        """Agree on the next view with all living members; returns None if this view has ended meanwhile."""
        return self._agree(AGAIN, report, decide)

    def assemble(self, why: str, report: Report, decide: Decision) -> View | None:
        """Agree on a view with all ranks that live and are not outside.

        All pass the same `why`, different in each call; with BEGIN in front it begins something new and is never over.
        Otherwise returns None if the view has ended meanwhile.
        """
        return self._agree(why, report, decide)

    def ask(self, request: Report) -> View | None:
        """Wait outside until a view includes this process; returns None if the training has ended without it.

        Raises TimeoutError once no rank that could admit it has been there for long.
        """
        self._send(Ask(json.dumps(request).encode()))
        member_seen_at = time.monotonic()
        while not self._has_ended():
            others = set(self._living.lives) - {self.me.rank}
            if others - {rank for rank, _, _ in self._living.requests}:
                member_seen_at = time.monotonic()
            if time.monotonic() - member_seen_at > self.timeout_s:
                raise TimeoutError(
                    f"for {self.timeout_s:g} s no member was left that could let rank {self.me.rank} join"
                )
            view = self._next(lambda present, reports: {"members": present})  # noqa: ARG005  it decides on nothing outside
            if view is not None and self.me in view.members:
                return view
        return None

    def finish(self) -> None:
        """Report that all members have finished: ranks that still meet about this view can stop."""
        self.cluster.uplink.send(Done(self.view.number))

    def restart_as_new(self) -> None:
        """Forget all state of this process, which is a new one for all others."""
        self.me = Member(self.me.rank, time.time_ns())
        self._awaited = None
        self.cluster.uplink.send(Reborn(self.me.life))

    def _agree(self, why: str, report: Report, decide: Decision) -> View | None:
        self._send(Meet(self.view.number, list(self.view.members), why, json.dumps(report).encode()))
        deadline = time.monotonic() + self.timeout_s
        while True:
            if not why.startswith(BEGIN) and self._has_ended():
                self._awaited = None
                return None
            if (view := self._next(decide)) is not None:
                return view
            if time.monotonic() > deadline:
                missing = sorted(set(self._living.lives) - set(self._living.met))
                raise TimeoutError(
                    f"timed out waiting for ranks {missing} to agree on the members, after {self.timeout_s:g} s"
                )

    def _send(self, message: Meet | Ask) -> None:
        self._awaited = message
        self.cluster.uplink.send(message)

    def _next(self, decide: Decision) -> View | None:
        """Return the next view, if it has arrived; decides on it if this process is the first."""
        try:
            message = self._decisions.get(timeout=POLL_S)
        except queue.Empty:
            return None
        if isinstance(message, Decide):
            reports = {Member(rank, life): json.loads(report) for rank, life, report in message.reports}
            plan = decide(list(reports), reports)
            members = plan.pop("members")
            self.cluster.uplink.send(Plan(message.number, list(members), json.dumps(plan).encode()))
            return None
        if message.number <= self.view.number:
            return None
        self._awaited = None
        self.view = View(message.number, tuple(Member(*each) for each in message.members), json.loads(message.plan))
        return self.view

    # After the loss of rank 0's server, on the watch's thread.

    def _succeed(self) -> None:
        """Connect to the next server, which the lowest survivor opens; raises ConnectionError if there is none."""
        with self._dialling:
            self._connect_to_successor()

    def _connect_to_successor(self) -> None:
        cluster, cut_off = self.cluster, self.cluster.uplink.drops_received or self.cluster.uplink.drops_sent
        living = self._living.lives | {self.me.rank: self.me.life}
        living.pop(cluster.host, None)
        for rank in sorted(living):
            member = cluster.members[rank]
            if rank == self.me.rank:
                cluster.server = self._start_server(living)
                cluster.server.cut_off = cut_off
            elif cut_off:
                continue
            try:
                who = Who(self.me.rank, self.me.life)
                uplink = dial(member.ip, member.next_port, cluster.key, who, self.watch.config.lost_after_s)
            except OSError:
                continue  # it is lost, too
            cluster.host, cluster.server_at, cluster.uplink = rank, (member.ip, member.next_port), uplink
            self.publish()
            uplink.send(Join(cluster.claim, cluster.token))
            if self._awaited is not None:
                uplink.send(self._awaited)
            return
        raise ConnectionError("no other rank serves in place of the lost one")

    def _start_server(self, living: dict[int, int]) -> RankServer:
        """Return this rank's own server, for the living ranks."""
        cluster, config = self.cluster, self.watch.config
        assert cluster.next_listening is not None, "an elastic run has opened it"
        admission = Admission(cluster.claim, cluster.run_id, 0.0, config.lost_after_s)
        server = RankServer(
            cluster.next_listening, cluster.key, cluster.rank, cluster.members[cluster.rank].ip, admission,
            cluster.token, 0.0, "", cluster.strangers, members=cluster.members, living=living,
        )  # fmt: skip
        for rank in living.keys() - {self.me.rank}:
            if has_ended(cluster.members[rank]):  # it died before the lost server could report it
                server.record_loss(rank)
        return server
