"""What one rank knows of the others from their heartbeats: whom it hears, whom they hear, where they are.

Each heartbeat carries the sender's whole table of who hears whom, a counter and a bit mask a rank. So two ranks that
have lost only each other still learn through a third that both are alive, and all come to the same table within a few
periods. A rank's row is fresh as long as its counter grows, whoever brings it. Times are monotonic seconds of this
rank.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from distlab.cluster.address import receive, send
from distlab.cluster.authenticated_messages import MAX_GROUPS
from distlab.cluster.heartbeat_helper import HeartbeatHelper, count_at, turn_of, turns_of
from distlab.cluster.message_signer import MessageSigner
from distlab.cluster.rendezvous import Cluster
from distlab.report.records import Lost


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


@dataclass
class Row:
    """Whom one rank hears, as it said at its heartbeat number `count`."""

    count: int = 0
    mask: int = 0
    fresh_at: float = 0.0


@dataclass
class RunPosition:
    """Where a rank is in its run; `turn` counts its changes of place, the same on all ranks of a step.

    `calls` are the collectives that it has begun in this place: of two ranks in one place, the one with fewer is
    behind.
    """

    turn: int = 0
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    calls: int = 0


@dataclass
class Peer:
    """The last heartbeat of another rank that came directly."""

    heard_at: float
    turn: int = 0
    calls: int = 0  # begun in its present place
    in_phase_s: float = 0.0
    acknowledged: int = 0  # the ranks whose goodbye it has heard, as a mask
    seen: LastReport = field(default_factory=lambda: LastReport(0, "start"))


class Hearing:
    """The table of who hears whom, as rank `rank` knows it. Ranks that have said goodbye are in it no more."""

    def __init__(self, rank: int, ranks: Iterable[int], lost_after_s: float, now: float) -> None:
        self.rank, self.lost_after_s = rank, lost_after_s
        self.peers = {other: Peer(heard_at=now) for other in ranks if other != rank}
        # In a large world a rank beats to each other one in turns only: its link is broken after as many beats as in a
        # small one, since datagrams get lost; whether it lives at all the others tell meanwhile.
        self.direct_s = lost_after_s * turns_of(len(self.peers))
        self.rows = {other: Row(fresh_at=now) for other in self.peers}
        self.accepted = self.bound = 0  # masks of those that have come so far in the verdict: shutdown.py
        self.ended = 0  # mask of those that came to a normal end
        self.left = 0  # of those among them that have gone: their next silence is no loss, and nobody waits for it
        self.killed: set[int] = set()  # by the kernel, as their last words tell
        self._count = 0
        everyone = to_mask([rank, *self.peers])
        for row in self.rows.values():
            row.mask = everyone

    def beat(self, place: RunPosition, memory_share: float | None, now: float) -> dict[str, Any]:
        """This rank's next heartbeat."""
        self._count = max(self._count + 1, count_at(now))
        rows = self.rows | {self.rank: Row(self._count, to_mask(self.heard(now)))}
        hears = alike(rows, first=self.rank)
        told = {rank for _, ranks in hears for rank in ranks}
        counts = [rows[rank].count if rank in told else 0 for rank in range(max(rows) + 1)]
        return {
            "kind": "beat", "rank": self.rank, "turn": place.turn, "calls": place.calls, "step": place.step, "phase": place.phase,
            "in_phase_s": round(now - place.since, 2), "memory": memory_share,
            "accepted": self.accepted, "bound": self.bound, "ended": self.ended, "left": self.left,
            "counts": counts, "hears": hears,
        }  # fmt: skip

    def take(self, beat: dict[str, Any], now: float) -> None:
        """Learn from another rank's heartbeat; one that comes from a rank that was forgotten is too late."""
        peer = self.peers.get(beat["rank"])
        if peer is None:
            return
        peer.heard_at, peer.in_phase_s, peer.acknowledged = now, beat["in_phase_s"], beat["ended"]
        peer.turn, peer.calls = beat["turn"], beat["calls"]
        peer.seen = LastReport(beat["step"], beat["phase"], beat["memory"])
        self.ended |= beat["ended"]
        self.left |= beat["left"]
        self.accepted |= beat["accepted"]
        self.bound |= beat["bound"]
        for mask, ranks in beat["hears"]:
            for rank in ranks:
                row, count = self.rows.get(rank), beat["counts"][rank] if rank < len(beat["counts"]) else 0
                if row is not None and count > row.count:
                    row.count, row.mask, row.fresh_at = count, mask, now

    def forget(self, rank: int) -> Peer:
        """Go on as if `rank` had never been here; returns what was known of it."""
        del self.rows[rank]
        self.killed.discard(rank)
        return self.peers.pop(rank)

    def take_in(self, rank: int, now: float) -> None:
        """`rank` is another process now, and here again."""
        self.peers[rank], self.rows[rank] = (
            Peer(heard_at=now),
            Row(mask=to_mask([self.rank, *self.peers]), fresh_at=now),
        )
        self.killed.discard(rank)

    def forgive(self, now: float) -> None:
        """This rank was frozen itself: nobody's silence counts until now."""
        for rank, peer in self.peers.items():
            peer.heard_at = self.rows[rank].fresh_at = now

    def heard(self, now: float) -> set[int]:
        """The ranks that this one hears itself, itself among them."""
        alive = {rank for rank, peer in self.peers.items() if now - peer.heard_at <= self.direct_s}
        return {self.rank} | alive - self.silent(now) - self.killed

    def silent(self, now: float) -> set[int]:
        """The other ranks of which nobody brings anything new."""
        rows = list(self.rows.items())  # the main thread asks, too
        return {rank for rank, row in rows if now - row.fresh_at > self.lost_after_s}

    def started(self) -> set[int]:
        """The other ranks of which at least one heartbeat is known, whoever brought it."""
        return {rank for rank, row in self.rows.items() if row.count > 0}

    def counts(self) -> dict[int, int]:
        """The number of the last heartbeat known of each other rank."""
        return {rank: row.count for rank, row in self.rows.items()}

    def present(self) -> set[int]:
        """The ranks that have not come to their end."""
        return {self.rank, *self.peers} - to_ranks(self.ended & ~(1 << self.rank))

    def hears(self, now: float) -> dict[int, set[int]]:
        """What each rank that still sends hears, of those present: the voters and their votes."""
        present = self.present()
        silent = self.silent(now)
        fresh = {rank: to_ranks(row.mask) for rank, row in self.rows.items() if rank not in silent}
        fresh[self.rank] = self.heard(now)
        return {rank: mask & present for rank, mask in fresh.items() if rank in present - self.killed}

    def seen(self, place: RunPosition, now: float) -> dict[int, LastReport]:
        """The last words of every rank, with the seconds since."""
        last = {
            rank: replace(peer.seen, silent_s=now - self.rows[rank].fresh_at, killed=rank in self.killed)
            for rank, peer in self.peers.items()
        }
        return last | {self.rank: LastReport(place.step, place.phase)}

    def waited_for(self, place: RunPosition) -> dict[int, Peer]:
        """Those whom this rank waits for: who has changed place, or begun collectives in this place, less often."""
        others = {rank: self.peers[rank] for rank in sorted(self.present() - {self.rank})}
        return {rank: peer for rank, peer in others.items() if (peer.turn, peer.calls) < (place.turn, place.calls)}

    def behind(self, place: RunPosition, now: float, but: Container[int] = ()) -> list[str]:
        """The same, each with where it is, `but` for some."""
        return [
            f"rank {rank} ({peer.seen.place} for {peer.in_phase_s + now - peer.heard_at:.1f} s)"
            for rank, peer in self.waited_for(place).items()
            if rank not in but
        ]


