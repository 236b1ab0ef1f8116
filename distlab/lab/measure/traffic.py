"""The ledger: which collectives a block of code called, and what its sockets sent, by operation, axis and peer.

Two of the three sources of every byte count are here: called (`Calls`) and wire (`connections`); the third is the
prediction (each technique's costs.py). Each rank counts what it sends itself. To name the rank at the other end of a
connection, all ranks exchange the ends of their connections: this works between containers, and between local ranks,
which share one address. Row r of the traffic matrix, sender by receiver, is rank r's `wire`.
"""

import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# The calls: a dispatch mode that sees every collective and every send while it is on.
#
# PyTorch passes each c10d call through its dispatcher, so a TorchDispatchMode sees it from any caller: the lesson, a
# gradient hook in the backward pass, DDP's reducer in C++, fully_shard, DTensor, a functional collective. Called
# bytes are what the best algorithm sends of the whole tensor (`sent_bytes`, `all_to_all_bytes`). They are computed here
# and not by a costs.py: predictions are compared with them exactly, so neither may use the other.
# Barriers and receives send nothing of their own, and are not counted.
#
# A mode belongs to a thread: a call from a thread that the lesson started itself is not seen. On the CPU the backward
# pass runs on the caller's thread; on CUDA autograd passes the mode to its threads, as tested on an H200.

# A kernel at BackendSelect sees every call just before its device's own kernel, whoever makes it, and passes it on
# with the keys that are left (`KEYS_BELOW`).

DISPATCH_KEY = torch._C.DispatchKey.BackendSelect
KEYS_BELOW = torch._C._dispatch_keyset_full_after(DISPATCH_KEY)


class Shape(NamedTuple):
    """Positions in a c10d operation's arguments of what must be equal on ranks and of what is sent; -1 for none."""

    op: str
    compared: int  # the tensors
    group: int
    whole: int | None = None  # the tensor, or all its parts, of which bytes are sent
    reduce: bool = False
    root: int = -1
    peer: int = -1


# Of torch's c10d, whose schemas are in torch/csrc/distributed/c10d/Ops.cpp.
SHAPES = {
    "allreduce_": Shape("all_reduce", 0, 1, 0, reduce=True),
    "allreduce_coalesced_": Shape("all_reduce", 0, 1, 0, reduce=True),
    "broadcast_": Shape("broadcast", 0, 1, 0, root=2),
    "reduce_": Shape("reduce", 0, 1, 0, reduce=True, root=3),
    "allgather_": Shape("all_gather", 1, 2, 0),
    "_allgather_base_": Shape("all_gather", 1, 2, 0),
    "allgather_coalesced_": Shape("all_gather", 1, 2, 0),
    "allgather_into_tensor_coalesced_": Shape("all_gather", 1, 2, 0),
    "reduce_scatter_": Shape("reduce_scatter", 0, 2, 1, reduce=True),
    "_reduce_scatter_base_": Shape("reduce_scatter", 0, 2, 1, reduce=True),
    "reduce_scatter_tensor_coalesced_": Shape("reduce_scatter", 0, 2, 1, reduce=True),
    "scatter_": Shape("scatter", 0, 2, 1, root=3),
    "gather_": Shape("gather", 1, 2, 1, root=3),
    "alltoall_": Shape("all_to_all", 1, 2, 1),
    "alltoall_base_": Shape("all_to_all", 1, 2, 1),
    "barrier": Shape("barrier", -1, 1),
    "monitored_barrier_": Shape("monitored_barrier", -1, 1),
    "send": Shape("send", 0, 1, 0, peer=2),
    "recv_": Shape("recv", 0, 1, peer=2),
    "recv_any_source_": Shape("recv", 0, 1),
}
# Schema name -> the operation, and which argument is (or lists) the whole tensor; RESULT: it is what the call returns.
RESULT = -1
OPERATIONS = {f"c10d::{name}": (shape.op, shape.whole) for name, shape in SHAPES.items() if shape.whole is not None} | {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::isend": ("send", 0),
}


