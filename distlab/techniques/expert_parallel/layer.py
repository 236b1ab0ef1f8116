"""A mixture of experts over ranks: a layer whose router is on every rank, and whose experts are on some of them.

Every rank has its own tokens, and the whole router. The tokens of all ranks decide together how a batch is routed; then
rows travel to the experts and back (both below). The loss is a sum of the ranks' shares, and an expert computes all
tokens that chose it, from all ranks of its copy. So its gradient is complete on its own rank: only copies of an expert
are summed (`Placement`), and nothing is divided.
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

Compute: TypeAlias = Callable[[Tensor, list[int]], Tensor]  # of rows sorted by expert, and the number of each expert's


class Choices(NamedTuple):
    """The experts that the tokens of one rank choose."""

    experts: Tensor  # [k, T], the best first
    gates: Tensor  # [k, T], the weights of the experts' outputs; with a gradient
    probabilities: Tensor  # [T, E]
    wanted: Tensor  # [k, E], how many tokens choose each expert, as first choice, as second ...


class Routed(NamedTuple):
    """How one batch was routed in one layer, on all ranks."""

    wanted: list[list[list[int]]]  # [n][k][E]
    admitted: list[list[int]]  # [n][E]
    places: int  # of each expert


class RowDispatch(Protocol):
    """Brings rows to their experts and back: `Dispatch`, or something simpler where every rank has all experts."""

    def send_order(self, admitted: list[list[int]]) -> Tensor: ...

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor: ...


class MixtureOfExperts(nn.Module):
    """[..., D] to [..., D] for this rank's tokens; a token without a place gets zeros: only its residual goes on.

    `extra` is this rank's part of the auxiliary losses, a sum over its tokens. Where `seen` is a list, each routed
    batch is appended to it.

    Args:
        world: all ranks whose tokens share the places of an expert, in the order of their tokens.
        dispatch: brings rows to the ranks of their experts.
    """

    def __init__(
        self, router: Router, experts: Experts, rules: Mixing, world: dist.ProcessGroup, dispatch: RowDispatch
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.rules, self.world, self.dispatch = rules, world, dispatch
        self.extra: Tensor | None = None
        self.seen: list[Routed] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [T, D]
        scores = self.router(tokens)
        choices = self.choose(scores)
        table = self.gather_wanted(choices.wanted)  # [n, k, E]
        places = self.places(table)
        kept, admitted = self.admit(choices.experts, table, places)
        sent = kept[self.dispatch.send_order(admitted).to(kept.device)]
        token = sent % len(tokens)
        computed = self.dispatch(tokens[token], admitted, self.compute)
        gates = choices.gates.flatten()[sent]
        mixed = torch.zeros_like(tokens).index_add(0, token, (computed * gates[:, None]).to(tokens.dtype))
        self.balance(scores, choices, table)
        if self.seen is not None:
            self.seen.append(Routed(table.tolist(), admitted, places))
        return mixed.view_as(hidden)

    def choose(self, scores: Tensor) -> Choices:
        """Choose the experts of each token."""
        return choose(scores, self.rules.top_k)

    def gather_wanted(self, wanted: Tensor) -> Tensor:
        """Gather how often all ranks' tokens want each expert, [n, k, E], from each rank's `wanted` [k, E]."""
        tables = [torch.empty_like(wanted) for _ in range(self.world.size())]
        with phase("all_gather"):
            dist.all_gather(tables, wanted, group=self.world)
        return torch.stack(tables)

    def places(self, table: Tensor) -> int:
        """Return the number of places of each expert, by the number of all ranks' tokens."""
        num_tokens = int(table[:, 0].sum())
        return capacity(num_tokens, self.rules.top_k, table.shape[2], self.rules.capacity_factor)

    def admit(self, experts: Tensor, table: Tensor, places: int) -> tuple[Tensor, list[list[int]]]:
        """Return this rank's choices that find a place, sorted by expert, and each rank's rows for each expert."""
        kept = within_capacity(experts, table, self.world.rank(), places)
        return kept, admitted(table, places).tolist()

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply this rank's experts to `rows`, of which each expert has `counts`."""
        return grouped(rows, counts, self.experts.up, self.experts.down)

    def balance(self, scores: Tensor, choices: Choices, table: Tensor) -> None:
        """Compute the auxiliary losses, which balance the experts' loads and keep the router's scores small."""
        balance = balance_loss(choices.probabilities, table)
        self.extra = self.rules.balance * balance + self.rules.z * z_loss(scores)


# Routing: each rank decides which of its tokens go to which experts, as one process would for all tokens.
#
# One process's decision depends on other ranks' tokens in two ways only: how many stand before a token in its expert's
# queue, and how many tokens there are in all. So every rank sends all others how often its tokens chose each expert, k
# x E numbers. From this table each rank knows the places of its own tokens, what every other rank will send, and the
# balance of the whole batch. A queue has first choices before second ones; in each the ranks in order, and each rank's
# tokens in order (Lepikhin et al. 2020, "GShard", algorithm 1, where each group has its own queues; here all ranks
# share one per expert).
#
# Shapes: T tokens of this rank, k choices of each, E experts, n ranks.


def choose(scores: Tensor, top_k: int) -> Choices:
    """Choose the `top_k` experts of each token by `scores` [T, E].

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
    """Return the places of an expert: `factor` times its even share of all choices; factor 0 is one per token."""
    return math.ceil(factor * top_k * num_tokens / num_experts) if factor else num_tokens


def queued(table: Tensor) -> Tensor:
    """Count the choices that stand before each rank's in each expert's queue; `table` [n, k, E] is what ranks want."""
    in_turn = table.transpose(0, 1)  # [k, n, E], as the queue holds them
    flat = in_turn.flatten(0, 1)
    return (flat.cumsum(0) - flat).view_as(in_turn).transpose(0, 1)


def admitted(table: Tensor, places: int) -> Tensor:
    """Count the rows of each rank that each expert takes, [n, E]."""
    return table.minimum((places - queued(table)).clamp(min=0)).sum(1)


def within_capacity(experts: Tensor, table: Tensor, rank: int, places: int) -> Tensor:
    """Return the choices of `rank` that find a place: indices into the flattened `experts` [k, T], sorted by
    expert."""
    top_k, num_tokens = experts.shape
    own = table[rank].flatten()  # [k·E]: the length of each part of the queue
    parts = (experts + torch.arange(top_k, device=experts.device)[:, None] * table.shape[2]).flatten()
    order = parts.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(top_k * num_tokens, device=order.device) - (own.cumsum(0) - own)[parts[order]]
    place += queued(table)[rank].flatten()[parts]
    by_expert = experts.flatten().argsort(stable=True)
    return by_expert[place[by_expert] < places]


def balance_loss(probabilities: Tensor, table: Tensor) -> Tensor:
    """Return this rank's part of E·sum(f·P), times the tokens of the whole batch: the ranks' parts add up.

    f is an expert's share of all choices on all ranks. P is the mean of its probability, which is linear in the tokens,
    so each rank adds its own tokens'. The mean of the ranks' own losses would be another number (Fedus et al. 2021,
    section 2.2).
    """
    wanted = table.sum((0, 1)).to(probabilities.dtype)
    return wanted.numel() * (wanted / wanted.sum()) @ probabilities.sum(0)


def z_loss(scores: Tensor) -> Tensor:
    """Sum log(sum(exp))² over this rank's scores, which keeps them small (Zoph et al. 2022, "ST-MoE", section 3.1)."""
    return scores.logsumexp(-1).square().sum()


def grouped(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Apply each expert's MLP to its `counts` of `rows` [R, D], sorted by expert; up [E, D, H], down [E, H, D]."""
    parts = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    outputs = [F.gelu(part @ into) @ out for part, into, out in parts]
    return torch.cat(outputs) if outputs else rows


# Dispatch: send rows to the ranks that hold their experts, and the results back, by an uneven all_to_all.
#
# The routing table has the number of rows from each rank to each. So no rank asks, and nothing is padded, while in
# GShard every rank sends buffers of E x capacity rows, as long as the fullest expert's queue. Where several ranks hold
# parts of the same experts, each gets all their rows, and the results are added up.
#
#     rows -> all_to_all -> sorted by expert -> the experts -> in the order received -> all_to_all -> rows

# (rows, how many of them go to each rank, how many come from each) -> the rows received, rank after rank.
Swap: TypeAlias = Callable[[Tensor, list[int], list[int]], Tensor]


class Dispatch:
    """Sends rows to the experts of a group of ranks, and the results back.

    Args:
        held: the experts of each rank in the group, which may overlap.
        members: the ranks of the group, as the routing's tables number them.
        rank: this rank's index among them.
        swap: the all_to_all between them.
    """

    def __init__(self, experts_by_rank: Sequence[range], members: Sequence[int], rank: int, swap: Swap) -> None:
        self.experts_by_rank, self.members, self.rank, self.swap = experts_by_rank, members, rank, swap

    def send_order(self, admitted: list[list[int]]) -> Tensor:
        """Return the order in which this rank sends its rows, as indices into the rows sorted by expert, rank after
        rank; `admitted` [n][E] are the rows of each rank for each expert."""
        ends = [0, *accumulate(admitted[self.members[self.rank]])]
        return torch.cat([torch.arange(ends[experts.start], ends[experts.stop]) for experts in self.experts_by_rank])

    def count_rows(self, admitted: list[list[int]]) -> tuple[list[int], list[int]]:
        """Count the rows that this rank gives to each rank of its group, and those that it takes from each."""
        send_counts = [
            sum(admitted[self.members[self.rank]][expert] for expert in experts) for experts in self.experts_by_rank
        ]
        receive_counts = [
            sum(admitted[member][expert] for expert in self.experts_by_rank[self.rank]) for member in self.members
        ]
        return send_counts, receive_counts

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor:
        """Return what the experts compute of `rows`, in the same order."""
        send_counts, receive_counts = self.count_rows(admitted)
        received = linear(
            rows,
            lambda x: self.swap(x, send_counts, receive_counts),
            lambda x: self.swap(x, receive_counts, send_counts),
        )
        mine = self.experts_by_rank[self.rank]
        counts = torch.tensor([[admitted[member][expert] for expert in mine] for member in self.members]).long()
        expert_of = torch.arange(len(mine)).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = expert_of.argsort(stable=True).to(rows.device)
        computed = compute(received[order], counts.sum(0).tolist())
        return linear(
            self.restore_order(computed, order),
            lambda x: self.swap(x, receive_counts, send_counts),
            lambda x: self.swap(x, send_counts, receive_counts),
        )

    def restore_order(self, sorted_rows: Tensor, order: Tensor) -> Tensor:
        """Return rows that were put in `order` as they were received."""
        return sorted_rows[order.argsort()]


class AllToAll:
    """An all_to_all of uneven numbers of rows, by messages: receives first, and each rank begins with another peer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.peers = Peers(group)

    def __call__(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        peers = self.peers
        received_rows = rows.new_empty(sum(receive_counts), rows.shape[1])
        places, parts = received_rows.split(receive_counts), rows.contiguous().split(send_counts)
        others = [peers.after(distance) for distance in range(1, peers.world_size)]
        received, sent = peers.post(
            peers.new_tag(),
            [(peer, places[peer]) for peer in reversed(others)],
            [(peer, parts[peer]) for peer in others],
        )
        places[peers.rank].copy_(parts[peers.rank])
        with phase("receive"):  # which ends with the rank that computed longest
            for message in received:
                message.wait()
        with phase("send"):
            for message in sent:
                message.wait()
        return received_rows


class AllToAllSingle:
    """The same by PyTorch's `all_to_all_single`, which records nothing for autograd either."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        with phase("receive"):
            dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=self.group)
        return received


