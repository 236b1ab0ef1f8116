"""Who holds which experts: a mesh of copies x ep x tp, rank = (copy·ep + place)·tp + part.

A place holds some experts, as even as it goes: of 5 on 3 ranks 2, 2 and 1, and nothing where there are fewer experts
than places. A part holds some of the hidden units of each, a copy all that another one holds. The layer's weights are
up [E, D, H] and down [E, H, D].

Source: Lepikhin et al. 2020, "GShard", section 3.2; Fedus et al. 2021, "Switch Transformers", section 5.5, for its
stacking with data and tensor parallelism.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.parallel.piece import Piece
from workers.parallel.slices import shares


@dataclass(frozen=True)
class Placement:
    """Which part of all experts each rank holds: `experts` are a place's, `hidden` a part's hidden units."""

    experts: tuple[int, ...]
    hidden: tuple[int, ...]
    copies: int = 1

    @classmethod
    def spread(cls, num_experts: int, hidden: int, *, copies: int = 1, ep: int = 1, tp: int = 1) -> "Placement":
        """As even as it goes."""
        return cls(shares(num_experts, ep), shares(hidden, tp), copies)

    @property
    def ranks_of_a_copy(self) -> int:
        """Ranks that together hold everything once."""
        return len(self.experts) * len(self.hidden)

    def experts_of(self, rank: int) -> range:
        """The experts of which `rank` holds a part."""
        return run(self.experts, rank % self.ranks_of_a_copy // len(self.hidden))

    def hidden_of(self, rank: int) -> range:
        """The hidden units of them that it holds."""
        return run(self.hidden, rank % len(self.hidden))

    def members(self, rank: int) -> range:
        """The ranks of its copy."""
        first = rank - rank % self.ranks_of_a_copy
        return range(first, first + self.ranks_of_a_copy)

    def box(self, name: str, rank: int) -> tuple[slice, slice, slice]:
        """Where its part of the dense "up" [E, D, H] or "down" [E, H, D] stands."""
        experts, hidden = self.experts_of(rank), self.hidden_of(rank)
        units = slice(hidden.start, hidden.stop)
        return slice(experts.start, experts.stop), *((slice(None), units) if name == "up" else (units, slice(None)))

    def shape(self, name: str, part: Tensor) -> torch.Size:
        """The dense tensor's, of which `part` is a rank's."""
        width = part.shape[1 if name == "up" else 2]
        inner = (width, sum(self.hidden)) if name == "up" else (sum(self.hidden), width)
        return torch.Size((sum(self.experts), *inner))

    def piece(self, name: str, part: Tensor, rank: int) -> Piece:
        """`part` of `rank` in the dense tensor's coordinates."""
        offset = tuple(each.start or 0 for each in self.box(name, rank))
        return Piece(self.shape(name, part), [(offset, part)] if part.numel() else [])


def run(sizes: tuple[int, ...], index: int) -> range:
    """What number `index` of consecutive runs of these `sizes` covers."""
    first = sum(sizes[:index])
    return range(first, first + sizes[index])
