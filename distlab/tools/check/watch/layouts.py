"""Record the memory layout of the tensors in calls.

gloo transfers the bytes from a tensor's first element on and ignores strides: with torch 2.13, all_reduce, broadcast,
reduce, scatter and the output of reduce_scatter or all_to_all_single are wrong then, while all_gather, gather and the
others copy to a contiguous tensor first. A tensor with gaps (a column) is always wrong. One without, such as a
transposed matrix, is correct if all ranks, and input and output, have the same strides.
"""

from typing import Any

import torch

from distlab.tools.check.watch.recorder import Call, Group, Recorder, flat

MOST_REPORTED = 200  # calls of a group, from its first, whose layouts are reported

# For each c10d operation, the arguments whose bytes gloo transfers directly: what is written, and what is read.
RAW_ARGUMENTS = {
    "allreduce_": (0, -1), "broadcast_": (0, -1), "reduce_": (0, -1), "scatter_": (0, 1), "reduce_scatter_": (0, 1),
    "alltoall_base_": (0, -1),
}  # fmt: skip


class Layouts:
    """Observes the tensors of this process's calls; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        self._recorder.on_call.append(self._on_call)

    def _on_call(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Report the layout before the call is made."""
        if name not in RAW_ARGUMENTS or len(group.ranks) < 2 or group.begun > MOST_REPORTED:
            return
        written, read = (flat(args[position]) if position >= 0 else () for position in RAW_ARGUMENTS[name])
        if not all(map(is_plain, (*written, *read))) or all(each.is_contiguous() for each in (*written, *read)):
            return
        if not group.is_on_gloo:  # the lab's own transport handles strides
            return
        out = layout(written[0])
        # In a reduce_scatter gloo copies the inputs, in a scatter it does not.
        gaps = any(map(has_gaps, written)) or (name == "scatter_" and any(map(has_gaps, read)))
        wrong = gaps or name == "alltoall_base_" or any(layout(each) != out for each in read if not has_gaps(each))
        strided = next((each for each in (*written, *read) if not each.is_contiguous()), written[0])
        self._recorder.reporter.send("strided", call.number, list(strided.shape), list(strided.stride()), wrong)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether its elements are not one block of memory with each element once."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return its strides in the dimensions with more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided
