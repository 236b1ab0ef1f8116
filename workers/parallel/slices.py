"""Slices: which part of a dense tensor each rank holds, and how the parts become the dense tensor again.

Parts are runs along one dimension, as even as whole units allow (torch's tensor_split: the first ranks one more). The
unit is a row or a column, or an attention head of several, which no rank may hold half of: 7 heads on 4 ranks are 2, 2,
2 and 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.parallel.peers import Peers
from workers.parallel.piece import Piece


@dataclass(frozen=True)
class Slice:
    """Rank r holds `sizes[r]` of the dense tensor along `dim`, after those of the ranks before it."""

    dim: int
    sizes: tuple[int, ...]

    def piece(self, dense: Tensor, rank: int) -> Tensor:
        """The part of `dense` that `rank` holds: a copy, so that the dense tensor can go."""
        view = dense.detach().narrow(self.dim, self.first(rank), self.sizes[rank])
        return view.clone(memory_format=torch.contiguous_format)

    def place(self, part: Tensor, rank: int) -> Piece:
        """Where the part of `rank` stands in the dense tensor."""
        shape, offset = list(part.shape), [0] * part.dim()
        shape[self.dim], offset[self.dim] = sum(self.sizes), self.first(rank)
        return Piece(torch.Size(shape), [(tuple(offset), part)] if part.numel() else [])

    def placed(self, piece: Piece, rank: int) -> Piece:
        """The same for a piece of that part."""
        shape, first = list(piece.shape), self.first(rank)
        shape[self.dim] = sum(self.sizes)
        moved = [((*at[: self.dim], at[self.dim] + first, *at[self.dim + 1 :]), box) for at, box in piece.boxes]
        return Piece(torch.Size(shape), moved)

    def first(self, rank: int) -> int:
        """Where the part of `rank` begins."""
        return sum(self.sizes[:rank])


def shares(num_units: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of each rank's share of `num_units` units, each `unit` long."""
    each, more = divmod(num_units, num_ranks)
    return tuple((each + (rank < more)) * unit for rank in range(num_ranks))


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """The slice of each parameter that is not held whole, by its name: what each module says in its `slices`."""
    return {
        f"{name}.{parameter}" if name else parameter: part
        for name, module in model.named_modules()
        for parameter, part in getattr(module, "slices", {}).items()
    }


def join(piece: Tensor, place: Slice, peers: Peers) -> Tensor | None:
    """The dense tensor of all ranks' pieces, on rank 0 of the group; None elsewhere. A collective."""
    tag = peers.new_tag()
    if peers.rank:
        _, sent = peers.post(tag, sends=[(0, piece.contiguous())])
        sent[0].wait()
        return None
    shape = list(piece.shape)
    pieces = [
        piece,
        *(piece.new_empty([*shape[: place.dim], size, *shape[place.dim + 1 :]]) for size in place.sizes[1:]),
    ]
    received, _ = peers.post(tag, receives=list(enumerate(pieces))[1:])
    for message in received:
        message.wait()
    return torch.cat(pieces, place.dim)
