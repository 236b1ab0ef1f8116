"""Who is in, as one rank knows it: it agrees with the others, again and again, on the next view (views.py).

Nobody is left out but who is known to be gone: its connection has ended, or the server has declared it dead. When rank
0's process dies the lowest survivor serves, at a port that all know since the start; all others connect to it, and say
again what they wait for.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from distlab.lab.cluster.admission import Admission
from distlab.lab.cluster.join import Cluster, dial, refuses
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
    """Who is in, from `plan` on; `plan` is what `decide` made of all reports."""

    number: int
    members: tuple[Member, ...]
    plan: Report

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)


Decision = Callable[[list[Member], dict[Member, Report]], Report]


class Membership:
    """What one process knows of who is in, each wait for the others at most `timeout_s`. Used by the main thread alone,
    but for what the watch's thread hears."""

    def __init__(
        self, cluster: Cluster, watch: Watchdog, timeout_s: float, publish: Callable[[], None], *, rejoined: bool
    ) -> None:
        self.publish, self.rejoined = publish, rejoined  # where this run is served, for ranks that rejoin
        self.cluster, self.watch, self.timeout_s = cluster, watch, timeout_s
        self.me = Member(cluster.rank, cluster.life)
        self.world = set(range(cluster.world_size))
        self.view = View(0, (), {})
        self.on_change: Callable[[], None] = lambda: None  # on the thread of the watch: somebody went, or meets
        self._living = Living({rank: member.life for rank, member in cluster.members.items()}, [], {}, 0)
        self._heard: queue.SimpleQueue[Decide | Decided] = queue.SimpleQueue()
        self._waits: Meet | Ask | None = None  # what a server is told that takes over
        self._dialling = threading.Lock()
        watch.on_message, watch.succeed = self._hear, self._succeed

    # What is known.

    @property
    def asking(self) -> dict[Member, Report]:
        """Who wants to be let in, and as what."""
        return {Member(rank, life): json.loads(wish) for rank, life, wish in self._living.asking}

    def lives(self, member: Member) -> bool:
        return member == self.me or self._living.lives.get(member.rank) == member.life

    def stands(self, members: tuple[Member, ...]) -> bool:
        """Whether all of them live, and nobody meets for another view."""
        return all(self.lives(each) for each in members) and not set(self._living.met) - {self.me.rank}

    def begun(self) -> str:
        """What all are called to that is new; empty where nobody has called."""
        return next((why for why in self._living.met.values() if why.startswith(BEGIN)), "")

    def _over(self) -> bool:
        """Whether the view has come to its end: somebody says so, or calls all to something new."""
        return self._living.done >= self.view.number > 0 or bool(self.begun())

    def _hear(self, message: Any) -> None:
        if isinstance(message, Living):
            self._living = message
            if not self.stands(self.view.members):
                self.on_change()
        elif isinstance(message, Decide | Decided):
            self._heard.put(message)

    def filenos(self) -> set[int]:
        """The sockets by which this process is in the run, whatever group it is in."""
        with self._dialling:
            server = self.cluster.server
            return {self.cluster.line.connection.fileno()} | (server.filenos() if server is not None else set())

    # To meet.

    def meet(self, report: Report, decide: Decision) -> View | None:
        """Agree on the next view with all members who live; None where this one has come to its end meanwhile."""
        return self._agree(AGAIN, report, decide)

    def assemble(self, why: str, report: Report, decide: Decision) -> View | None:
        """Agree on a view with all ranks that live and are not outside.

        All give the same `why`, another each time; BEGIN in front of it begins something new, and is never over. Else
        None where the view has come to its end meanwhile.
        """
        return self._agree(why, report, decide)

    def ask(self, wish: Report) -> View | None:
        """Wait outside until a view takes this process in; None once the training has come to its end without it.

        Raises TimeoutError once nobody has been left for long who could let it in.
        """
        self._say(Ask(json.dumps(wish).encode()))
        hopeful_at = time.monotonic()
        while not self._over():
            others = set(self._living.lives) - {self.me.rank}
            if others - {rank for rank, _, _ in self._living.asking}:
                hopeful_at = time.monotonic()
            if time.monotonic() - hopeful_at > self.timeout_s:
                raise TimeoutError(
                    f"for {self.timeout_s:g} s no member was left that could let rank {self.me.rank} join"
                )
            view = self._next(lambda there, reports: {"members": there})  # noqa: ARG005  it decides on nothing outside
            if view is not None and self.me in view.members:
                return view
        return None

    def finish(self) -> None:
        """All members have come to the end: whoever still meets about this view need not."""
        self.cluster.line.send(Done(self.view.number))

    def be_reborn(self) -> None:
        """This process forgets all that it had, and is another one to all others."""
        self.me = Member(self.me.rank, time.time_ns())
        self._waits = None
        self.cluster.line.send(Reborn(self.me.life))

    def _agree(self, why: str, report: Report, decide: Decision) -> View | None:
        self._say(Meet(self.view.number, list(self.view.members), why, json.dumps(report).encode()))
        deadline = time.monotonic() + self.timeout_s
        while True:
            if not why.startswith(BEGIN) and self._over():
                self._waits = None
                return None
            if (view := self._next(decide)) is not None:
                return view
            if time.monotonic() > deadline:
                missing = sorted(set(self._living.lives) - set(self._living.met))
                raise TimeoutError(
                    f"timed out waiting for ranks {missing} to agree on the members, after {self.timeout_s:g} s"
                )

    def _say(self, message: Meet | Ask) -> None:
        self._waits = message
        self.cluster.line.send(message)

    def _next(self, decide: Decision) -> View | None:
        """The next view, if it has come; decides on it where this process is the first."""
        try:
            message = self._heard.get(timeout=POLL_S)
        except queue.Empty:
            return None
        if isinstance(message, Decide):
            reports = {Member(rank, life): json.loads(report) for rank, life, report in message.reports}
            plan = decide(list(reports), reports)
            members = plan.pop("members")
            self.cluster.line.send(Plan(message.number, list(members), json.dumps(plan).encode()))
            return None
        if message.number <= self.view.number:
            return None
        self._waits = None
        self.view = View(message.number, tuple(Member(*each) for each in message.members), json.loads(message.plan))
        return self.view

    # Where rank 0's server is gone, on the thread of the watch.

    def _succeed(self) -> None:
        """Go to the next server, which the lowest survivor opens; raises ConnectionError if there is none."""
        with self._dialling:
            self._go_on()

    def _go_on(self) -> None:
        cluster, cut_off = self.cluster, self.cluster.line.deaf or self.cluster.line.mute
        living = self._living.lives | {self.me.rank: self.me.life}
        living.pop(cluster.host, None)
        for rank in sorted(living):
            member = cluster.members[rank]
            if rank == self.me.rank:
                cluster.server = self._serve(living)
                cluster.server.cut_off = cut_off
            elif cut_off:
                continue
            try:
                who = Who(self.me.rank, self.me.life)
                line = dial(member.ip, member.next_port, cluster.key, who, self.watch.config.lost_after_s)
            except OSError:
                continue  # it is gone, too
            cluster.host, cluster.server_at, cluster.line = rank, (member.ip, member.next_port), line
            self.publish()
            line.send(Join(cluster.claim, cluster.token))
            if self._waits is not None:
                line.send(self._waits)
            return
        raise ConnectionError("no rank serves in place of the one that is gone")

    def _serve(self, living: dict[int, int]) -> RankServer:
        """This rank's own server, for those that live."""
        cluster, config = self.cluster, self.watch.config
        assert cluster.next_listening is not None, "a run that goes on has opened it"
        admission = Admission(cluster.claim, cluster.run_id, 0.0, config.lost_after_s)
        server = RankServer(
            cluster.next_listening, cluster.key, cluster.rank, cluster.members[cluster.rank].ip, admission,
            cluster.token, 0.0, "", cluster.strangers, members=cluster.members, living=living,
        )  # fmt: skip
        for rank in living.keys() - {self.me.rank}:
            if refuses(cluster.members[rank]):  # it died before the server that is gone could tell
                server.tell_gone(rank)
        return server
