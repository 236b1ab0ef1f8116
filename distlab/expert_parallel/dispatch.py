"""Dispatch: rows to the ranks that hold their experts, and what came of them back, by an uneven all_to_all.

Which rank sends how many rows to which is in the table of the routing, so nobody asks, and nothing is padded: GShard's
buffers of E x capacity rows from every rank are as long as the fullest expert's queue, whatever is in them. Ranks that
each hold a part of the same experts all get its rows, and what they send back is added up.

    rows -> all_to_all -> sorted by expert -> the experts -> as they came -> all_to_all -> rows
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.autograd import linear
from distlab.collectives.phases import phase
from distlab.collectives.point_to_point import Peers
from distlab.collectives.sharded_tensor import LocalShard
from distlab.tensor_parallel.layers import shares

# (rows, how many of them go to each rank, how many come from each) -> what came, rank after rank.
Swap: TypeAlias = Callable[[Tensor, list[int], list[int]], Tensor]
Compute: TypeAlias = Callable[[Tensor, list[int]], Tensor]  # experts, of rows sorted by expert and how many are each's


class AllToAll:
    """Rows of uneven numbers from each rank to each, by messages: receives first, each begins with another peer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.peers = Peers(group)

    def __call__(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        peers = self.peers
        came = rows.new_empty(sum(take), rows.shape[1])
        places, parts = came.split(take), rows.contiguous().split(give)
        others = [peers.after(distance) for distance in range(1, peers.world_size)]
        received, sent = peers.post(
            peers.new_tag(),
            [(peer, places[peer]) for peer in reversed(others)],
            [(peer, parts[peer]) for peer in others],
        )
        places[peers.rank].copy_(parts[peers.rank])
        with phase("receive"):  # of the rank that computed longest
            for message in received:
                message.wait()
        with phase("send"):
            for message in sent:
                message.wait()
        return came


class Dispatch:
    """Around the experts of this rank.

    Args:
        held: the experts of each rank in the group, which may overlap.
        members: the ranks of the group, as the routing's tables number them.
        rank: this one's place among them.
        swap: what carries rows between them.
    """

    def __init__(self, held: Sequence[range], members: Sequence[int], rank: int, swap: Swap) -> None:
        self.held, self.members, self.rank, self.swap = held, members, rank, swap

    def addressed(self, admitted: list[list[int]]) -> Tensor:
        """The order in which this rank's rows leave: numbers of rows that are sorted by expert, rank after rank;
        `admitted` [n][E] are the rows of each rank for each expert."""
        ends = [0, *accumulate(admitted[self.members[self.rank]])]
        return torch.cat([torch.arange(ends[theirs.start], ends[theirs.stop]) for theirs in self.held])

    def numbers(self, admitted: list[list[int]]) -> tuple[list[int], list[int]]:
        """How many rows this rank gives to each of its group, and how many it takes from each."""
        give = [sum(admitted[self.members[self.rank]][expert] for expert in theirs) for theirs in self.held]
        take = [sum(admitted[member][expert] for expert in self.held[self.rank]) for member in self.members]
        return give, take

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor:
        """What the experts make of `rows`, in their order."""
        give, take = self.numbers(admitted)
        came = linear(rows, lambda x: self.swap(x, give, take), lambda x: self.swap(x, take, give))
        mine = self.held[self.rank]
        counts = torch.tensor([[admitted[member][expert] for expert in mine] for member in self.members]).long()
        expert_of = torch.arange(len(mine)).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = expert_of.argsort(stable=True).to(rows.device)
        done = compute(came[order], counts.sum(0).tolist())
        return linear(
            self.returned(done, order), lambda x: self.swap(x, take, give), lambda x: self.swap(x, give, take)
        )

    def returned(self, done: Tensor, order: Tensor) -> Tensor:
        """Rows that were put in `order`, as they came."""
        return done[order.argsort()]


# Who holds which experts: a mesh of copies x ep x tp, rank = (copy·ep + place)·tp + part.
#
# A place holds some experts, as even as it goes: of 5 on 3 ranks 2, 2 and 1, and nothing where there are fewer
# experts than places. A part holds some of the hidden units of each, a copy all that another one holds. The layer's
# weights are up [E, D, H] and down [E, H, D].
#
# Source: Lepikhin et al. 2020, "GShard", section 3.2; Fedus et al. 2021, "Switch Transformers", section 5.5, for its
# stacking with data and tensor parallelism.


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

    def piece(self, name: str, part: Tensor, rank: int) -> LocalShard:
        """`part` of `rank` in the dense tensor's coordinates."""
        offset = tuple(each.start or 0 for each in self.box(name, rank))
        return LocalShard(self.shape(name, part), [(offset, part)] if part.numel() else [])


def run(sizes: tuple[int, ...], index: int) -> range:
    """What number `index` of consecutive runs of these `sizes` covers."""
    first = sum(sizes[:index])
    return range(first, first + sizes[index])
