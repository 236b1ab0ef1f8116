"""The watch of a rank: a thread that beats, listens, names who is lost, and ends the process when the cluster is
broken.

Every rank sends a small UDP datagram to every other four times a second; there is no hub, so the death of rank 0 is no
special case. The main thread may be stuck in C++ for as long as gloo likes, so a verdict ends the process from here, by
`os._exit`. Of those who agree on a verdict the lowest rank speaks first, and the others repeat its words: all
survivors say the same sentence. What a silence costs, with LAB_LOST_AFTER_S=2.5: 2.5 s until it counts, 0.75 s for all
tables to agree, up to 0.75 s for the words to go round. The thread wakes once a period, at under 0.3 % of a core.
"""

import queue
import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NoReturn

from distlab.cluster import name_ranks
from distlab.cluster.failure_detector import FOLLOW_S, FailureDetector, MainThreadProgress, Slowness
from distlab.cluster.heartbeat import SENT_TIMES, Hearing, Post, Verdict
from distlab.cluster.heartbeat_helper import PERIOD_S, hops_of, leave_last_words
from distlab.cluster.rendezvous import LINGER_S, Cluster
from distlab.cluster.rendezvous_server import Member, RendezvousServer
from distlab.cluster.shutdown import (
    EXIT_CODES,
    Agreement,
    Departure,
    Goodbye,
    Parting,
    Signals,
    Succession,
    failed,
    may_be_a_loss,
)
from distlab.config import Config
from distlab.measure.memory import ContainerMemory
from distlab.report.records import Lost

FROZEN_S = 1.0  # the longest gap between two beats under four times as many busy threads as cores was 0.33 s
START_GRACE_S = 1.0  # the others' watches start up to this much later; so much a hop of news
RAISES_S = 5.0  # how long a main thread may take to raise what NCCL has given up; its calls raise at once as a rule
OWN_SIGTERM_S = 1.0  # `docker compose stop` reaches all ranks within this: each then ends by its own SIGTERM


