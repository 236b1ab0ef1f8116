"""The socket at which rank 0's board is asked: JSON datagrams on MASTER_PORT, beside the store's TCP port."""

import errno
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workers.cluster.address import Address
from workers.cluster.board import Board, Claim

MAX_DATAGRAM_BYTES = 65536
RESEND_S = 0.5  # a lost reply is asked for again within this time
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def send(udp: socket.socket, message: dict[str, Any], address: tuple[str, int]) -> None:
    """Send one message; what the network loses is sent again by whoever needs it."""
    try:
        udp.sendto(json.dumps(message).encode(), address)
    except OSError:  # no route, a full buffer: as good as lost on the way
        return


def receive(udp: socket.socket) -> list[tuple[dict[str, Any], tuple[str, int]]]:
    """All messages that have come, with their senders; what is no JSON object is dropped."""
    messages: list[tuple[dict[str, Any], tuple[str, int]]] = []
    while True:
        try:
            data, address = udp.recvfrom(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT)
        except ConnectionError:  # the host of an earlier datagram refused it
            continue
        except OSError:  # nothing more has come
            return messages
        try:
            message = json.loads(data)
        except ValueError:
            continue
        if isinstance(message, dict):
            messages.append((message, (str(address[0]), int(address[1]))))


def udp_socket(family: int, ip: str = "", port: int = 0) -> socket.socket:
    """A bound UDP socket; raises OSError where the port is taken."""
    udp = socket.socket(family, socket.SOCK_DGRAM)
    try:
        udp.bind((ip, port))
    except OSError:
        udp.close()
        raise
    return udp


class Desk:
    """The board and its socket: answers those who ask, whenever `serve` is called."""

    def __init__(self, board: Board, udp: socket.socket) -> None:
        self.board, self.udp = board, udp

    def serve(self, heard_at: Mapping[int, float] | None = None) -> None:
        """Answer all claims that have come; `heard_at` as in Board.answer."""
        for message, address in receive(self.udp):
            try:
                claim = Claim(**message["claim"])
            except (KeyError, TypeError):
                continue
            reply = self.board.answer(claim, *address, time.monotonic(), heard_at)
            send(self.udp, reply | {"to": claim.uid}, address)

    def linger(self, at_most_s: float) -> None:
        """Stay until every rank has heard the refusal, or for `at_most_s`."""
        deadline = time.monotonic() + at_most_s
        told_at = None
        while time.monotonic() < deadline:
            self.serve()
            if told_at is None and self.board.all_told():
                told_at = time.monotonic()
            if told_at is not None and time.monotonic() - told_at > RESEND_S:
                return
            time.sleep(0.02)


def ask(udp: socket.socket, claim: Claim, address: tuple[str, int]) -> None:
    """Send one claim to the board."""
    send(udp, {"claim": asdict(claim)}, address)


def open_ports(address: Address, port: int) -> tuple[socket.socket, socket.socket] | None:
    """Rank 0's listening TCP socket, for the store, and its UDP socket, for the board; None while one is taken.

    On localhost both are opened there alone; else on all addresses, since others may know this host by another.
    """
    own = address.ip if address.name in LOOPBACK_NAMES else ""
    tcp = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past the TIME_WAIT of an earlier run
        tcp.bind((own, port))
        tcp.listen(128)
        return tcp, udp_socket(address.family, own, port)
    except OSError as error:
        tcp.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
