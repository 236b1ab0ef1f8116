"""A process group over plain TCP: what torch.distributed, DDP, fully_shard, DTensor and pipelining call, by hand.

Each rank of a group listens, writes where into the group's store, and dials those before it; two ranks that met in an
earlier group have their connection. Both ends prove the key of the run (handshake.py) before a byte of the other is
believed. Every wait has a bound, one for all connections together, and names whom it waited for.

A call is done when it returns, but for one that was asked for as `async_op`, which is begun. c10d hands calls to a
group that is written in Python before its dispatcher sees them. So that whoever counts calls sees these as any others,
each is told to the class above first, whose backend does nothing.
"""

# mypy: disable-error-code="override,assignment,call-arg"
# c10d's stubs have each method in its spellings of ten years; who calls these gives lists and options.
import inspect
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions, FakeProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from distlab.techniques.collectives.point_to_point import Message, Peers, Pending, Steps
from distlab.techniques.transport import tcp_collectives
from distlab.techniques.transport.handshake import Door, TurnedAway, Who, dialled, listen, unheeded
from distlab.techniques.transport.tcp import Channel, LinkError, Transport
from distlab.techniques.transport.tcp_collectives import rows_of

# What a call on a group over TCP returns: a `Work` that its own process has to move on. One that was begun and not
# awaited goes on whenever the process waits for anything over TCP (`Transport.background`).


def unseen() -> AbstractContextManager[None]:
    """What a group does by itself is no modes' business, as gloo's is none: the program called one thing."""
    if torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return nullcontext()


class Posted(dist.Work):
    """A send or a receive."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self._message = message

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        self._message.wait()
        return True

    def is_completed(self) -> bool:
        return self._message.done


class Running(dist.Work):
    """A collective, whose result stands in `results`."""

    def __init__(self, results: list[Tensor], transport: Transport) -> None:
        super().__init__()
        self._results, self._transport = results, transport
        self._pending: Pending | None = None

    def begin(self, steps: Iterator[Message], is_async: bool) -> None:
        """Send its first messages; the others follow at once, or as this process waits for something."""
        with unseen():
            self._pending = Pending(steps)
            if not is_async:
                self._pending.wait()
        if is_async and not self.advance():
            self._transport.background.append(self.advance)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        if self._pending is not None:
            # Its messages are awaited one by one here, so nobody else may go on with it meanwhile.
            self._transport.background = [each for each in self._transport.background if each != self.advance]
            with unseen():
                self._pending.wait()
        return True

    def advance(self) -> bool:
        """Go on as far as messages have come; whether it is at its end."""
        with unseen():
            return self._pending is None or self._pending.advance()

    def is_completed(self) -> bool:
        return self.advance()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its result, ended first: who waits for a future (DDP's reducer) moves nothing."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


Tensors = list[Tensor]
# The class's own methods, whatever a recorder has put around them: those would come back here, as would those of which
# c10d looks for two names (all_to_all_single and alltoall_base), and each that is called elsewhere than in the method
# of its name: pybind11 looks at the calling frame.
TOLD = {
    name: inspect.unwrap(getattr(dist.ProcessGroup, name))
    for name in (
        "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "broadcast",
        "allgather", "_allgather_base", "gather", "scatter", "alltoall", "barrier", "send", "recv",
    )
}  # fmt: skip


class TcpGroup(dist.ProcessGroup):
    """The ranks of a channel; tensors are on the CPU, of any dtype and layout.

    Where a call has two names, the second is that of torch 2.13 and the first that of 2.11, or the other way round.
    """

    def __init__(self, channel: Channel) -> None:
        rank, size = channel.rank, len(channel.ranks)
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, size))
        self.channel, self._begun, self._collectives = channel, 0, 0
        channel.transport.groups += 1
        self._peers: Peers | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return "tcp"

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceOptions(), self._begin(tensors)
        TOLD["allreduce"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.all_reduce, [(each, opts.reduceOp.op) for each in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceCoalescedOptions(), self._begin(tensors)
        TOLD["allreduce_coalesced"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.all_reduce, [(each, opts.reduceOp.op) for each in tensors])

    def reduce(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        TOLD["reduce"](self, tensors, opts)
        return self._run(
            work, opts, tcp_collectives.reduce, [(each, opts.reduceOp.op, opts.rootRank) for each in tensors]
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        TOLD["reduce_scatter"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(*pair, opts.reduceOp.op) for pair in pairs])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin([output])
        TOLD["_reduce_scatter_base"](self, output, tensor, opts)
        rows = rows_of(tensor, self.size())
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(output, rows, opts.reduceOp.op)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            TOLD["_reduce_scatter_base"](self, *pair, opts)
        halves = [(output, rows_of(tensor, self.size())) for output, tensor in pairs]
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(*half, opts.reduceOp.op) for half in halves])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def broadcast(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        TOLD["broadcast"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.broadcast, [(each, opts.rootRank) for each in tensors])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([*chain(*outputs)])
        TOLD["allgather"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, tcp_collectives.all_gather, [(*pair,) for pair in pairs])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([output])
        TOLD["_allgather_base"](self, output, tensor, opts)
        return self._run(work, opts, tcp_collectives.all_gather, [(rows_of(output, self.size()), tensor)])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            TOLD["_allgather_base"](self, *pair, opts)
        halves = [(rows_of(output, self.size()), tensor) for output, tensor in pairs]
        return self._run(work, opts, tcp_collectives.all_gather, [(*half,) for half in halves])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Running:
        work = self._begin([*chain(*outputs)])
        TOLD["gather"](self, outputs, inputs, opts)
        return self._run(work, opts, tcp_collectives.gather, [([*chain(*outputs)], inputs[0], opts.rootRank)])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Running:
        work = self._begin(outputs)
        TOLD["scatter"](self, outputs, inputs, opts)
        return self._run(work, opts, tcp_collectives.scatter, [(outputs[0], [*chain(*inputs)], opts.rootRank)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllToAllOptions(), self._begin(outputs)
        TOLD["alltoall"](self, inputs, inputs, opts)  # who is told copies one to the other, even sizes alone
        return self._run(work, opts, tcp_collectives.all_to_all, [(outputs, inputs)])

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Running:
        places, parts = rows_of(output, self.size(), output_sizes), rows_of(tensor, self.size(), sizes)
        return self.alltoall(places, parts, opts)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Running:
        opts, work = opts or BarrierOptions(), self._begin([])
        TOLD["barrier"](self, opts)
        token = torch.zeros(1, dtype=torch.uint8)
        return self._run(work, opts, tcp_collectives.all_reduce, [(token, dist.ReduceOp.SUM)])

    def send(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        work = Posted(self.channel.send(tensors, peer, tag))
        TOLD["send"](self, tensors, peer, tag)
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        work = Posted(self.channel.recv(tensors, peer, tag))
        TOLD["recv"](self, tensors, peer, tag)
        return work

    def shutdown(self) -> None:
        self.channel.transport.leave()

    def _begin(self, results: Tensors) -> Running:
        self._begun += 1
        self._collectives += 1  # of which all ranks make the same, as of sends they do not
        return Running(results, self.channel.transport)

    def _run(
        self, work: Running, opts: Any, collective: Callable[..., Steps], arguments: Iterable[Sequence[Any]]
    ) -> Running:
        """Make the collective with each of the `arguments`, one after the other."""
        peers = self._peers = self._peers or Peers(self, self.channel)  # torch knows a group's ranks once it is made
        number = self._collectives
        steps = chain.from_iterable(collective(peers.of_call(number), *each) for each in arguments)
        work.begin(steps, opts.asyncOp)
        return work


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
