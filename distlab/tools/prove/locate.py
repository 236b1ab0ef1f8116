"""Find the position of a rank's tensors in the dense model, by their values, whatever sharded them.

Before the first step every weight equals the model's, and no two weights are equal (user_file.py). So a tensor of the
dense shape is the whole, and one that is shorter in one dim is a selection of rows, each found by its bytes: halves,
the interleaved heads of a fused projection, a vocabulary in parts. A DTensor knows its position.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")  # for comparisons, whatever device ranks and the single process compute on
PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Rows(NamedTuple):
    """Rows along a dim of the dense tensor; `dim` -1 means all of it."""

    dim: int
    indices: list[int]

    def of(self, dense: Tensor) -> Tensor:
        return dense if self.dim < 0 else dense.index_select(self.dim, torch.tensor(self.indices))


WHOLE = Rows(-1, [])


class LocatedTensor(NamedTuple):
    """A tensor of a rank, and its position in the dense model."""

    rows: Rows
    tensor: Tensor | None  # None: a missing gradient


class Misfit(Exception):
    """A rank's tensor is no part of the dense one; the message follows the tensor's name."""


def plain_name(name: str) -> str:
    """Return a parameter's name without wrappers' parts."""
    for each in PREFIXES:
        name = name.replace(each, "")
    return name


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters under all of their names, without wrappers' parts."""
    return {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}


def local(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor for comparison; of a DTensor all of it, by a collective."""
    whole = getattr(tensor, "full_tensor", None)
    return (whole() if whole is not None else tensor).detach().to(CPU, copy=True)


def locate_in_dense(found: Tensor, dense: Tensor) -> Rows:
    """Return the position of `found` in `dense`, both before the first step; raises Misfit."""
    if found.shape == dense.shape:
        if not torch.equal(found.to(dense.dtype), dense):
            raise Misfit("begins with other weights than the model's")
        return WHOLE
    shapes = f"has shape {list(found.shape)} where the model's has {list(dense.shape)}"
    if found.dim() != dense.dim():
        raise Misfit(shapes)
    dims = [dim for dim in range(dense.dim()) if found.shape[dim] != dense.shape[dim]]
    if len(dims) > 1:
        rule = "a tensor that is sharded along several dims must be a DTensor, or come from a strategy's full()"
        raise Misfit(f"{shapes}: {rule}")
    dim = dims[0]
    known = {row: index for index, row in enumerate(rows_as_bytes(dense, dim))}
    index = [known.get(row, -1) for row in rows_as_bytes(found.to(dense.dtype), dim)]
    if -1 in index:
        raise Misfit(f"has a row {index.index(-1)} along dim {dim} that is not in the model")
    return Rows(dim, index)


def rows_as_bytes(tensor: Tensor, dim: int) -> Iterable[bytes]:
    for row in tensor.movedim(dim, 0):
        yield row.contiguous().numpy().tobytes()


# The same for a script's tensors, whose weights may be equal (ones, zeros) or random at first.


class Place(NamedTuple):
    """The position of a rank's piece: a dense tensor's name, and rows of it, or the part from `begin` on: an index per
    dimension, or one among all elements."""

    name: str
    rows: Rows = WHOLE
    begin: tuple[int, ...] = ()

    def of(self, dense: Tensor, shape: torch.Size) -> Tensor:
        dense = dense.view(-1) if len(self.begin) == 1 == len(shape) else dense
        for dim, start in enumerate(self.begin):
            dense = dense.narrow(dim, start, shape[dim])
        return self.rows.of(dense)

    def put(self, dense: Tensor, found: Tensor) -> None:
        """Write a rank's part into the dense tensor."""
        if self.rows.dim >= 0:
            dense.index_copy_(self.rows.dim, torch.tensor(self.rows.indices), found.to(dense.dtype))
        else:
            self.of(dense, found.shape).copy_(found)


def places_of(pieces: Mapping[str, Sequence[Any]], dense: Mapping[str, Tensor]) -> dict[str, Place]:
    """Return the position of each piece of a rank before the first step: declared, else by values, else by name; pieces
    without distinctive values are placed like the rest of their module. Some may not be found."""
    found: dict[str, Place] = {}
    for name, (begin, shape, tensor) in pieces.items():
        same = dense.get(name)
        if begin and same is not None and list(same.shape) == shape:
            found[name] = Place(name, begin=tuple(begin))
        elif not begin and is_distinctive(tensor):
            place = by_values(name, tensor, dense)
            found |= {} if place is None else {name: place}
    moved = renamed(found)
    for name, (begin, _, tensor) in pieces.items():
        if name in found or begin:
            continue
        wanted = next((new + name[len(old) :] for old, new in moved.items() if name.startswith(old)), name)
        module, num_rows = name.rpartition(".")[0], tensor.shape[0] if tensor.dim() else 0
        if wanted in dense and dense[wanted].shape == tensor.shape:
            found[name] = Place(wanted)
        elif wanted in dense and dense[wanted].dim() == tensor.dim():
            siblings = [each.rows for other, each in found.items() if other.rpartition(".")[0] == module]
            rows = next((each for each in siblings if each.dim == 0 and len(each.indices) == num_rows), None)
            found |= {name: Place(wanted, rows)} if rows is not None and tensor.dim() == 1 else {}
    return found


def is_distinctive(tensor: Tensor) -> bool:
    """Return whether the tensor can be found by its values: they are not all equal."""
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def by_values(name: str, tensor: Tensor, dense: Mapping[str, Tensor]) -> Place | None:
    """Find these values in the dense model, first in the tensor of the same name."""
    ordered = [name, *(other for other in dense if other != name)] if name in dense else list(dense)
    for other in ordered:
        if dense[other].shape == tensor.shape and torch.equal(dense[other], tensor.to(dense[other].dtype)):
            return Place(other)
    if name in dense and dense[name].shape == tensor.shape:
        return Place(name)
    for other in ordered:
        with suppress(Misfit):
            if dense[other].dim() == tensor.dim() and dense[other].numel() > tensor.numel():
                rows = locate_in_dense(tensor, dense[other])
                if len(set(rows.indices)) == len(rows.indices):
                    return Place(other, rows)
    return None


def renamed(places: Mapping[str, Place]) -> dict[str, str]:
    """Return prefixes of names that differ between a rank and the whole model in one part, such as the layer's number
    in a pipeline stage."""
    found = {}
    for name, place in places.items():
        old, new = name.split("."), place.name.split(".")
        other = [index for index, (one, two) in enumerate(zip(old, new, strict=False)) if one != two]
        if len(old) == len(new) and len(other) == 1:
            found[".".join(old[: other[0] + 1]) + "."] = ".".join(new[: other[0] + 1]) + "."
    return found