# Placement: which rank holds which experts, on a mesh of copies x ep x tp, rank = (copy·ep + place)·tp + part.
#
# Places share out the experts as evenly as possible: of 5 experts 3 places hold 2, 2 and 1, and with fewer experts than
# places some hold none. Parts share out the hidden units of each expert. Every copy holds everything. The layer's
# weights are up [E, D, H] and down [E, H, D].
#
# Source: Lepikhin et al. 2020, "GShard", section 3.2; Fedus et al. 2021, "Switch Transformers", section 5.5, for its
# stacking with data and tensor parallelism.


@dataclass(frozen=True)
class Placement:
    """The part of all experts that each rank holds: the number of experts per place, and of hidden units per part."""

    experts: tuple[int, ...]
    hidden: tuple[int, ...]
    copies: int = 1

    @classmethod
    def spread(cls, num_experts: int, hidden: int, *, copies: int = 1, ep: int = 1, tp: int = 1) -> "Placement":
        return cls(partition_sizes(num_experts, ep), partition_sizes(hidden, tp), copies)

    @property
    def ranks_of_a_copy(self) -> int:
        """Return the number of ranks that together hold everything once."""
        return len(self.experts) * len(self.hidden)

    def experts_of(self, rank: int) -> range:
        """Return the experts of which `rank` holds a part."""
        return run(self.experts, rank % self.ranks_of_a_copy // len(self.hidden))

    def hidden_of(self, rank: int) -> range:
        """Return the hidden units of them that `rank` holds."""
        return run(self.hidden, rank % len(self.hidden))

    def members(self, rank: int) -> range:
        """Return the ranks of the same copy."""
        first = rank - rank % self.ranks_of_a_copy
        return range(first, first + self.ranks_of_a_copy)

    def box(self, name: str, rank: int) -> tuple[slice, slice, slice]:
        """Return where the part of `rank` stands in the dense "up" [E, D, H] or "down" [E, H, D]."""
        experts, hidden = self.experts_of(rank), self.hidden_of(rank)
        units = slice(hidden.start, hidden.stop)
        return slice(experts.start, experts.stop), *((slice(None), units) if name == "up" else (units, slice(None)))

    def shape(self, name: str, part: Tensor) -> torch.Size:
        """Return the shape of the dense tensor of which a rank holds `part`."""
        width = part.shape[1 if name == "up" else 2]
        inner = (width, sum(self.hidden)) if name == "up" else (sum(self.hidden), width)
        return torch.Size((sum(self.experts), *inner))

    def piece(self, name: str, part: Tensor, rank: int) -> LocalShard:
        """Return the `part` of `rank` with its offset in the dense tensor."""
        offset = tuple(each.start or 0 for each in self.box(name, rank))
        return LocalShard(self.shape(name, part), [(offset, part)] if part.numel() else [])


def run(sizes: tuple[int, ...], index: int) -> range:
    """Return run number `index` of consecutive runs of these `sizes`."""
    first = sum(sizes[:index])
    return range(first, first + sizes[index])
