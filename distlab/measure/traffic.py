"""The ledger: what a stretch of the program called, and what its sockets sent meanwhile, by operation, axis and peer.

Two of the three sources of every byte count stand here side by side: called (`Calls`) and wire (sockets.py); the third
is the prediction (formulas/). Each rank counts what it sends itself. To name the rank at the other end of a connection,
all ranks tell each other the ends of theirs: so the names are right between containers, and between local ranks, which
all have one address. Row r of the matrix "who sent how much to whom" is rank r's `wire`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.measure import sockets
from distlab.measure.sockets import Connection, Endpoint, NoDiagnostics

# The calls: a dispatch mode that sees every collective and every send while it is on.
#
# PyTorch hands each c10d call through its dispatcher, so a TorchDispatchMode sees it whoever made it: the lesson, a
# gradient hook in the backward pass, DDP's reducer in C++, fully_shard, DTensor, a functional collective. Called
# bytes are what the best algorithm sends of the whole tensor (`sent_bytes`; `given_bytes` of an all_to_all), worked
# out here and not by formulas/: what is predicted is held against them exactly, so neither may come from the other.
# Barriers and receives send nothing of their own, and are not counted.
#
# A mode belongs to a thread: a call from a thread that the lesson started itself is not seen. On the CPU the backward
# pass runs on the caller's thread; on CUDA autograd hands its threads the mode (at::ThreadLocalState), as the sources
# say: not measured.

# Schema name -> the operation, and which argument is (or lists) the whole tensor; RESULT: it is what the call returns.
RESULT = -1
OPERATIONS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::send": ("send", 0),
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
    """All calls of one operation on one axis. `raw_bytes` are the tensors', `called_bytes` what they must send."""

    op: str
    axis: str  # the mesh axis ("dp"), "world", or the group's own name
    calls: float = 0
    raw_bytes: float = 0
    called_bytes: float = 0.0


class Calls(TorchDispatchMode):
    """`with Calls() as calls: ...` then `calls.ops()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: dict[tuple[str, str], CalledOp] = {}

    def ops(self) -> list[CalledOp]:
        """What was called so far, by operation and axis in the order of their first call."""
        return list(self._ops.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class, 822 modules, to leave out what nobody compiles here."""
        return False

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
        if op == "gather":  # the argument is this rank's part; all send theirs but the root, args[3]
            called_bytes = float(raw_bytes if args[3] != group.rank() else 0)
        elif op == "all_to_all":
            called_bytes = given_bytes(name, args, group)
        else:
            called_bytes = sent_bytes(op, raw_bytes, group.size())
        entry = self._ops.setdefault((op, axis_of(group)), CalledOp(op, axis_of(group)))
        entry.calls += 1
        entry.raw_bytes += raw_bytes
        entry.called_bytes += called_bytes


def sent_bytes(op: str, nbytes: int, group_size: int) -> float:
    """What a rank sends of a tensor of `nbytes` in all: to a peer all of it, to the others all but its own Nth.

    An all_reduce sends the parts once to be summed, and once as sums. Where ranks differ (broadcast, reduce, scatter)
    it is their mean.
    """
    if op == "send":
        return float(nbytes)
    others = nbytes - nbytes / group_size
    return 2 * others if op == "all_reduce" else others


# Schema name of an all_to_all -> which argument is what this rank gives, and which the rows of it to each other one.
GIVEN = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}