def alike(rows: Mapping[int, Row], first: int) -> list[tuple[int, list[int]]]:
    """The ranks that hear the same ranks, together: of a whole cluster one group, where a rank is lost two or three.

    At most MAX_GROUPS of them, the largest, and that of rank `first`; others have told theirs themselves.
    """
    groups: dict[int, list[int]] = {}
    for rank in sorted(rows):
        groups.setdefault(rows[rank].mask, []).append(rank)
    order = sorted(groups.items(), key=lambda group: (first not in group[1], -len(group[1])))
    return order[:MAX_GROUPS]


def to_mask(ranks: Iterable[int]) -> int:
    """Ranks as bits."""
    return sum(1 << rank for rank in ranks)


def to_ranks(mask: int) -> set[int]:
    """The ranks of a mask."""
    return {rank for rank in range(mask.bit_length()) if mask >> rank & 1}


# What the watches of a run tell each other: sealed datagrams from each rank's one UDP socket, to all other ranks at
# once.
#
# A thread takes them from the socket as they come, so that a flood of garbage, which costs some microseconds each,
# does not fill the kernel's buffer (200 KiB) while the watch sleeps, and push out the others' heartbeats.

SENT_TIMES = 3  # words that nobody would ask for again
KINDS = ("beat", "verdict", "killed", "written")
BATCH_S = 0.02  # heartbeats that come within this time are taken at once
FLOOD = 64  # more datagrams than all ranks send in that time