class Watchdog(threading.Thread):
    """The heartbeats of one rank. Made and finished on the main thread; `start` after `join`."""

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        say: Callable[[str], None],
        on_verdict: Callable[[Verdict, Succession], None],
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.cluster, self.config, self.say = cluster, config, say
        now = time.monotonic()
        grace_s = START_GRACE_S * hops_of(len(cluster.members) - 1)
        self.hearing = Hearing(cluster.rank, cluster.members, config.lost_after_s, now + grace_s)
        self.main = MainThreadProgress()
        # Hears of it, on this thread.
        self.on_period: Callable[[int, str], None] = lambda step, phase: None  # noqa: ARG005
        self.tells_waits = True  # for whom this rank waits, where that takes long
        self.gave_up: Callable[[], bool] = lambda: False  # whether NCCL has given up a collective
        self.cpu_seconds, self.woken = 0.0, 0
        self.post = Post(cluster)
        words = self.post.last_words(cluster.rank)
        leave_last_words(cluster.rank, words, cluster.socket.family, list(self.post.addresses.values()))
        self._parting = Parting(self.hearing, self.post, say)
        self._agreement = Agreement(self.hearing)
        self._failure: tuple[Verdict, Verdict] | None = None  # of the main thread: own, and to the others
        self.goodbye = Goodbye(cluster.rank, self.hearing, say)
        self._slowness = Slowness(now)
        self._pressure = ContainerMemory()
        self._judging = FailureDetector(cluster.rank, self.hearing)
        self._come_back: queue.SimpleQueue[Member] = queue.SimpleQueue()
        self._refused_at: float | None = None
        self._failed_at: float | None = None
        self._gave_up_at: float | None = None
        self._end_by = self._hurry_until = self._forgiven_at = 0.0
        self._ending, self._ended = threading.Event(), threading.Event()
        self._signals = Signals()
        self._departure = Departure(self._signals, say, on_verdict)

    def let_leave(self, on_left: Callable[[Lost], None], hung_up: Callable[[], Set[int]] | None = None) -> None:
        """From now on the loss of any rank but 0 does not end the others: each calls `on_left`, on the watch's thread,
        and goes on. Where `hung_up` tells whose processes have closed their connections, rank 0 may go like any other.

        All ranks call this at the same point of the run; a later call puts another `on_left` in the place of the first.
        """
        self._parting.on_left = on_left
        self.main.part()
        if hung_up is not None:
            self._parting.hung_up, self._parting.needed = hung_up, frozenset()

    def take_in(self, member: Member) -> None:
        """A rank that had left is here again, at these addresses; from any thread."""
        self._come_back.put(member)

    def need(self, host: int) -> None:
        """From now on rank `host` keeps the store of all in rank 0's place, and its loss ends the run."""
        self._parting.needed, self.goodbye.host = {host}, host

    def agree(self) -> None:
        """Accept the verdict that rank 0 gave; returns once no rank can end otherwise.

        Raises TimeoutError naming the ranks that have not accepted it in LAB_COLLECTIVE_TIMEOUT_S.
        """
        self._agreement.accept()
        self._hurry()
        if self.is_alive() and not self._agreement.wait(self.config.collective_timeout_s):
            missing = self._agreement.missing() or self.hearing.peers
            bound_s = self.config.collective_timeout_s
            raise TimeoutError(f"timed out waiting for {name_ranks(missing)} at the verdict after {bound_s:g} s")

    def finish(self) -> None:
        """A normal end: say goodbye until all who still run have heard it.

        Rank 0, the store's host, leaves last, though after LAB_COLLECTIVE_TIMEOUT_S it waits for nobody any more.
        """
        self._end_by = time.monotonic() + self.config.collective_timeout_s
        self._ending.set()
        self._hurry()
        # Not until its last line: torch's process group may go with the thread, which aborts the process if the
        # interpreter ends meanwhile (half of all runs did that did not import torch's compiler).
        if self.is_alive():
            self.join()
        self._signals.close()
        self.post.close()

    def _hurry(self) -> None:
        """All come here at once as a rule: then quick beats save a quarter of a second; who is late disturbs nobody."""
        self._hurry_until = time.monotonic() + 2 * PERIOD_S
        self._signals.wake()

    def fail(self, error: BaseException) -> NoReturn:
        """The main thread raised: end with the verdict on the rank that caused it, or as the one that failed.

        The watch's thread does it, after it has heard what the others say: a rank that was paused and given up finds
        its connections closed, and may not take that for a failure of its own.
        """
        suspects = may_be_a_loss(error)
        self.gave_up = lambda: False  # the main thread says it itself
        if self.hearing.peers and suspects:
            self._wait_for_a_verdict()
        place = self.main.here()
        waited_for = self.hearing.behind(place, time.monotonic()) if suspects else []
        failure = failed(self.cluster.rank, place, error, waited_for)
        if not self.is_alive():
            self._end(*failure)
        self._failure = failure
        self._signals.wake()
        while True:  # the thread ends the process
            time.sleep(PERIOD_S)

    def _wait_for_a_verdict(self) -> None:
        """If somebody is lost, the thread ends the process meanwhile; after a freeze all silences count anew.

        Where somebody is silent and no verdict there, the ranks are slow to agree on it: then twice as long.
        """
        began, takes_s = time.monotonic(), self.config.lost_after_s + self._judging.settle_s + FOLLOW_S + 2 * PERIOD_S
        while (now := time.monotonic()) < max(began, self._forgiven_at) + takes_s * (
            1 + bool(self.hearing.silent(now))
        ):
            time.sleep(PERIOD_S)

    def run(self) -> None:
        """Beat until the end; a watch that cannot go on ends its rank, which nobody else would."""
        try:
            self._beat_until_ended()
        except Exception as error:
            self._end(*failed(self.cluster.rank, replace(self.main.place, phase="its watch"), error, []))

    def _beat_until_ended(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            self.woken += 1
            self._listen(frozen_s=now - due)
            self._agreement.look()
            self.post.tell_beat(self._beat())
            if self._failure is not None and self._all_listen():
                self._end(*self._failure)
            if self._ending.is_set():
                if self.goodbye.heard(time.monotonic(), self._end_by, committed=self._agreement.committed):
                    self._send_last_beats()
                    self._ended.set()
            elif not self._agreement.committed:
                self._judge()
                self._judge_device()
                if self.tells_waits and (
                    slow := self._slowness.sentence(self.hearing, self.main.here(), time.monotonic())
                ):
                    self.say(slow)
                self.on_period(*self.main.work)
            self.cpu_seconds = time.thread_time()
            if self._ended.is_set():
                return
            hurried = (self._ending.is_set() or self._agreement.under_way) and now < self._hurry_until
            due = now + (PERIOD_S / 10 if hurried else PERIOD_S)
            self._wait(due)

    def _wait(self, due: float) -> None:
        number = self._signals.wait(due - time.monotonic())
        if number is not None:
            place, rank = self.main.place, self.cluster.rank
            sentence = f"rank {rank} was stopped by {number.name} at step {place.step} in {place.phase}"
            lost = Lost(rank, place.step, f"stopped by {number.name}")
            self._end(Verdict(EXIT_CODES[number], sentence), Verdict(3, sentence, (lost,)), stopped=True)

    def _beat(self) -> dict[str, Any]:
        return self.hearing.beat(self.main.here(), self._pressure.share(), time.monotonic())

    def _send_last_beats(self) -> None:
        """To all at once: no more will come."""
        for _ in range(SENT_TIMES):
            self.post.tell(self._beat())

    def _listen(self, frozen_s: float) -> None:
        """Take in all that has come; after a freeze the verdict on this rank may be waiting there."""
        while not self._come_back.empty():
            member = self._come_back.get()
            self.post.addresses[member.rank] = member.ip, member.udp_port
            self.hearing.take_in(member.rank, time.monotonic())
            self._parting.taken_in(member.rank, time.monotonic())
        messages = self.post.messages()
        for message in messages:
            if message["kind"] == "beat":
                self.hearing.take(message, time.monotonic())
            elif message["kind"] == "killed":
                self.hearing.killed.add(message["rank"])
        if not (self._agreement.committed or self._ending.is_set()):
            for message in messages:
                if message["kind"] == "verdict":
                    self._adopt(Verdict.from_json(message["verdict"]), message["stopped"])
        if frozen_s > FROZEN_S:
            self._forgiven_at = time.monotonic()
            self.hearing.forgive(self._forgiven_at)
        desk = self.cluster.desk
        if desk is not None:
            desk.serve(self._parting.heard_at | {rank: peer.heard_at for rank, peer in self.hearing.peers.items()})
            if desk.board.refusal is not None and not self._agreement.bound:
                self._turn_away(desk.board)

    def _all_listen(self) -> bool:
        """Whether every other rank hears verdicts, or has had LINGER_S to begin.

        Until its first beat a rank opens the store, which ends with rank 0's process: it would wait out its own bound
        and name that, where a disk that was full from the start is what all should say.
        """
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        return self.hearing.started() >= set(self.hearing.peers) or now - self._failed_at > LINGER_S

    def _turn_away(self, board: RendezvousServer) -> None:
        """On rank 0: end with the board's refusal, once every member knows it or listens for verdicts.

        Until its first beat a member still asks the board or opens the store, which both end with this process: it
        would wait out its own bound and name something else: 6 of 36 starts did on two busy cores.
        """
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        if now - self._refused_at < LINGER_S and board.unaware(self.hearing.started()):
            return
        verdict = Verdict(3, str(board.refusal))
        self._leave(verdict, verdict)

    def _adopt(self, verdict: Verdict, stopped: bool) -> None:
        """End, or part, as another rank says; a stop of all ranks reaches this one too, and then counts as its own."""
        if self._parting.of_a_former_life(verdict, time.monotonic()):
            return
        if stopped:
            self._wait(time.monotonic() + OWN_SIGTERM_S)
        if self._parting.allows(verdict):
            self._part(verdict)
            return
        own = verdict
        given_up = self.cluster.rank in {lost.rank for lost in verdict.lost}
        if given_up:
            own = replace(
                verdict, sentence=f"rank {self.cluster.rank} was declared dead by the other ranks: {verdict.sentence}"
            )
        self._leave(own, verdict, stopped, given_up)

    def _judge(self) -> None:
        now = time.monotonic()
        gone = self._parting.gone(self.hearing.seen(self.main.place, now))
        if gone is not None and not self._agreement.bound and self._parting.allows(gone):
            self._part(gone)
        verdict = self._judging.verdict(self.main.place, now)
        if verdict is None:
            return
        if self._agreement.bound:
            self.goodbye.outlive(verdict, now)
            self._judging.settled()
        elif self._parting.allows(verdict):
            self._part(verdict)
        else:
            self._leave(verdict, verdict)

    def _judge_device(self) -> None:
        """End this rank where NCCL has given up a collective, and the main thread waits for its GPU all the same: a
        kernel that does not end keeps the calls behind it from raising."""
        now = time.monotonic()
        if not self.gave_up():
            return
        self._gave_up_at = self._gave_up_at or now
        if now - self._gave_up_at > RAISES_S:
            bound = f"LAB_COLLECTIVE_TIMEOUT_S={self.config.collective_timeout_s:g}"
            error = TimeoutError(f"a collective took longer than {bound}: NCCL gave it up, and this rank's GPU hangs")
            place = self.main.here()
            self._end(*failed(self.cluster.rank, place, error, self.hearing.behind(place, now)))

    def _part(self, verdict: Verdict) -> None:
        if self._parting.part(verdict):
            self._judging.settled()

    def _end(self, own: Verdict, to_others: Verdict, stopped: bool = False) -> NoReturn:
        """An end of this rank's own. If it is bound to the verdict it changes that for nobody else."""
        if self._agreement.bound:
            self.goodbye.leave()
            self._send_last_beats()
            self._departure.leave(own, None)
        self._leave(own, to_others, stopped)

    def _leave(self, own: Verdict, to_others: Verdict, stopped: bool = False, given_up: bool = False) -> NoReturn:
        self.post.tell_verdict(to_others, stopped)
        lost = {entry.rank for entry in to_others.lost}
        survivors = sorted(self.hearing.heard(time.monotonic()) & self.hearing.present() - lost)
        cut_off = self.cluster.rank in lost and own is to_others
        given_up = given_up or (cut_off and self._parting.on_left is not None)  # the others go on, and have the word
        self._departure.leave(own, Succession(survivors, self.hearing, self.post, given_up=given_up, cut_off=cut_off))
