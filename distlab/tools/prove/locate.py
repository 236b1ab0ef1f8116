"""Where in the dense model lies what a rank holds: found by its numbers, whatever cut it.

Before the first step every weight is the model's own, and none is equal to another (user_file.py). So a tensor of the
dense shape is held whole, and one that is shorter in one dim is as many rows of it, each found by its bytes:
halves, the interleaved heads of a fused projection, a vocabulary in parts. A DTensor knows it by itself.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")  # where all is compared that ranks and one process keep, whatever device they compute on
PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Rows(NamedTuple):
    """Which rows along a dim of the dense tensor; `dim` -1 is all of it."""

    dim: int
    lines: list[int]

    def of(self, dense: Tensor) -> Tensor:
        return dense if self.dim < 0 else dense.index_select(self.dim, torch.tensor(self.lines))


WHOLE = Rows(-1, [])


class LocatedTensor(NamedTuple):
    """One tensor of a rank, and where in the dense model it lies."""

    rows: Rows
    tensor: Tensor | None  # None: a gradient that is not there


class Misfit(Exception):
    """A rank's tensor is no part of the dense one; the message says how, to stand behind the tensor's name."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for each in PREFIXES:
        name = name.replace(each, "")
    return name


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under all of their names, wrappers left out."""
    return {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}


def local(tensor: Tensor) -> Tensor:
    """What is compared of a tensor, a copy; of a DTensor all of it, which is a collective."""
    whole = getattr(tensor, "full_tensor", None)
    return (whole() if whole is not None else tensor).detach().to(CPU, copy=True)


def locate_in_dense(found: Tensor, dense: Tensor) -> Rows:
    """Where `found` lies in `dense`, both before the first step; raises Misfit."""
    if found.shape == dense.shape:
        if not torch.equal(found.to(dense.dtype), dense):
            raise Misfit("begins with other weights than the model's")
        return WHOLE
    shapes = f"has shape {list(found.shape)} where the model's has {list(dense.shape)}"
    if found.dim() != dense.dim():
        raise Misfit(shapes)
    dims = [dim for dim in range(dense.dim()) if found.shape[dim] != dense.shape[dim]]
    if len(dims) > 1:
        rule = "what is cut along more than one dim has to be a DTensor, or come from a strategy's full()"
        raise Misfit(f"{shapes}: {rule}")
    dim = dims[0]
    known = {row: index for index, row in enumerate(rows_as_bytes(dense, dim))}
    index = [known.get(row, -1) for row in rows_as_bytes(found.to(dense.dtype), dim)]
    if -1 in index:
        raise Misfit(f"has a row {index.index(-1)} along dim {dim} that is none of the model's")
    return Rows(dim, index)


def rows_as_bytes(tensor: Tensor, dim: int) -> Iterable[bytes]:
    for row in tensor.movedim(dim, 0):
        yield row.contiguous().numpy().tobytes()
