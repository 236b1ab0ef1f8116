"""What the watches of a run tell each other: sealed datagrams from each rank's one UDP socket, to all other ranks at
once.

A thread takes them from the socket as they come, so that a flood of garbage, which costs some microseconds each, does
not fill the kernel's buffer (200 KiB) while the watch sleeps, and push out the others' heartbeats.
"""

import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from workers.cluster.board_socket import receive, send
from workers.cluster.pulse import Pulse, turn_of
from workers.cluster.rendezvous import Cluster
from workers.cluster.sealed import Seal
from workers.cluster.verdict import Verdict

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
        self.pulse = Pulse(cluster.socket, cluster.seal.key, cluster.token)
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
        apart = Seal(self._seal.key)  # with numbers of its own: this rank's will be far beyond these
        return [apart.seal({"kind": "killed", "rank": rank}, self._token) for _ in range(SENT_TIMES)]

    def messages(self) -> list[dict[str, Any]]:
        """All that has come from ranks of this run since the last time.

        A rank that was paused hears here what was said meanwhile, before it says or does anything itself.
        """
        with suppress(OSError, ValueError):
            self._take()
        return [self._come.popleft() for _ in range(len(self._come))]

    def _take_on(self) -> None:
        """Take what comes, on a thread of its own."""
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
