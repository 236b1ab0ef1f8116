"""How the tensors of a call lie in memory.

gloo moves the bytes from a tensor's first element on, whatever its strides are: run with torch 2.13, all_reduce,
broadcast, reduce, scatter and the output of reduce_scatter or all_to_all_single go wrong so, while all_gather, gather
and the rest copy to a contiguous tensor first. A tensor with gaps (a column) is wrong in itself. One without, such as a
transposed matrix, is right where all ranks, and input and output, have the same strides.
"""

from typing import Any

import torch

from distlab.tools.check.watch.recorder import Call, Group, Recorder, flat

MOST_TOLD = 200  # calls of a group, from its first, of which a layout is told

# Where in a c10d operation's arguments gloo takes the bytes as they lie: what is written, and what is read beside it.
AS_THEY_LIE = {
    "allreduce_": (0, -1), "broadcast_": (0, -1), "reduce_": (0, -1), "scatter_": (0, 1), "reduce_scatter_": (0, 1),
    "alltoall_base_": (0, -1),
}  # fmt: skip


class Layouts:
    """Looks at the tensors of this process's calls; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        self._recorder.on_call.append(self._look)

    def _look(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Before the call is made."""
        if name not in AS_THEY_LIE or len(group.ranks) < 2 or group.begun > MOST_TOLD:
            return
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
        self._recorder.telling.say("strided", call.number, list(odd.shape), list(odd.stride()), wrong)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements are not one piece of memory, each there once."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides in the dimensions that have more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided
