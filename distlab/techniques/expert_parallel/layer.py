"""A mixture of experts over ranks: a layer whose router is here, and whose experts may be elsewhere.

All ranks have tokens of their own, and the router whole. What a batch routes is decided by the tokens of all, rows
travel to the experts and back (both below). A loss that is a sum of the ranks' shares gives each expert its whole
gradient where it is, since all tokens of its copy's ranks came there (`Placement`): only copies are left to sum, and
nothing is divided.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.workload.experts import Experts, Mixing, Router
from distlab.techniques.collectives.autograd import linear
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import LocalShard
from distlab.techniques.tensor_parallel.layers import partition_sizes

# Dispatch: rows to the ranks that hold their experts, and what came of them back, by an uneven all_to_all.
#
# Which rank sends how many rows to which is in the table of the routing, so nobody asks, and nothing is padded:
# GShard's buffers of E x capacity rows from every rank are as long as the fullest expert's queue, whatever is in them.
# Ranks that each hold a part of the same experts all get its rows, and what they send back is added up.
#
#     rows -> all_to_all -> sorted by expert -> the experts -> as they came -> all_to_all -> rows

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


class AllToAllSingle:
    """The same in one call of PyTorch's, `all_to_all_single`, which records nothing for autograd either."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        came = rows.new_empty(sum(take), rows.shape[1])
        with phase("receive"):
            dist.all_to_all_single(came, rows.contiguous(), take, give, group=self.group)
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
        return cls(partition_sizes(num_experts, ep), partition_sizes(hidden, tp), copies)

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


# Routing: which tokens go to which experts, decided by each rank for its own, as one process would for all of them.
#
# What one process decides depends on tokens of other ranks in two ways only: how many of them stand before one's own
# in an expert's queue, and how many there are. So every rank tells all others how often its tokens chose each expert,
# k x E numbers, and from this table each knows the place of its own tokens, what every other rank will send, and the
# whole batch's balance. A queue holds first choices before second ones, in each the ranks in their order, and their
# tokens in theirs (Lepikhin et al. 2020, "GShard", algorithm 1, whose groups each have queues of their own; here
# there is one for all).
#
# Shapes: T tokens of this rank, k choices of each, E experts, n ranks.


class Choices(NamedTuple):
    """What the tokens of one rank want."""

    experts: Tensor  # [k, T], the best first
    gates: Tensor  # [k, T], by how much an expert's output counts; with a gradient
    probabilities: Tensor  # [T, E]
    wanted: Tensor  # [k, E], how often each expert is which choice


def choose(scores: Tensor, top_k: int) -> Choices:
    """The `top_k` experts of each token by `scores` [T, E].

    Gates of several choices are divided by their sum. A single one is the probability itself: divided by itself it
    would be 1, and the router would learn nothing (Fedus et al. 2021, "Switch Transformers", section 2.1).
    """
    probabilities = scores.softmax(-1)
    experts = probabilities.detach().topk(top_k).indices.T.contiguous()
    gates = probabilities.gather(1, experts.T).T
    gates = gates / gates.sum(0) if top_k > 1 else gates
    wanted = torch.stack([choice.bincount(minlength=scores.shape[1]) for choice in experts])
    return Choices(experts, gates, probabilities, wanted)


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """The places of an expert: `factor` times its even share of all choices; of a factor 0 one a token."""
    return math.ceil(factor * top_k * num_tokens / num_experts) if factor else num_tokens


def queued(table: Tensor) -> Tensor:
    """How many choices stand before those of each rank in each expert's queue; `table` [n, k, E] is what all want."""
    in_turn = table.transpose(0, 1)  # [k, n, E], as the queue holds them
    flat = in_turn.flatten(0, 1)
    return (flat.cumsum(0) - flat).view_as(in_turn).transpose(0, 1)


def admitted(table: Tensor, places: int) -> Tensor:
    """How many rows of each rank each expert takes, [n, E]."""
    return table.minimum((places - queued(table)).clamp(min=0)).sum(1)


def within_capacity(experts: Tensor, table: Tensor, rank: int, places: int) -> Tensor:
    """The choices of `rank` that find a place: numbers of the flattened `experts` [k, T], sorted by expert."""
    top_k, num_tokens = experts.shape
    own = table[rank].flatten()  # [k·E]: each choice has a part of the queue
    parts = (experts + torch.arange(top_k, device=experts.device)[:, None] * table.shape[2]).flatten()
    order = parts.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(top_k * num_tokens, device=order.device) - (own.cumsum(0) - own)[parts[order]]
    place += queued(table)[rank].flatten()[parts]
    by_expert = experts.flatten().argsort(stable=True)
    return by_expert[place[by_expert] < places]


def balance_loss(probabilities: Tensor, table: Tensor) -> Tensor:
    """This rank's part of E·sum(f·P), times the tokens of the whole batch: all parts add up.

    f is the share of all choices that wanted an expert, on all ranks; P, the mean of its probability, is linear in the
    tokens, so each rank adds its own. A mean of the ranks' own losses is another number (Fedus et al. 2021, section
    2.2).
    """
    wanted = table.sum((0, 1)).to(probabilities.dtype)
    return wanted.numel() * (wanted / wanted.sum()) @ probabilities.sum(0)


def z_loss(scores: Tensor) -> Tensor:
    """The sum of log(sum(exp))² of this rank's scores: keeps them small (Zoph et al. 2022, "ST-MoE", section 3.1)."""
    return scores.logsumexp(-1).square().sum()


def grouped(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Each expert's MLP on its `counts` of `rows` [R, D], which are sorted by expert; up [E, D, H], down [E, H, D]."""
    parts = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    done = [F.gelu(part @ into) @ out for part, into, out in parts]
    return torch.cat(done) if done else rows


class Routed(NamedTuple):
    """What one batch did in one layer, on all ranks."""

    wanted: list[list[list[int]]]  # [n][k][E]
    admitted: list[list[int]]  # [n][E]
    places: int  # of each expert


class Carries(Protocol):
    """What brings rows to experts and back: dispatch.Dispatch, or nothing where all experts are here."""

    def addressed(self, admitted: list[list[int]]) -> Tensor: ...

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor: ...


class MixtureOfExperts(nn.Module):
    """[..., D] to [..., D] for this rank's tokens; those without a place get zeros, and go on by the residual.

    `extra` is this rank's part of the auxiliary losses, a sum over its tokens; `seen` what was routed, where it is a
    list.

    Args:
        world: all ranks whose tokens share the places of an expert, in the order of their tokens.
        carries: between this rank and those that hold the other experts.
    """

    def __init__(
        self, router: Router, experts: Experts, rules: Mixing, world: dist.ProcessGroup, carries: Carries
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.rules, self.world, self.carries = rules, world, carries
        self.extra: Tensor | None = None
        self.seen: list[Routed] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [T, D]
        scores = self.router(tokens)
        choices = self.choose(scores)
        table = self.everyone(choices.wanted)  # [n, k, E]
        places = self.places(table)
        kept, admitted = self.admit(choices.experts, table, places)
        leaving = kept[self.carries.addressed(admitted).to(kept.device)]
        token = leaving % len(tokens)
        came = self.carries(tokens[token], admitted, self.compute)
        gates = choices.gates.flatten()[leaving]
        mixed = torch.zeros_like(tokens).index_add(0, token, (came * gates[:, None]).to(tokens.dtype))
        self.balance(scores, choices, table)
        if self.seen is not None:
            self.seen.append(Routed(table.tolist(), admitted, places))
        return mixed.view_as(hidden)

    def choose(self, scores: Tensor) -> Choices:
        """The experts of each token."""
        return choose(scores, self.rules.top_k)

    def everyone(self, wanted: Tensor) -> Tensor:
        """What the tokens of all ranks want, [n, k, E]; each rank has this one's [k, E]."""
        of_ranks = [torch.empty_like(wanted) for _ in range(self.world.size())]
        with phase("all_gather"):
            dist.all_gather(of_ranks, wanted, group=self.world)
        return torch.stack(of_ranks)

    def places(self, table: Tensor) -> int:
        """Of each expert, by the tokens of all ranks."""
        num_tokens = int(table[:, 0].sum())
        return capacity(num_tokens, self.rules.top_k, table.shape[2], self.rules.capacity_factor)

    def admit(self, experts: Tensor, table: Tensor, places: int) -> tuple[Tensor, list[list[int]]]:
        """This rank's choices that find a place, sorted by expert, and the rows of each rank for each expert."""
        kept = within_capacity(experts, table, self.world.rank(), places)
        return kept, admitted(table, places).tolist()

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The experts of this rank on `rows`, `counts` of each."""
        return grouped(rows, counts, self.experts.up, self.experts.down)

    def balance(self, scores: Tensor, choices: Choices, table: Tensor) -> None:
        """What keeps the experts busy alike, and the router's scores small."""
        balance = balance_loss(choices.probabilities, table)
        self.extra = self.rules.balance * balance + self.rules.z * z_loss(scores)
