"""A tap between ranks, without privileges: ranks other than 0 are given its port as MASTER_PORT, and it passes on what
they say to the board and what all say to them, and keeps a copy of each datagram."""

import json
import selectors
import socket
import threading
from typing import Any

from distlab.cluster.message_signer import HEAD, MAC_BYTES

HERE = "127.0.0.1"


class Tap:
    """Stands at `port` for the board at `board_port`; `heard` are real datagrams, the newest last."""

    def __init__(self, board_port: int, fuzzer: tuple[str, int]) -> None:
        self.fuzzer = fuzzer  # what comes from there is none of the real ones
        self.heard: list[bytes] = []
        self.sealed: dict[str, Any] | None = None  # the board's answer that tells the members, once it has come
        self._board = (HERE, board_port)
        self._front = self._bound()
        self.port = int(self._front.getsockname()[1])
        self._askers: dict[tuple[str, int], socket.socket] = {}  # by a rank's address: where it is answered
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._front, selectors.EVENT_READ, None)
        threading.Thread(target=self._pass_on, daemon=True).start()

    @staticmethod
    def _bound() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((HERE, 0))
        return made

    def ports(self) -> list[int]:
        """Where ranks hear heartbeats: the askers' own, and all that the board has told."""
        told = [member["udp_port"] for member in self.sealed["members"]] if self.sealed else []
        return [*(port for _, port in self._askers), *told]

    def _pass_on(self) -> None:
        while True:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                datagram, source = key.fileobj.recvfrom(65536)
                if source == self.fuzzer:
                    if key.data is not None:  # at the port that the others take for this rank's own
                        self._front.sendto(datagram, key.data)
                    continue
                if key.data is not None:
                    self._front.sendto(datagram, key.data)
                else:
                    self._back(source).sendto(datagram, self._board)
                self._keep(datagram)

    def _back(self, asker: tuple[str, int]) -> socket.socket:
        if asker not in self._askers:
            self._askers[asker] = self._bound()
            self._selector.register(self._askers[asker], selectors.EVENT_READ, asker)
        return self._askers[asker]

    def _keep(self, datagram: bytes) -> None:
        self.heard.append(datagram)
        if self.sealed is None and b'"kind":"sealed"' in datagram:
            self.sealed = json.loads(datagram[HEAD.size + MAC_BYTES :])["sealed"]
