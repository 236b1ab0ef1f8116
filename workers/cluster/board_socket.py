"""The socket at which rank 0's board is asked, on MASTER_PORT: what is not sealed with the key of the run is dropped.

An asker does not know whom it speaks to: it *knocks*, with a claim for anyone, and is greeted with the board's number.
Only a claim for that number counts, so that one which was recorded in another run does not. Nothing of the lab's speaks
TCP there: connections are closed as they come, and the port is held so that no other run can have it.
"""

import errno
import socket
import time
from collections.abc import Iterator, Mapping

from workers.cluster.address import Address, is_loopback, source_ip
from workers.cluster.board import Board, Claim
from workers.cluster.dropped import Dropped
from workers.cluster.opening import Opener
from workers.cluster.sealed import ANYONE, HEAD, MAX_BYTES, Seal

AT_ONCE = 1024  # datagrams or connections that are taken in one go: no flood keeps anybody from its work
RESEND_S = 0.5  # a lost reply is asked for again within this time
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
OTHER_KEY = "sealed with another key"


def send(udp: socket.socket, datagram: bytes, address: tuple[str, int]) -> int:
    """Send one datagram; what the network loses is sent again by whoever needs it. Returns the bytes that left."""
    try:
        return udp.sendto(datagram, address)
    except OSError:  # no route, a full buffer: as good as lost on the way
        return 0


def receive(udp: socket.socket) -> Iterator[tuple[bytes, tuple[str, int]]]:
    """The datagrams that have come, AT_ONCE at most, with their senders."""
    for _ in range(AT_ONCE):
        try:
            datagram, address = udp.recvfrom(MAX_BYTES + 1, socket.MSG_DONTWAIT)
        except OSError:
            return
        yield datagram, (str(address[0]), int(address[1]))


def udp_socket(family: int, ip: str = "", port: int = 0) -> socket.socket:
    """A bound UDP socket; raises OSError where the port is taken."""
    udp = socket.socket(family, socket.SOCK_DGRAM)
    try:
        udp.bind((ip, port))
    except OSError:
        udp.close()
        raise
    return udp


def listening_socket(address: Address, port: int = 0) -> socket.socket:
    """A TCP socket that listens; raises OSError where the port is taken.

    It listens where `own_ip` says.
    """
    tcp = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past the TIME_WAIT of an earlier run
        tcp.bind((own_ip(address), port))
        tcp.listen(128)
    except OSError:
        tcp.close()
        raise
    return tcp


def own_ip(address: Address) -> str:
    """Where rank 0 opens its ports: at its own address alone.

    At all where that is a loopback's under another name, as Debian gives a host's own: others know it by another.
    """
    return address.ip if address.name in LOOPBACK_NAMES or not is_loopback(address.ip) else ""


def hearing_ip(address: Address) -> str:
    """Where a rank hears the others: at the address by which it reaches rank 0 at `address`."""
    ip = own_ip(address)
    return source_ip(address.family, ip) or "" if ip else ""


class Desk:
    """The board and its sockets: answers those who ask, whenever `serve` is called. `guard` holds the TCP port."""

    def __init__(
        self, board: Board, udp: socket.socket, key: bytes, dropped: Dropped, guard: socket.socket | None = None
    ) -> None:
        self.board, self.udp, self.guard = board, udp, guard
        self._seal = Seal(key)
        self._dropped = dropped
        self._opener = Opener(key, self._seal.sender, dropped)
        self._opener.know_run(ANYONE)
        if guard is not None:
            guard.setblocking(False)

    def serve(self, heard_at: Mapping[int, float] | None = None) -> None:
        """Answer all claims that have come; `heard_at` as in Board.answer."""
        for datagram, address in receive(self.udp):
            others = self._dropped.by_fault[OTHER_KEY]
            opened = self._opener.open(datagram, address)
            if opened is not None and opened.message["kind"] == "claim":
                if opened.audience == ANYONE:
                    self._reply({"greet": self._seal.sender.hex()}, opened.sender, address)
                else:
                    claim = Claim(**opened.message["claim"])
                    answer = self.board.answer(claim, *address, time.monotonic(), heard_at, opened.message["knows"])
                    self._reply(answer, opened.sender, address)
            elif opened is None and self._dropped.by_fault[OTHER_KEY] > others:
                self._show_key(datagram, address)
        self._turn_away()

    def _reply(self, answer: dict[str, object], asker: bytes, address: tuple[str, int]) -> None:
        send(self.udp, self._seal.seal({"kind": next(iter(answer)), **answer}, asker), address)

    def _show_key(self, datagram: bytes, address: tuple[str, int]) -> None:
        """Let one who knocks with another key see that it is another: it can read no more than that.

        Only a knock is answered, with no knock and less than came: two boards never answer each other.
        """
        _, _, asker, audience, _ = HEAD.unpack_from(datagram)
        shown = self._seal.seal({}, asker)
        if audience == ANYONE != asker and len(shown) < len(datagram):
            send(self.udp, shown, address)

    def _turn_away(self) -> None:
        """Close what has connected; who had sent something is counted. Ranks that only look whether the port is held
        send nothing."""
        for _ in range(AT_ONCE if self.guard is not None else 0):
            assert self.guard is not None
            try:
                connection, address = self.guard.accept()
            except OSError:
                return
            with connection:
                try:
                    said = connection.recv(1, socket.MSG_DONTWAIT)
                except OSError:
                    continue
            if said:
                self._dropped.add("not sealed", (str(address[0]), int(address[1])), "a connection")

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


def open_ports(address: Address, port: int) -> tuple[socket.socket, socket.socket] | None:
    """Rank 0's sockets on `port`: TCP, which is only held, and UDP, for the board; None while one is taken."""
    try:
        tcp = listening_socket(address, port)
        try:
            return tcp, udp_socket(address.family, own_ip(address), port)
        except OSError:
            tcp.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