def given_bytes(name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """What a rank sends in an all_to_all, whose parts may be uneven: all but what it keeps."""
    if name not in GIVEN:  # a list of parts
        return float(nbytes_of(args[1]) - nbytes_of(args[1][group.rank()]))
    tensor, rows = (args[position] for position in GIVEN[name])
    if not rows:  # equal parts
        return sent_bytes("all_to_all", nbytes_of(tensor), group.size())
    whole = float(nbytes_of(tensor))
    kept: float = whole * rows[group.rank()] / max(1, sum(rows))
    return whole - kept


def axis_of(group: dist.ProcessGroup) -> str:
    """The mesh axis that a group belongs to, "world" for the default group, or the description it was made with."""
    description = group.group_desc
    if description == "default_pg":
        return "world"
    return group.group_name if description in ("", "undefined") else description.removeprefix("mesh_")


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group of a call: the first boxed object of a c10d call, the last argument of a functional
    collective."""
    boxed = [value for value in args if isinstance(value, torch.ScriptObject)]
    return dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])


def nbytes_of(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(nbytes_of, tensors))


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


# The operations of torch's c10d, and where in their arguments stands what a recorder asks for.
#
# A kernel at BackendSelect sees every call just before its device's own kernel, whoever makes it, and passes it on
# with the keys that are left (`BELOW`).

HERE = torch._C.DispatchKey.BackendSelect
BELOW = torch._C._dispatch_keyset_full_after(HERE)


class Shape(NamedTuple):
    """Where in a c10d operation's arguments stands what all ranks have to give alike; -1 for what it has not."""

    op: str
    compared: int  # the tensors
    group: int
    reduce: bool = False
    root: int = -1
    peer: int = -1


# The schemas are in torch/csrc/distributed/c10d/Ops.cpp.
SHAPES = {
    "allreduce_": Shape("all_reduce", 0, 1, reduce=True),
    "allreduce_coalesced_": Shape("all_reduce", 0, 1, reduce=True),
    "broadcast_": Shape("broadcast", 0, 1, root=2),
    "reduce_": Shape("reduce", 0, 1, reduce=True, root=3),
    "allgather_": Shape("all_gather", 1, 2),
    "_allgather_base_": Shape("all_gather", 1, 2),
    "allgather_coalesced_": Shape("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": Shape("all_gather", 1, 2),
    "reduce_scatter_": Shape("reduce_scatter", 0, 2, reduce=True),
    "_reduce_scatter_base_": Shape("reduce_scatter", 0, 2, reduce=True),
    "reduce_scatter_tensor_coalesced_": Shape("reduce_scatter", 0, 2, reduce=True),
    "scatter_": Shape("scatter", 0, 2, root=3),
    "gather_": Shape("gather", 1, 2, root=3),
    "alltoall_": Shape("all_to_all", 1, 2),
    "alltoall_base_": Shape("all_to_all", 1, 2),
    "barrier": Shape("barrier", -1, 1),
    "monitored_barrier_": Shape("monitored_barrier", -1, 1),
    "send": Shape("send", 0, 1, peer=2),
    "recv_": Shape("recv", 0, 1, peer=2),
    "recv_any_source_": Shape("recv", 0, 1),
}


# Messages: every collective, send and receive of a step, with its ranks, its bytes, and when it began and ended.
#
# A kernel of ours stands at BackendSelect while it is recorded, and only then, since it takes some 10 microseconds a
# call: it sees what DDP's reducer, fully_shard and DTensor send as well as what is sent by hand. When a call has
# ended nobody tells: it is looked for with the next call and at each mark of a phase (`look`), so an end is drawn
# late by up to the time between two of these, and never early. Whether a send or receive of gloo is over is known
# once it was waited for.

LEAST_RANKS = 2  # a group of one sends nothing


class Message(NamedTuple):
    """One call on this rank, in seconds of `time.perf_counter`."""

    op: str
    ranks: tuple[int, ...]  # of a send or receive from whom to whom, else all of the group; global ranks
    sent_bytes: float  # what this rank sends by the best algorithm (`Calls`); of a receive nothing
    nbytes: int  # of the tensors
    tag: int  # of a send or receive
    start_s: float
    end_s: float


class Messages:
    """`with Messages().recorded() as messages: step()`, then `messages.found`."""

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._open: list[tuple[int, dist.Work]] = []

    @contextmanager
    def recorded(self) -> Iterator["Messages"]:
        """Hear of all calls inside the block; what is still open at its end ends there."""
        library = torch.library.Library("c10d", "IMPL")
        for name, shape in SHAPES.items():
            pass_on = getattr(torch.ops.c10d, name).default.redispatch
            library.impl(name, self._noted(name, shape, pass_on), HERE.name, with_keyset=True)
        try:
            yield self
        finally:
            library._destroy()
            self.look()
            self._open.clear()

    def look(self) -> None:
        """Note the end of all calls that are over by now."""
        now, still = time.perf_counter(), []
        for index, work in self._open:
            self.found[index] = self.found[index]._replace(end_s=now)
            if not work.is_completed():
                still.append((index, work))
        self._open = still

    def _noted(self, name: str, shape: Shape, pass_on: Callable[..., Any]) -> Callable[..., Any]:
        def noted(keys: Any, *args: Any) -> Any:
            self.look()
            message = message_of(name, shape, args)
            result = pass_on(keys & BELOW, *args)
            if message is not None:
                work = result[-1] if isinstance(result, tuple) else result
                # A group that is written in Python only tells of its calls here, and says which it does now.
                told = getattr(dist.ProcessGroup.unbox(args[shape.group]), "told", None)
                self._open.append((len(self.found), told or dist.Work.unbox(work)))
                self.found.append(message)
            return result

        return noted


def message_of(name: str, shape: Shape, args: tuple[Any, ...]) -> Message | None:
    """What a call is; None of a barrier, and in a group of one."""
    group = dist.ProcessGroup.unbox(args[shape.group])
    if "barrier" in name or group.size() < LEAST_RANKS:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    own, nbytes, now = ranks[group.rank()], nbytes_of(args[shape.compared]), time.perf_counter()
    if shape.op in ("send", "recv"):
        peer = ranks[args[shape.peer]] if shape.peer >= 0 else -1
        pair = (own, peer) if shape.op == "send" else (peer, own)
        return Message(shape.op, pair, float(nbytes if shape.op == "send" else 0), nbytes, args[-1], now, now)
    _, position = OPERATIONS.get(f"c10d::{name}", ("", RESULT))
    whole = nbytes_of(args[position]) if position != RESULT else nbytes
    sent = sent_bytes(shape.op, whole, group.size())
    if shape.op == "gather":  # the argument is this rank's part; all send theirs but the root
        sent = float(whole if args[3] != group.rank() else 0)
    elif shape.op == "all_to_all":
        sent = given_bytes(f"c10d::{name}", args, group)
    return Message(shape.op, ranks, sent, whole, 0, now, now)