class Post:
    """The addresses of all other ranks; what comes from another run is not read."""

    def __init__(self, cluster: Cluster) -> None:
        self._socket, self._token = cluster.socket, cluster.token
        self._seal, self._opener = cluster.seal, cluster.opener
        self.sent_bytes = 0
        self.pulse = HeartbeatHelper(cluster.socket, cluster.seal.key, cluster.token)
        self.addresses = {
            rank: (member.ip, member.udp_port) for rank, member in cluster.members.items() if rank != cluster.rank
        }
        self._turn = 0
        self._come: deque[dict[str, Any]] = deque()
        self._closed = False
        self._taking = threading.Lock()
        threading.Thread(target=self._take_on, name="post", daemon=True).start()

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message to every other rank."""
        datagram = self._seal.seal(message, self._token)
        for address in self.addresses.values():
            self.sent_bytes += send(self._socket, datagram, address)

    def tell_beat(self, beat: dict[str, Any]) -> None:
        """Send a heartbeat to those whose turn it is, and leave it with the process that repeats it while this one
        cannot."""
        datagram, addresses = self._seal.seal(beat, self._token), list(self.addresses.values())
        for address in turn_of(addresses, self._turn):
            self.sent_bytes += send(self._socket, datagram, address)
        self._turn += 1
        self.pulse.note(beat, addresses)

    def tell_verdict(self, verdict: Verdict, stopped: bool) -> None:
        """Send the words that this rank leaves by, or parts from others."""
        for _ in range(SENT_TIMES):
            self.tell({"kind": "verdict", "verdict": verdict.to_json(), "stopped": stopped})

    def last_words(self, rank: int) -> list[bytes]:
        """What is said for this rank if the kernel kills it, sealed in advance: its key is written nowhere."""
        apart = MessageSigner(self._seal.key)  # with numbers of its own: this rank's will be far beyond these
        return [apart.seal({"kind": "killed", "rank": rank}, self._token) for _ in range(SENT_TIMES)]

    def messages(self) -> list[dict[str, Any]]:
        """All that has come from ranks of this run since the last time.

        A rank that was paused hears here what was said meanwhile, before it says or does anything itself.
        """
        with suppress(OSError, ValueError):
            self._take()
        return [self._come.popleft() for _ in range(len(self._come))]

    def _take_on(self) -> None:
        while not self._closed:
            try:
                select.select([self._socket], [], [], 1.0)
                count = self._take()
            except (OSError, ValueError):  # it was closed meanwhile
                return
            if count < FLOOD:
                time.sleep(BATCH_S)

    def _take(self) -> int:
        """Take all that is there; returns how many datagrams that were."""
        count = 0
        with self._taking:
            for datagram, source in receive(self._socket):
                count += 1
                opened = self._opener.open(datagram, source)
                if opened is not None and opened.audience == self._token and opened.message["kind"] in KINDS:
                    self._come.append(opened.message)
        return count

    def close(self) -> None:
        """Hear no more, and beat no more."""
        self._closed = True
        self.pulse.close()
        self._socket.close()
