"""What a call is given to read and write: the layout of its tensors, and whether they are at rest until the wait.

gloo moves the bytes from a tensor's first element on, whatever its strides are: run with torch 2.13, all_reduce,
broadcast, reduce, scatter and the output of reduce_scatter or all_to_all_single go wrong so, while all_gather, gather
and the rest copy to a contiguous tensor first. A tensor with gaps (a column) is wrong in itself. One without, such as a
transposed matrix, is right where all ranks, and input and output, have the same strides.

The version counter of a tensor knows nothing of what is written through NumPy, and is one for all that share a storage.
So what is only read between call and wait is summed at both (CRC-32), and of an all_reduce rank 0 is told the sum that
went in and the one that came out. A CRC-32 takes 0.6 ms a MiB: up to MOST_BYTES, and at the calls 1, 2, 4, 8, ... of a
line.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import torch

from distlab.lab.measure.tensors import hash_of
from distlab.tools.check.watch.recorder import Call, Group, Recorder, flat

MOST_BYTES = 4 << 20
MOST_TOLD = 200  # calls of a group, from its first, of which a layout is told

# Where in a c10d operation's arguments gloo takes the bytes as they lie: what is written, and what is read beside it.
AS_THEY_LIE = {
    "allreduce_": (0, -1), "broadcast_": (0, -1), "reduce_": (0, -1), "scatter_": (0, 1), "reduce_scatter_": (0, 1),
    "alltoall_base_": (0, -1),
}  # fmt: skip
# Where what is only read stands, and what is written beside it.
READ = {
    "allgather_": (1, 0), "_allgather_base_": (1, 0), "reduce_scatter_": (1, 0), "_reduce_scatter_base_": (1, 0),
    "scatter_": (1, 0), "gather_": (1, 0), "alltoall_": (1, 0), "alltoall_base_": (1, 0), "send": (0, -1),
}  # fmt: skip


class Totals(NamedTuple):
    """Of the elements of a tensor."""

    total: float
    size: float  # the sum of their absolute values


class Contents:
    """What the tensors of a call held as it was made; `at_wait` looks again."""

    def __init__(self, call: Call, read: tuple[torch.Tensor, ...], summed: torch.Tensor | None) -> None:
        self.call = call.number
        self._read = [(tensor, hash_of(tensor)) for tensor in read]
        self._summed = summed
        self._before = totals(summed) if summed is not None else None

    def written(self) -> bool:
        """Whether something that the call only reads has other bits now."""
        return any(hash_of(tensor) != found for tensor, found in self._read)

    def sums(self) -> tuple[float, float, float] | None:
        """Of a tensor that was summed over ranks: its total before, that of absolute values, and its total now."""
        if self._summed is None or self._before is None:
            return None
        found = *self._before, totals(self._summed).total
        return found if all(map(math.isfinite, found)) else None


class Memory:
    """Looks at the tensors of this process's calls; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._telling = recorder, recorder.telling
        self._times: Counter[int] = Counter()  # asynchronous calls by the number of their line

    def install(self) -> None:
        self._recorder.on_call.append(self._look)

    def _look(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Before the call is made."""
        self._recorder.thread.contents = None
        if len(group.ranks) < 2:
            return
        if name in AS_THEY_LIE and group.begun <= MOST_TOLD:
            self._look_at_layouts(name, args, call, group)
        if call.by_script and getattr(self._recorder.thread, "asynchronous", False):
            self._times[call.place] += 1
            if self._times[call.place].bit_count() == 1:
                self._recorder.thread.contents = self._contents(name, args, call)

    def _look_at_layouts(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        written, read = (flat(args[position]) if position >= 0 else () for position in AS_THEY_LIE[name])
        if not all(map(is_plain, (*written, *read))) or all(each.is_contiguous() for each in (*written, *read)):
            return
        if not group.is_on_gloo:  # the lab's own transport takes them as they are
            return
        out = layout(written[0])
        # Of a reduce_scatter gloo copies the inputs, gaps and all; of a scatter it does not.
        gaps = any(map(has_gaps, written)) or (name == "scatter_" and any(map(has_gaps, read)))
        wrong = gaps or name == "alltoall_base_" or any(layout(each) != out for each in read if not has_gaps(each))
        odd = next((each for each in (*written, *read) if not each.is_contiguous()), written[0])
        self._telling.say("strided", call.number, list(odd.shape), list(odd.stride()), wrong)

    def _contents(self, name: str, args: tuple[Any, ...], call: Call) -> Contents | None:
        if name in READ:
            position, other = READ[name]
            beside = {storage(each) for each in flat(args[other])} if other >= 0 else set()
            read = tuple(each for each in flat(args[position]) if is_plain(each) and storage(each) not in beside)
            return Contents(call, read, None) if read and sum(map(nbytes, read)) <= MOST_BYTES else None
        (tensor,) = args[0] if name == "allreduce_" and len(args[0]) == 1 else (None,)
        if tensor is None or getattr(self._recorder.thread, "reduce", "") != "sum":
            return None
        whole = is_plain(tensor) and tensor.is_floating_point() and tensor.is_contiguous()
        return Contents(call, (), tensor) if whole and 0 < nbytes(tensor) <= MOST_BYTES else None


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements are not one piece of memory, each there once."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides in the dimensions that have more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def totals(tensor: torch.Tensor) -> Totals:
    values = tensor.detach().to(torch.float64)
    return Totals(float(values.sum()), float(values.abs().sum()))
