"""How the ranks of a group get their connections: each listens, writes where into the group's store, and dials those
before it.

Two ranks that met in an earlier group have their connection. Who dials says a secret of the group's store and its rank;
who does not know the secret is not listened to. Every wait has a bound, and names whom it waited for.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.parallel.channel import Channel
from workers.parallel.tcp_group import TcpGroup
from workers.parallel.transport import LinkError, Transport

SECRET_BYTES = 16
HELLO = struct.Struct(f"={SECRET_BYTES}si")


class Dialling:
    """The connections of this process, which listens at `host`; `register` makes "tcp" a backend of torch's."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.transport: Transport | None = None

    def register(self) -> None:
        """Let `init_process_group("tcp")` and `new_group(backend="tcp")` make groups over these connections."""
        dist.Backend.register_backend("tcp", self._create, extended_api=True, devices=["cpu"])

    def _create(self, options: Any, _: Any) -> TcpGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id)
        return TcpGroup(self.channel(options.store, ranks, options.group_rank, name, options.timeout.total_seconds()))

    def channel(self, store: dist.Store, ranks: Sequence[int], place: int, name: str, timeout_s: float) -> Channel:
        """A channel of `ranks`, of which this process is number `place`; raises LinkError naming who is missing."""
        if self.transport is None or (not self.transport.groups and not self.transport.ranks):
            self.transport = Transport(timeout_s)
        own = ranks[place]
        missing = [rank for rank in ranks if rank != own and rank not in self.transport.ranks]
        if missing:
            for rank, connection in connect(store, self.host, own, missing, timeout_s).items():
                self.transport.add(rank, connection)
        return Channel(self.transport, ranks, place, name)


def connect(
    store: dist.Store, host: str, own: int, others: Sequence[int], timeout_s: float
) -> dict[int, socket.socket]:
    """A connection to each of `others`, all of whom call this too."""
    deadline = time.monotonic() + timeout_s
    secret = bytes.fromhex(store.compare_set("tcp/secret", "", secrets.token_hex(SECRET_BYTES)).decode())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=len(others)) as listening:
        store.set(f"tcp/{own}", f"{host} {listening.getsockname()[1]}")
        try:
            found = {rank: dial(store, rank, own, secret, deadline) for rank in others if rank < own}
            waiting = {rank for rank in others if rank > own}
            while waiting:
                rank, connection = accept(listening, secret, waiting, deadline)
                found[rank] = connection
                waiting.remove(rank)
        finally:  # all who dial have read it, and a later group may have this one's name
            store.delete_key(f"tcp/{own}")
    return found


def dial(store: dist.Store, rank: int, own: int, secret: bytes, deadline: float) -> socket.socket:
    """A connection to a rank that listens."""
    try:
        store.wait([f"tcp/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        host, port = store.get(f"tcp/{rank}").decode().split()
        connection = socket.create_connection((host, int(port)), max(0.01, deadline - time.monotonic()))
        connection.sendall(HELLO.pack(secret, own))
    except (dist.DistStoreError, OSError) as error:
        raise LinkError(f"no connection to rank {rank}: {error}") from None
    return connection


def accept(listening: socket.socket, secret: bytes, waiting: set[int], deadline: float) -> tuple[int, socket.socket]:
    """The next rank of `waiting` that dials, and its connection."""
    while True:
        listening.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            raise LinkError(
                f"no connection from rank {', '.join(map(str, sorted(waiting)))}: it did not dial"
            ) from None
        connection.settimeout(1.0)
        try:
            said, rank = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            said, rank = b"", -1
        if hmac.compare_digest(said, secret) and rank in waiting:
            return rank, connection
        connection.close()
