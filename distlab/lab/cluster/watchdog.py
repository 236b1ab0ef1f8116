"""The watch of a rank: a thread that sends heartbeats, receives losses, and ends the process of a broken run.

It has the rank's one connection to rank 0's server (rank_server.py). The server names the lost ranks. Its own end or
silence is the loss of its rank, which each rank names by itself in the same words. The main thread may be stuck in C++
for as long as gloo likes, so a verdict ends the process from here, by `os._exit`.
"""

import select
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from msgspec.structs import replace

from distlab.lab.cluster import name_ranks, oom_notice
from distlab.lab.cluster.departure import EXIT_CODES, Departure, Signals, Succession, error_verdicts, may_be_a_loss
from distlab.lab.cluster.failure_detector import (
    SETTLE_S,
    MainThreadProgress,
    RankState,
    Slowness,
    behind,
    lost_ranks,
    verdict_on,
)
from distlab.lab.cluster.join import Cluster, Uplink
from distlab.lab.cluster.messages import (
    PURPOSE,
    Acknowledge,
    Committed,
    Ending,
    Heartbeat,
    Killed,
    Leave,
    MayLeave,
    Member,
    Place,
    Places,
    RanksLost,
    Returned,
    RunEnded,
    Sealed,
    Verdict,
)
from distlab.lab.cluster.rank_server import FROZEN_S, PERIOD_S
from distlab.lab.config import Config
from distlab.lab.measure.memory import ContainerMemory
from distlab.lab.report.records import Lost
from distlab.techniques.transport.store_server import framed

RAISES_S = 5.0  # how long a main thread may take to raise after NCCL aborts; its calls usually raise at once
OWN_SIGTERM_S = 1.0  # `docker compose stop` reaches all ranks within this time: each then ends by its own SIGTERM
SEND_S = 0.5  # for this process to send its decision before it ends
POLL_S = 0.02
AFTER = "after the verdict, which remains"