@dataclass
class CalledOp:
    """All calls of an operation on an axis. `raw_bytes` are the tensors', `called_bytes` what they must send."""

    op: str
    axis: str  # the mesh axis ("dp"), "world", or the group's own name
    calls: float = 0
    raw_bytes: float = 0
    called_bytes: float = 0.0


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler (822 modules) to disable it, as torch's own does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Calls(DispatchMode):
    """`with Calls() as calls: ...` then `calls.ops()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: dict[tuple[str, str], CalledOp] = {}

    def ops(self) -> list[CalledOp]:
        """Return the calls so far, by operation and axis in the order of their first call."""
        return list(self._ops.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first turns into plain tensors and the collectives that it needs
        result = func(*args, **(kwargs or {}))
        name = func._schema.name  # type: ignore[attr-defined]
        if name in OPERATIONS:
            op, position = OPERATIONS[name]
            self._count(op, nbytes_of(result if position == RESULT else args[position]), name, args)
        return result

    def _count(self, op: str, raw_bytes: int, name: str, args: tuple[Any, ...]) -> None:
        group = _group(args)
        called_bytes = sent_by_call(op, raw_bytes, name, args, group)
        entry = self._ops.setdefault((op, axis_of(group)), CalledOp(op, axis_of(group)))
        entry.calls += 1
        entry.raw_bytes += raw_bytes
        entry.called_bytes += called_bytes


def sent_by_call(op: str, nbytes: int, name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """Return the bytes that this rank sends in one call of torch's operation `name`."""
    if op == "gather":  # the argument is this rank's part; all send theirs but the root, args[3]
        return float(nbytes if args[3] != group.rank() else 0)
    if op == "all_to_all":
        return all_to_all_bytes(name, args, group)
    return sent_bytes(op, nbytes, group.size())


def sent_bytes(op: str, nbytes: int, group_size: int) -> float:
    """Return what a rank sends of a tensor of `nbytes`: all of it to a peer, in collectives all but its own Nth.

    An all_reduce sends the parts once to be summed, and once as sums. Where ranks differ (broadcast, reduce, scatter)
    it is their mean.
    """
    if op == "send":
        return float(nbytes)
    others = nbytes - nbytes / group_size
    return 2 * others if op == "all_reduce" else others


# Schema name of an all_to_all -> the positions of its input, and of the number of input rows for each rank.
ALL_TO_ALL_INPUTS = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}


def all_to_all_bytes(name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """Return the bytes that a rank sends in an all_to_all, perhaps uneven: all but its own part."""
    if name not in ALL_TO_ALL_INPUTS:  # a list of parts
        return float(nbytes_of(args[1]) - nbytes_of(args[1][group.rank()]))
    tensor, rows = (args[position] for position in ALL_TO_ALL_INPUTS[name])
    if not rows:  # equal parts
        return sent_bytes("all_to_all", nbytes_of(tensor), group.size())
    whole = float(nbytes_of(tensor))
    kept: float = whole * rows[group.rank()] / max(1, sum(rows))
    return whole - kept


def axis_of(group: dist.ProcessGroup) -> str:
    """Return a group's mesh axis, "world" for the default group, or the group's description."""
    description = group.group_desc
    if description == "default_pg":
        return "world"
    return group.group_name if description in ("", "undefined") else description.removeprefix("mesh_")


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group: a c10d call's first boxed object, a functional collective's last argument."""
    boxed = [value for value in args if isinstance(value, torch.ScriptObject)]
    return dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])


def tensors_in(args: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call, in lists too."""
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


def nbytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(nbytes_of, tensors))


# The wire: what this process's TCP sockets have sent, from the kernel's own counters (Linux socket diagnostics).
#
# One netlink dump (sock_diag(7), INET_DIAG_INFO) lists every TCP socket of the network namespace with its `tcp_info`;
# those whose inode is in /proc/self/fd belong to this process. No privilege is needed, also in a container. The
# protocol is written out here because importing pyroute2, whose DiagSocket does the same, takes 0.15 s on each rank.

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 4, 20, 2, 3
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
INET_DIAG_INFO = 2
STATES = 1 << 1 | 1 << 8  # ESTABLISHED, and CLOSE_WAIT: the peer has hung up, we still hold the socket
TIMEOUT_S = 5.0

HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, pid
REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any socket
MESSAGE = struct.Struct("=B3x2s2s16s16s28xI")  # inet_diag_msg: family, both ports and addresses, ..., inode
ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
NOT_SENT, SENT, RETRANSMITTED = 144, 200, 208  # offsets of these counters in struct tcp_info (linux/tcp.h)

Endpoint = tuple[str, int]  # address, port


class NoDiagnostics(Exception):
    """Raised if the kernel does not report what sockets sent; the message has the reason."""


@dataclass(frozen=True)
class Connection:
    """One TCP connection of this process and what it has sent since it was opened."""

    local: Endpoint
    remote: Endpoint
    sent_bytes: int  # written to the connection, each byte once, including those in the send buffer
    retransmitted_bytes: int


def connections(*store_ports: int) -> dict[int, Connection]:
    """Return this process's TCP connections by inode, except those with one of `store_ports` at either end; raises
    NoDiagnostics if the kernel does not report them."""
    try:
        mine = set(_open_sockets())
        families = (socket.AF_INET, socket.AF_INET6)
        found = {inode: connection for family in families for inode, connection in _dump(family, mine)}
    except (OSError, AttributeError) as error:  # AttributeError: a system without AF_NETLINK
        raise NoDiagnostics(
            f"wire bytes are not measured: this system has no TCP socket diagnostics ({error})"
        ) from error
    return {inode: each for inode, each in found.items() if not {each.local[1], each.remote[1]} & set(store_ports)}


def _open_sockets() -> Iterator[int]:
    """Yield the inode of each open socket."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield status.st_ino


def _dump(family: int, mine: set[int]) -> Iterator[tuple[int, Connection]]:
    """Yield one address family's TCP connections with an inode in `mine`; the kernel lists the whole namespace."""
    request = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), STATES)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(TIMEOUT_S)
        netlink.send(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + request)
        while True:
            batch, at = memoryview(netlink.recv(1 << 16)), 0
            while at < len(batch):
                length, kind, *_ = HEADER.unpack_from(batch, at)
                body, at = batch[at + HEADER.size : at + length], at + length + -length % 4
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise OSError(code, os.strerror(code))
                _, *ends, inode = MESSAGE.unpack_from(body)
                if inode in mine:
                    yield inode, _decode(family, ends, body)


def _decode(family: int, ends: list[bytes], body: memoryview) -> Connection:
    local_port, remote_port, local, remote = ends
    info = _attribute(body[MESSAGE.size :], INET_DIAG_INFO)
    if len(info) < RETRANSMITTED + 8:
        raise OSError("tcpi_bytes_sent came with Linux 4.19")
    sent, retransmitted = struct.unpack_from("=QQ", info, SENT)
    # tcpi_bytes_sent counts a segment at each transmission, also at retransmissions. The last bytes may still wait in
    # the send buffer when a rank reads this: they belong to the step that wrote them.
    (waiting,) = struct.unpack_from("=I", info, NOT_SENT)
    near, far = (
        (_address(family, raw), int.from_bytes(port, "big"))
        for raw, port in ((local, local_port), (remote, remote_port))
    )
    return Connection(near, far, sent - retransmitted + waiting, retransmitted)


def _attribute(attributes: memoryview, wanted: int) -> memoryview:
    at = 0
    while at + ATTRIBUTE.size <= len(attributes):
        length, kind = ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted:
            return attributes[at + ATTRIBUTE.size : at + length]
        at += length + -length % 4
    return attributes[:0]


def _address(family: int, raw: bytes) -> str:
    """Return an address as text; an IPv4 address in an IPv6 socket (::ffff:127.0.0.1) as IPv4."""
    if family == socket.AF_INET:
        return socket.inet_ntoa(raw[:4])
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


