"""How the ranks of a group get their connections: each listens, writes where into the group's store, and dials those
before it.

Two ranks that met in an earlier group have their connection. Both ends prove the key of the run (handshake.py) before a
byte of the other is believed. Every wait has a bound, one for all connections together, and names whom it waited for.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.transport.handshake import Door, TurnedAway, Who, dialled, listen, unheeded
from distlab.transport.process_group import TcpGroup
from distlab.transport.tcp import Channel, LinkError, Transport

TICK_S = 0.5


class TcpBackend:
    """The connections of this process, which listens at `host` for those with the key; `register` makes "tcp" a backend
    of torch's."""

    def __init__(self, host: str, key: bytes, turned_away: TurnedAway = unheeded) -> None:
        self.host, self.key, self.turned_away = host, key, turned_away
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
            for rank, connection in self.connect(store, own, missing, timeout_s).items():
                self.transport.add(rank, connection)
        return Channel(self.transport, ranks, place, name)

    def connect(self, store: dist.Store, own: int, others: Sequence[int], timeout_s: float) -> dict[int, socket.socket]:
        """A connection to each of `others`, all of whom call this too."""
        deadline = time.monotonic() + timeout_s
        with listen(self.host) as listening, selectors.DefaultSelector() as selector:
            door = Door(listening, selector, self.key, purpose(own), lambda: Who(own), self.turned_away)
            store.set(f"tcp/{own}", f"{self.host} {listening.getsockname()[1]}")
            try:
                found = {rank: self._dial(store, rank, own, deadline) for rank in others if rank < own}
                found |= accepted(door, selector, {rank for rank in others if rank > own}, deadline)
            finally:  # all who dial have read it, and a later group may have this one's name
                store.delete_key(f"tcp/{own}")
                door.close()
        return found

    def _dial(self, store: dist.Store, rank: int, own: int, deadline: float) -> socket.socket:
        """A connection to a rank that listens."""
        try:
            store.wait([f"tcp/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            host, port = store.get(f"tcp/{rank}").decode().split()
            connection, listener = dialled(host, int(port), self.key, purpose(rank), Who(own), deadline)
        except (dist.DistStoreError, OSError, ValueError) as error:
            raise LinkError(f"no connection to rank {rank}: {error}") from None
        if listener.rank != rank:
            connection.close()
            raise LinkError(f"no connection to rank {rank}: rank {listener.rank} listens in its place")
        return connection


def accepted(
    door: Door, selector: selectors.BaseSelector, waiting: set[int], deadline: float
) -> dict[int, socket.socket]:
    """A connection from each rank of `waiting`; strangers are heard beside them, and hold up nobody."""
    found: dict[int, socket.socket] = {}
    while missing := waiting - found.keys():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LinkError(f"no connection from rank {', '.join(map(str, sorted(missing)))}: it did not dial")
        for key, _ in selector.select(min(left_s, TICK_S)):
            come = door.step(key)
            if come is None:
                continue
            (rank, _life), connection = come
            if rank in missing and rank not in found:
                found[rank] = connection
            else:
                connection.close()
        door.expire()
    return found


def purpose(rank: int) -> str:
    """What the port of a rank is for."""
    return f"transport of rank {rank}"