class Watchdog(threading.Thread):
    """The heartbeats of one rank. Created and finished on the main thread; `start` after `join`."""

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        say: Callable[[str], None],
        on_verdict: Callable[[Verdict, Succession], None],
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.cluster, self.config, self.say = cluster, config, say
        self.main = MainThreadProgress()
        # Callbacks, on this thread.
        self.on_period: Callable[[int, str], None] = lambda step, phase: None  # noqa: ARG005
        self.on_message: Callable[[Any], None] = lambda message: None  # noqa: ARG005  of views
        self.on_left: Callable[[Lost], None] | None = None
        self.on_back: Callable[[Member], None] = lambda member: None  # noqa: ARG005
        self.succeed: Callable[[], None] | None = None  # connects to another server after the loss of rank 0's
        self.reports_waits = True  # reports for which ranks this one waits, if that takes long
        self.nccl_aborted: Callable[[], bool] = lambda: False  # whether NCCL has aborted a collective
        self.cpu_seconds, self.woken, self.longest_gap_s = 0.0, 0, 0.0
        self.others = {rank: Place() for rank in cluster.members if rank not in {cluster.rank, *cluster.lost}}
        self._server_state = RankState(last_heartbeat_at=time.monotonic())
        self._failure: tuple[Verdict, Verdict] | None = None  # of the main thread: its own, and for the others
        self._slowness, self._pressure = Slowness(time.monotonic()), ContainerMemory()
        self._failed_at: float | None = None
        self._acknowledged = False
        self._committed, self._ending = threading.Event(), threading.Event()
        self._signals = Signals()
        self._departure = Departure(self._signals, say, on_verdict)
        killed = framed(Killed(cluster.rank, oom_notice.HOW))
        oom_notice.prepare(cluster.rank, cluster.server_at, cluster.key, PURPOSE, killed)

    @property
    def uplink(self) -> Uplink:
        return self.cluster.uplink

    # On the main thread.

    def let_leave(self, on_left: Callable[[Lost], None]) -> None:
        """Let the run continue from now on after the loss of any rank except the server's: each other rank calls
        `on_left` on the watch's thread. All ranks call this at the same point of the run; a later call replaces
        `on_left`."""
        self.on_left = on_left
        self.main.use_own_pace()
        self.uplink.send(MayLeave())

    def agree(self, publish: Callable[[], None]) -> None:
        """Acknowledge the host's verdict; returns once it is final. The host calls `publish` before it does.

        Raises TimeoutError naming the ranks that have not acknowledged it in LAB_COLLECTIVE_TIMEOUT_S.
        """
        bound_s, server = self.config.collective_timeout_s, self.cluster.server
        if server is not None:
            deadline, server.has_verdict = time.monotonic() + bound_s, True
            while not server.is_final and self.others:
                if time.monotonic() > deadline:
                    missing = name_ranks(server.unacknowledged() or self.others)
                    raise TimeoutError(f"timed out waiting for {missing} at the verdict after {bound_s:g} s")
                time.sleep(POLL_S)
            publish()
        self._acknowledged = True
        self.uplink.send(Acknowledge())
        if server is None and not self._committed.wait(bound_s):
            raise TimeoutError(f"timed out waiting for rank {self.cluster.host} at the verdict after {bound_s:g} s")

    def finish(self) -> None:
        """End normally. The host leaves last, but does not wait longer than LAB_COLLECTIVE_TIMEOUT_S."""
        server, deadline = self.cluster.server, time.monotonic() + self.config.collective_timeout_s
        while server is not None and (staying := server.staying()) and time.monotonic() < deadline:
            if all(rank not in self.others for rank in staying):
                break
            time.sleep(POLL_S)
        self.uplink.send(Leave())
        self._ending.set()
        self._signals.wake()
        # Wait for the thread's last line: its end may destroy torch's process group, which aborts the process if the
        # interpreter ends meanwhile (as in half of all runs without an import of torch's compiler).
        if self.is_alive():
            self.join()
        self._signals.close()
        self.uplink.close()

    def fail(self, error: BaseException) -> NoReturn:
        """End after the main thread raised: with the verdict on the rank that caused it, or as the failed rank.

        The watch's thread does it, after it has received the others' messages: a rank that was paused and declared dead
        finds its connections closed, and must not report that as its own failure.
        """
        self.nccl_aborted = lambda: False  # the main thread reports it itself
        suspects = bool(self.others) and may_be_a_loss(error)
        if suspects and self.is_alive():
            time.sleep(self.config.lost_after_s + SETTLE_S + 2 * PERIOD_S)
        place = self.main.here()
        failure = error_verdicts(self.cluster.rank, place, error, behind(place, self.others) if suspects else [])
        if not self.is_alive():
            self._end(*failure)
        self._failure = failure
        self._signals.wake()
        while True:  # until the watch's thread ends the process
            time.sleep(PERIOD_S)

    # On the watch's thread.

    def run(self) -> None:
        """Send heartbeats until the end; a failure of the watch ends its rank, because no other code would."""
        try:
            while not self._ending.is_set():
                self._period()
        except Exception as error:
            self._end(*error_verdicts(self.cluster.rank, replace(self.main.place, phase="its watch"), error, []))
        self.cpu_seconds = time.thread_time()

    def _period(self) -> None:
        """Send one heartbeat, and process all messages until the next."""
        began = time.monotonic()
        self.woken += 1
        self.uplink.send(Heartbeat(replace(self.main.here(), memory=self._pressure.share())))
        self._judge_device()
        others, place = dict(self.others), self.main.here()
        if self.reports_waits and not self._acknowledged and (slow := self._slowness.sentence(place, others, began)):
            self.say(slow)
        self.on_period(*self.main.work)
        while (left_s := began + PERIOD_S - time.monotonic()) > 0 and not self._ending.is_set():
            self._wait(left_s)
            if self._failure is not None and not self.uplink.ended:  # else the loss of the server is named first
                self._end(*self._failure)
        self.cpu_seconds = time.thread_time()
        gap_s = time.monotonic() - began - PERIOD_S
        self.longest_gap_s = max(self.longest_gap_s, gap_s)
        # Messages from a pause of this process are read before any rank's silence counts; so are those that its own
        # server could not send without a core: in one of 200 runs at a load of ten per core, rank 0 declared itself
        # dead.
        server = self.cluster.server
        if gap_s > FROZEN_S or (server is not None and server.is_stalled(time.monotonic())):
            self._server_state.last_heartbeat_at = time.monotonic()
        self._judge_server(time.monotonic())

    def _wait(self, timeout_s: float) -> None:
        """Wait until the server sends a message or a signal arrives."""
        sources = [self._signals.receiver] + ([] if self.uplink.ended else [self.uplink.connection])
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if self._signals.receiver in ready and (number := self._signals.wait(0.0)) is not None:
            self._stopped(number)
        for message in self.uplink.messages():
            self._server_state.last_heartbeat_at = time.monotonic()
            self._on_message(message)

    def _stopped(self, number: Any) -> NoReturn:
        rank, place = self.cluster.rank, self.main.place
        sentence = f"rank {rank} was stopped by {number.name} {place}"
        lost = Lost(rank, place.step, f"stopped by {number.name}")
        self._end(Verdict(EXIT_CODES[number], sentence), Verdict(3, sentence, (lost,)), stopped=True)

    def _on_message(self, message: Any) -> None:
        match message:
            case Places(places):
                self.others |= {rank: place for rank, place in places if rank in self.others}
                for rank, place in places:
                    if rank == self.cluster.host:
                        self._server_state.place = place
            case RunEnded(verdict, stopped):
                self._adopt(verdict, stopped)
            case RanksLost(lost, sentence):
                self._continue_without(lost, sentence)
            case Returned(member):
                self._readmit(member)
            case Sealed(members=members):  # from the next server, to which some may have returned before this rank
                for member in members:
                    self._readmit(member)
            case Committed():
                self._committed.set()
            case _:
                self.on_message(message)

    def _readmit(self, member: Member) -> None:
        known, self.cluster.members[member.rank] = self.cluster.members[member.rank], member
        if member.rank not in {self.cluster.rank, *self.others} and member.life != known.life:
            self.others[member.rank] = Place()
            self.on_back(member)

    def _continue_without(self, lost: list[Lost], sentence: str) -> None:
        """Continue the run without the lost ranks; a final verdict stays unchanged."""
        self.say(f"{sentence}: {AFTER}" if self.on_left is None else f"{sentence}; the remaining ranks continue")
        for entry in lost:
            self.others.pop(entry.rank, None)
            if self.on_left is not None:
                self.on_left(entry)

    def _judge_server(self, now: float) -> None:
        """Decide whether the serving rank is lost, which no server can report."""
        state, host = self._server_state, self.cluster.host
        if self._ending.is_set() or (self._committed.is_set() and self.cluster.server is None):
            return
        if self.uplink.ended and state.ended_at is None:
            state.ended_at = now
        lost = lost_ranks({host: state}, self.config.lost_after_s, now)
        if not lost or (state.ended_at is not None and now - state.ended_at < SETTLE_S - PERIOD_S):
            return
        verdict = verdict_on(lost, {host: state})
        if self._acknowledged:
            since = "after this rank had acknowledged the verdict: run.json shows whether it is final"
            self._leave(Verdict(3, f"{verdict.sentence}, {since}", verdict.lost), {host})
        if self.succeed is not None and self.on_left is not None:
            self._continue_without(list(verdict.lost), verdict.sentence)
            self.uplink.send(Ending(verdict, False))  # a paused server reads it once it wakes
            self.uplink.close()
            self.succeed()
            self._server_state = RankState(last_heartbeat_at=time.monotonic())
            return
        self.uplink.send(Ending(verdict, False))
        self._leave(verdict, {host})

    def _adopt(self, verdict: Verdict, stopped: bool) -> None:
        """End as the server decides; a stop of all ranks reaches this one too, and then counts as its own."""
        if stopped and (number := self._signals.wait(OWN_SIGTERM_S)) is not None:
            self._stopped(number)
        lost = {entry.rank for entry in verdict.lost}
        if self.cluster.rank in lost:
            sentence = f"rank {self.cluster.rank} was declared dead by the other ranks: {verdict.sentence}"
            self._leave(replace(verdict, sentence=sentence), lost, declared_dead=True)
        self._leave(verdict, lost)

    def _judge_device(self) -> None:
        """End this rank if NCCL has aborted a collective and the main thread still waits for its GPU: an endless kernel
        keeps later calls from raising."""
        if not self.nccl_aborted():
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now - self._failed_at > RAISES_S:
            bound = f"LAB_COLLECTIVE_TIMEOUT_S={self.config.collective_timeout_s:g}"
            error = TimeoutError(f"a collective took longer than {bound}: NCCL aborted it, and this rank's GPU hangs")
            place = self.main.here()
            self._end(*error_verdicts(self.cluster.rank, place, error, behind(place, self.others)))

    def _end(self, own: Verdict, to_others: Verdict, stopped: bool = False) -> NoReturn:
        """End for this rank's own reason; once the run's verdict is final, nothing changes for the others."""
        if self._acknowledged:
            self.uplink.send(Leave())
            self._departure.leave(own, None)
        self.uplink.send(Ending(to_others, stopped))
        self._leave(own, {entry.rank for entry in to_others.lost})

    def _leave(self, own: Verdict, lost: set[int], *, declared_dead: bool = False) -> NoReturn:
        server, deadline = self.cluster.server, time.monotonic() + SEND_S
        while server is not None and self.others and not server.all_informed() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        survivors = {self.cluster.rank, *self.others} - lost
        self._departure.leave(own, Succession(self.cluster.rank, survivors, declared_dead=declared_dead))