# The ledger: both side by side, by operation, axis and peer.


@dataclass(frozen=True)
class WireBytes:
    """Bytes to one peer: each byte sent once, and separately TCP's retransmissions."""

    sent: float = 0
    retransmitted: float = 0


@dataclass
class Traffic:
    """The result of one `count()`; complete when its block has ended."""

    called: list[CalledOp] = field(default_factory=list)
    wire: dict[int, WireBytes] = field(default_factory=dict)  # one entry for every other rank
    wire_error: str | None = None  # why `wire` is empty, where the system gives no counters

    def per(self, steps: int) -> "Traffic":
        """Return the traffic divided by the number of `steps` that were counted together."""
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
    """`exchange(key, value)` returns all ranks' values in rank order, and must not use the group; `unseen` is the
    reason if a backend does not send through sockets."""

    def __init__(
        self, rank: int, world_size: int, exchange: Callable[[str, Any], list[Any]], store_ports: Collection[int] = (),
        *, unseen: str = "",
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.store_ports, self.unseen = rank, world_size, store_ports, unseen
        self._exchange = exchange
        self._count = 0

    @contextmanager
    def count(self, *, calls: bool = True) -> Iterator[Traffic]:
        """Count inside the block. Every rank must enter and leave it: its end names the peers, by `exchange`.

        Calls must be waited for inside the block. An error inside the block is raised, and nothing counted.
        Recording calls slows each operation of this thread, and other threads are not seen: without `calls` only
        the wire is read.
        """
        traffic = Traffic()
        before = self._connections()
        seen = Calls()
        with seen if calls else nullcontext():
            yield traffic
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # NCCL sends when its stream reaches the call
        after = self._connections()
        traffic.called = seen.ops()
        self._name_peers(traffic, before, after)

    def _connections(self) -> dict[int, Connection] | str:
        if self.unseen:
            return self.unseen
        try:
            return connections(*self.store_ports)
        except NoDiagnostics as error:
            return str(error)

    def _name_peers(
        self, traffic: Traffic, before: dict[int, Connection] | str, after: dict[int, Connection] | str
    ) -> None:
        """Fill in the wire, only if all ranks can measure it, or the matrix would lack rows."""
        self._count += 1
        if self.unseen:
            traffic.wire_error = self.unseen
            return
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
        # Only both ends together identify a connection: the kernel may give two connections with different remote ends
        # the same local port, and does so on a machine with hundreds of them. A rank that has left (None) has none.
        used = [(rank, tuple(near), tuple(far), sent) for rank, of in enumerate(ends) for near, far, sent in of or ()]
        owner = {(near, far): rank for rank, near, far, _ in used}
        unmatched_ends = [(rank, near, far) for rank, near, far, sent in used if sent and (far, near) not in owner]
        if unmatched_ends and None not in ends:
            traffic.wire_error = unmatched(*unmatched_ends[0])
            return
        traffic.wire = {peer: WireBytes() for peer in range(self.world_size) if peer != self.rank}
        for inode, connection in after.items():
            peer = owner.get((connection.remote, connection.local), self.rank)
            if peer != self.rank:
                traffic.wire[peer] = _add(traffic.wire[peer], connection, before.get(inode))


def unmatched(rank: int, near: Endpoint, far: Endpoint) -> str:
    """Return why the receiving rank of some bytes is unknown."""
    return (
        f"wire bytes are not known: rank {rank} has a connection from {near[0]}:{near[1]} to {far[0]}:{far[1]}, of"
        " which no rank has the other end: there may be address translation or a proxy in between"
    )


def _add(total: WireBytes, now: Connection, then: Connection | None) -> WireBytes:
    """Return `total` plus what a connection sent since `then`, or since it was opened."""
    sent, retransmitted = (then.sent_bytes, then.retransmitted_bytes) if then else (0, 0)
    return WireBytes(total.sent + now.sent_bytes - sent, total.retransmitted + now.retransmitted_bytes - retransmitted)
