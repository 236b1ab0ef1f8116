"""The ledger: what a stretch of the program called, and what its sockets sent meanwhile, by operation, axis and peer.

Two of the three sources of every byte count stand here side by side: called (calls.py) and wire (sockets.py); the third
is the prediction (formulas/). Each rank counts what it sends itself. To name the rank at the other end of a connection,
all ranks tell each other the ends of theirs: so the names are right between containers, and between local ranks, which
all have one address. Row r of the matrix "who sent how much to whom" is rank r's `wire`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.measure import sockets
from workers.measure.calls import CalledOp, Calls
from workers.measure.sockets import Connection, Endpoint, NoDiagnostics


@dataclass(frozen=True)
class WireBytes:
    """Bytes to one peer: each byte sent once, and apart from it what TCP had to send again."""

    sent: float = 0
    retransmitted: float = 0


@dataclass
class Traffic:
    """What one `count()` saw; complete when its block has ended."""

    called: list[CalledOp] = field(default_factory=list)
    wire: dict[int, WireBytes] = field(default_factory=dict)  # one entry for every other rank
    wire_error: str | None = None  # why `wire` is empty, where the system gives no counters

    def per(self, steps: int) -> "Traffic":
        """The same, divided by the number of `steps` that were counted together."""
        return Traffic(
            [
                CalledOp(op.op, op.axis, op.calls / steps, op.raw_bytes / steps, op.called_bytes / steps)
                for op in self.called
            ],
            {peer: WireBytes(wire.sent / steps, wire.retransmitted / steps) for peer, wire in self.wire.items()},
            self.wire_error,
        )

    @property
    def calls(self) -> float:
        return sum(entry.calls for entry in self.called)

    @property
    def called_bytes(self) -> float:
        return sum(entry.called_bytes for entry in self.called)

    @property
    def wire_bytes(self) -> float:
        return sum(peer.sent for peer in self.wire.values())


class Ledger:
    """Counts a rank's traffic. `exchange(key, value)` returns all ranks' values in rank order, and must not use the
    group.

    Connections that have `store_port` at either end are the store's and are left out.
    """

    def __init__(
        self, rank: int, world_size: int, exchange: Callable[[str, Any], list[Any]], store_port: int | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store_port = store_port
        self._exchange = exchange
        self._count = 0

    @contextmanager
    def count(self, *, calls: bool = True) -> Iterator[Traffic]:
        """Count inside the block. Every rank must enter and leave it: its end names the peers, by `exchange`.

        What was called is to be waited for inside the block. An error inside the block passes through, uncounted. To
        see calls costs each operation of this thread some time, and other threads' are not seen: without `calls` the
        wire alone is read.
        """
        traffic = Traffic()
        before = self._connections()
        seen = Calls()
        with seen if calls else nullcontext():
            yield traffic
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # NCCL sends when its stream comes to it
        after = self._connections()
        traffic.called = seen.ops()
        self._name_peers(traffic, before, after)

    def _connections(self) -> dict[int, Connection] | str:
        try:
            found = sockets.connections()
        except NoDiagnostics as error:
            return str(error)
        ends_of = (
            (inode, connection, (connection.local[1], connection.remote[1])) for inode, connection in found.items()
        )
        return {inode: connection for inode, connection, ports in ends_of if self.store_port not in ports}

    def _name_peers(
        self, traffic: Traffic, before: dict[int, Connection] | str, after: dict[int, Connection] | str
    ) -> None:
        """Fill in `wire` and `wire_error`: only what all ranks can measure is measured, or the matrix would lack
        rows."""
        self._count += 1
        mine: Any = after
        if not isinstance(before, str) and not isinstance(after, str):
            mine = [
                (now.local, now.remote, _add(WireBytes(), now, before.get(inode)).sent) for inode, now in after.items()
            ]
        ends = self._exchange(f"ledger/{self._count}", before if isinstance(before, str) else mine)
        errors = [f"{value} on rank {rank}" for rank, value in enumerate(ends) if isinstance(value, str)]
        if errors or isinstance(before, str) or isinstance(after, str):
            traffic.wire_error = errors[0]
            return
        # Both ends together name a connection: the kernel gives two connections one local port if they lead to
        # different places, and on a machine with some hundred of them it does. A rank that has left meanwhile (None)
        # names none.
        used = [(rank, tuple(near), tuple(far), sent) for rank, of in enumerate(ends) for near, far, sent in of or ()]
        owner = {(near, far): rank for rank, near, far, _ in used}
        nobodys = [(rank, near, far) for rank, near, far, sent in used if sent and (far, near) not in owner]
        if nobodys and None not in ends:
            traffic.wire_error = unmatched(*nobodys[0])
            return
        traffic.wire = {peer: WireBytes() for peer in range(self.world_size) if peer != self.rank}
        for inode, connection in after.items():
            peer = owner.get((connection.remote, connection.local), self.rank)
            if peer != self.rank:
                traffic.wire[peer] = _add(traffic.wire[peer], connection, before.get(inode))


def unmatched(rank: int, near: Endpoint, far: Endpoint) -> str:
    """Why nobody can say to which rank some bytes went."""
    return (
        f"wire bytes are not known: rank {rank} has a connection from {near[0]}:{near[1]} to {far[0]}:{far[1]} of which"
        " no rank has the other end, as where addresses are translated on the way or a proxy stands between"
    )


def _add(total: WireBytes, now: Connection, then: Connection | None) -> WireBytes:
    """`total` and what a connection sent since `then`, or since it was opened."""
    sent, retransmitted = (then.sent_bytes, then.retransmitted_bytes) if then else (0, 0)
    return WireBytes(total.sent + now.sent_bytes - sent, total.retransmitted + now.retransmitted_bytes - retransmitted)
