"""A process group over plain TCP, for all calls of torch.distributed, DDP, fully_shard, DTensor and pipelining.

Each rank of a group listens, writes its address into the group's store, and dials the ranks before it; two ranks that
met in an earlier group reuse their connection. Both ends prove the run's key (handshake.py) first. Every wait has a
timeout, and its error names the rank.

A call is done when it returns, except with `async_op`, when it has only begun. c10d passes calls to a Python group
before its dispatcher sees them. So each call first goes to the base class, whose backend does nothing, and call
counters see it like any other.
"""

# mypy: disable-error-code="override,assignment,call-arg"
# c10d's stubs have every old signature of each method; callers of these pass lists and options.
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
from distlab.techniques.transport.handshake import Listener, OnRejected, Who, dialled, ignore_rejected, listen
from distlab.techniques.transport.tcp import Channel, LinkError, Transport
from distlab.techniques.transport.tcp_collectives import rows_of

# The results of calls on a group over TCP: `Work` that this process itself has to drive. A call that has begun and is
# not awaited continues whenever the process waits for anything over TCP (`Transport.background`).


def hide_from_recorders() -> AbstractContextManager[None]:
    """Hide a group's internal messages from recorders, as gloo hides its own: the program made one call."""
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
    """A running collective; `results` has its result."""

    def __init__(self, results: list[Tensor], transport: Transport) -> None:
        super().__init__()
        self._results, self._transport = results, transport
        self._pending: Pending | None = None

    def begin(self, steps: Iterator[Message], is_async: bool) -> None:
        """Send the first messages; the others follow at once, or while this process waits for something."""
        with hide_from_recorders():
            self._pending = Pending(steps)
            if not is_async:
                self._pending.wait()
        if is_async and not self.advance():
            self._transport.background.append(self.advance)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        if self._pending is not None:
            # Its messages are awaited one by one here, so no other wait may advance it meanwhile.
            self._transport.background = [each for each in self._transport.background if each != self.advance]
            with hide_from_recorders():
                self._pending.wait()
        return True

    def advance(self) -> bool:
        """Continue as far as messages have arrived; return whether it is finished."""
        with hide_from_recorders():
            return self._pending is None or self._pending.advance()

    def is_completed(self) -> bool:
        return self.advance()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result, finished first: a waiter for a future (DDP's reducer) drives no messages."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


Tensors = list[Tensor]
# The base class's methods, without a recorder's wrappers: those would call back into this class. So would methods with
# two names in c10d (all_to_all_single and alltoall_base), and any called from a method of another name, since pybind11
# inspects the calling frame.
BASE_CALLS = {
    name: inspect.unwrap(getattr(dist.ProcessGroup, name))
    for name in (
        "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "broadcast",
        "allgather", "_allgather_base", "gather", "scatter", "alltoall", "barrier", "send", "recv",
    )
}  # fmt: skip


class TcpGroup(dist.ProcessGroup):
    """The ranks of a channel; tensors are on the CPU, of any dtype and layout.

    Calls with two names have that of torch 2.13 and that of 2.11.
    """

    def __init__(self, channel: Channel) -> None:
        rank, size = channel.rank, len(channel.ranks)
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, size))
        self.channel, self._begun, self._collectives, self.latest_work = channel, 0, 0, None
        channel.transport.groups += 1
        self._peers: Peers | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return "tcp"

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceOptions(), self._begin(tensors)
        BASE_CALLS["allreduce"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.all_reduce, [(each, opts.reduceOp.op) for each in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceCoalescedOptions(), self._begin(tensors)
        BASE_CALLS["allreduce_coalesced"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.all_reduce, [(each, opts.reduceOp.op) for each in tensors])

    def reduce(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        BASE_CALLS["reduce"](self, tensors, opts)
        return self._run(
            work, opts, tcp_collectives.reduce, [(each, opts.reduceOp.op, opts.rootRank) for each in tensors]
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        BASE_CALLS["reduce_scatter"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(*pair, opts.reduceOp.op) for pair in pairs])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin([output])
        BASE_CALLS["_reduce_scatter_base"](self, output, tensor, opts)
        rows = rows_of(tensor, self.size())
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(output, rows, opts.reduceOp.op)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            BASE_CALLS["_reduce_scatter_base"](self, *pair, opts)
        halves = [(output, rows_of(tensor, self.size())) for output, tensor in pairs]
        return self._run(work, opts, tcp_collectives.reduce_scatter, [(*half, opts.reduceOp.op) for half in halves])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def broadcast(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        BASE_CALLS["broadcast"](self, tensors, opts)
        return self._run(work, opts, tcp_collectives.broadcast, [(each, opts.rootRank) for each in tensors])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([*chain(*outputs)])
        BASE_CALLS["allgather"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, tcp_collectives.all_gather, [(*pair,) for pair in pairs])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([output])
        BASE_CALLS["_allgather_base"](self, output, tensor, opts)
        return self._run(work, opts, tcp_collectives.all_gather, [(rows_of(output, self.size()), tensor)])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            BASE_CALLS["_allgather_base"](self, *pair, opts)
        halves = [(rows_of(output, self.size()), tensor) for output, tensor in pairs]
        return self._run(work, opts, tcp_collectives.all_gather, [(*half,) for half in halves])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Running:
        work = self._begin([*chain(*outputs)])
        BASE_CALLS["gather"](self, outputs, inputs, opts)
        return self._run(work, opts, tcp_collectives.gather, [([*chain(*outputs)], inputs[0], opts.rootRank)])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Running:
        work = self._begin(outputs)
        BASE_CALLS["scatter"](self, outputs, inputs, opts)
        return self._run(work, opts, tcp_collectives.scatter, [(outputs[0], [*chain(*inputs)], opts.rootRank)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllToAllOptions(), self._begin(outputs)
        BASE_CALLS["alltoall"](self, inputs, inputs, opts)  # the base class copies input to output, for even sizes only
        return self._run(work, opts, tcp_collectives.all_to_all, [(outputs, inputs)])

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Running:
        places, parts = rows_of(output, self.size(), output_sizes), rows_of(tensor, self.size(), sizes)
        return self.alltoall(places, parts, opts)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Running:
        opts, work = opts or BarrierOptions(), self._begin([])
        BASE_CALLS["barrier"](self, opts)
        token = torch.zeros(1, dtype=torch.uint8)
        return self._run(work, opts, tcp_collectives.all_reduce, [(token, dist.ReduceOp.SUM)])

    def send(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        self.latest_work = work = Posted(self.channel.send(tensors, peer, tag))
        BASE_CALLS["send"](self, tensors, peer, tag)
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        self.latest_work = work = Posted(self.channel.recv(tensors, peer, tag))
        BASE_CALLS["recv"](self, tensors, peer, tag)
        return work

    def shutdown(self) -> None:
        self.channel.transport.leave()

    def _begin(self, results: Tensors) -> Running:
        # The number of collectives is equal on all ranks, unlike the number of sends.
        self._begun, self._collectives = self._begun + 1, self._collectives + 1
        self.latest_work = work = Running(results, self.channel.transport)
        return work

    def _run(
        self, work: Running, opts: Any, collective: Callable[..., Steps], arguments: Iterable[Sequence[Any]]
    ) -> Running:
        """Run the collective with each of the `arguments`, one after the other."""
        peers = self._peers = self._peers or Peers(self, self.channel)  # torch knows a group's ranks once it is created
        number = self._collectives
        steps = chain.from_iterable(collective(peers.for_call(number), *each) for each in arguments)
        work.begin(steps, opts.asyncOp)
        return work


TICK_S = 0.5


class TcpBackend:
    """The connections of this process, which listens at `host` for ranks with the key; `register` adds the torch
    backend "tcp"."""

    def __init__(self, host: str, key: bytes, on_rejected: OnRejected = ignore_rejected) -> None:
        self.host, self.key, self.on_rejected = host, key, on_rejected
        self.transport: Transport | None = None

    def register(self) -> None:
        """Let `init_process_group("tcp")` and `new_group(backend="tcp")` create groups over these connections."""
        dist.Backend.register_backend("tcp", self._create, extended_api=True, devices=["cpu"])

    def _create(self, options: Any, _: Any) -> TcpGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id)
        return TcpGroup(self.channel(options.store, ranks, options.group_rank, name, options.timeout.total_seconds()))

    def channel(self, store: dist.Store, ranks: Sequence[int], place: int, name: str, timeout_s: float) -> Channel:
        """Return a channel of `ranks` with this process as number `place`; raises LinkError naming missing ranks."""
        if self.transport is None or (not self.transport.groups and not self.transport.ranks):
            self.transport = Transport(timeout_s)
        own = ranks[place]
        missing = [rank for rank in ranks if rank != own and rank not in self.transport.ranks]
        if missing:
            for rank, connection in self.connect(store, own, missing, timeout_s).items():
                self.transport.add(rank, connection)
        return Channel(self.transport, ranks, place, name)

    def connect(self, store: dist.Store, own: int, others: Sequence[int], timeout_s: float) -> dict[int, socket.socket]:
        """Return a connection to each of `others`, all of which call this too."""
        deadline = time.monotonic() + timeout_s
        with listen(self.host) as listening, selectors.DefaultSelector() as selector:
            incoming = Listener(listening, selector, self.key, purpose(own), lambda: Who(own), self.on_rejected)
            store.set(f"tcp/{own}", f"{self.host} {listening.getsockname()[1]}")
            try:
                found = {rank: self._dial(store, rank, own, deadline) for rank in others if rank < own}
                found |= accepted(incoming, selector, {rank for rank in others if rank > own}, deadline)
            finally:  # all diallers have read it, and a later group may reuse the name
                store.delete_key(f"tcp/{own}")
                incoming.close()
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
    incoming: Listener, selector: selectors.BaseSelector, waiting: set[int], deadline: float
) -> dict[int, socket.socket]:
    """Return a connection from each rank of `waiting`; strangers are handled concurrently and block nobody."""
    found: dict[int, socket.socket] = {}
    while missing := waiting - found.keys():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LinkError(f"no connection from rank {', '.join(map(str, sorted(missing)))} within the timeout")
        for key, _ in selector.select(min(left_s, TICK_S)):
            arrival = incoming.step(key)
            if arrival is None:
                continue
            (rank, _life), connection = arrival
            if rank in missing and rank not in found:
                found[rank] = connection
            else:
                connection.close()
        incoming.expire()
    return found


def purpose(rank: int) -> str:
    """Return the purpose string of a rank's port."""
    return f"transport of rank {rank}"
