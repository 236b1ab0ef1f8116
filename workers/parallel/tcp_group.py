"""A process group over plain TCP: what torch.distributed, DDP, fully_shard, DTensor and pipelining call, by hand.

A call is done when it returns, but for one that was asked for as `async_op`, which is begun. c10d hands calls to a
group that is written in Python before its dispatcher sees them. So that whoever counts calls sees these as any others,
each is told to the class above first, whose backend does nothing.
"""

# mypy: disable-error-code="override,assignment,call-arg"
# c10d's stubs have each method in its spellings of ten years; who calls these gives lists and options.

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions, FakeProcessGroup

from workers.parallel import laying
from workers.parallel.channel import Channel
from workers.parallel.laying import rows_of
from workers.parallel.peers import Peers, Steps
from workers.parallel.tcp_work import Posted, Running

Tensors = list[Tensor]
# The class's own methods, whatever a recorder has put around them: those would come back here, as would those of which
# c10d looks for two names (all_to_all_single and alltoall_base).
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
        self.told: Running | Posted | None = None  # what the call that is being told will return
        self.channel, self._begun, self._collectives = channel, 0, 0
        channel.transport.groups += 1
        self._made: Peers | None = None

    @property
    def _peers(self) -> Peers:
        if self._made is None:  # torch knows a group's ranks once it is made
            self._made = Peers(self, self.channel)
        return self._made.of_call(self._collectives)

    def getBackendName(self) -> str:  # noqa: N802
        return "tcp"

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceOptions(), self._begin(tensors)
        TOLD["allreduce"](self, tensors, opts)
        return self._run(work, opts, [laying.all_reduce(self._peers, each, opts) for each in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.AllreduceCoalescedOptions(), self._begin(tensors)
        TOLD["allreduce_coalesced"](self, tensors, opts)
        return self._run(work, opts, [laying.all_reduce(self._peers, each, opts) for each in tensors])

    def reduce(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        TOLD["reduce"](self, tensors, opts)
        return self._run(work, opts, [laying.reduce(self._peers, each, opts) for each in tensors])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        TOLD["reduce_scatter"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, [laying.reduce_scatter(self._peers, *pair, opts) for pair in pairs])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin([output])
        TOLD["_reduce_scatter_base"](self, output, tensor, opts)
        rows = rows_of(tensor, self.size())
        return self._run(work, opts, [laying.reduce_scatter(self._peers, output, rows, opts)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or dist.ReduceScatterOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            TOLD["_reduce_scatter_base"](self, *pair, opts)
        halves = [(output, rows_of(tensor, self.size())) for output, tensor in pairs]
        return self._run(work, opts, [laying.reduce_scatter(self._peers, *half, opts) for half in halves])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def broadcast(self, tensors: Tensors, opts: Any) -> Running:
        work = self._begin(tensors)
        TOLD["broadcast"](self, tensors, opts)
        return self._run(work, opts, [laying.broadcast(self._peers, each, opts) for each in tensors])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([*chain(*outputs)])
        TOLD["allgather"](self, outputs, inputs, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._run(work, opts, [laying.all_gather(self._peers, *pair, opts) for pair in pairs])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin([output])
        TOLD["_allgather_base"](self, output, tensor, opts)
        return self._run(work, opts, [laying.all_gather(self._peers, rows_of(output, self.size()), tensor, opts)])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllgatherOptions(), self._begin(outputs)
        pairs = [*zip(outputs, inputs, strict=True)]
        for pair in pairs:
            TOLD["_allgather_base"](self, *pair, opts)
        halves = [(rows_of(output, self.size()), tensor) for output, tensor in pairs]
        return self._run(work, opts, [laying.all_gather(self._peers, *half, opts) for half in halves])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Running:
        work = self._begin([*chain(*outputs)])
        TOLD["gather"](self, outputs, inputs, opts)
        return self._run(work, opts, [laying.gather(self._peers, [*chain(*outputs)], inputs[0], opts.rootRank)])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Running:
        work = self._begin(outputs)
        TOLD["scatter"](self, outputs, inputs, opts)
        return self._run(work, opts, [laying.scatter(self._peers, outputs[0], [*chain(*inputs)], opts.rootRank)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Running:
        opts, work = opts or AllToAllOptions(), self._begin(outputs)
        TOLD["alltoall"](self, inputs, inputs, opts)  # who is told copies one to the other, even sizes alone
        return self._run(work, opts, [laying.all_to_all(self._peers, outputs, inputs)])

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
        return self._run(work, opts, [laying.barrier(self._peers, token, opts.asyncOp)])

    def send(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        self.told = work = Posted(self.channel.send(tensors, peer, tag))
        TOLD["send"](self, tensors, peer, tag)
        self.told = None
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Posted:
        self._begun += 1
        self.told = work = Posted(self.channel.recv(tensors, peer, tag))
        TOLD["recv"](self, tensors, peer, tag)
        self.told = None
        return work

    def shutdown(self) -> None:
        self.channel.transport.leave()

    def _begin(self, results: Tensors) -> Running:
        self._begun += 1
        self._collectives += 1  # of which all ranks make the same, as of sends they do not
        self.told = work = Running(results, self.channel.transport)
        return work

    def _run(self, work: Running, opts: Any, steps: Sequence[Steps]) -> Running:
        self.told = None
        (work.begin if opts.asyncOp else work.run)(in_turn(steps))
        return work


def in_turn(steps: Sequence[Steps]) -> Steps:
    """One after the other."""
    for each in steps:
        yield from each
