"""A mixture of experts over ranks: a layer whose router is here, and whose experts may be elsewhere.

All ranks have tokens of their own, and the router whole. What a batch routes is decided by the tokens of all
(below), rows travel to the experts and back (dispatch.py). A loss that is a sum of the ranks' shares gives each
expert its whole gradient where it is, since all tokens of its copy's ranks came there (placement.py): only copies are
left to sum, and nothing is divided.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.collectives.phases import phase
from distlab.expert_parallel.dispatch import Compute

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


def choose(scores: Tensor, top_k: int, bias: Tensor | None = None) -> Choices:
    """The `top_k` experts of each token by `scores` [T, E]; a `bias` [E] moves the choice, and no gate.

    Gates of several choices are divided by their sum. A single one is the probability itself: divided by itself it
    would be 1, and the router would learn nothing (Fedus et al. 2021, "Switch Transformers", section 2.1).
    """
    probabilities = scores.softmax(-1)
    preferred = probabilities.detach() if bias is None else probabilities.detach() + bias
    experts = preferred.topk(top_k).indices.T.contiguous()
    gates = probabilities.gather(1, experts.T).T
    gates = gates / gates.sum(0) if top_k > 1 else gates
    wanted = torch.stack([choice.bincount(minlength=scores.shape[1]) for choice in experts])
    return Choices(experts, gates, probabilities, wanted)


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """The places of an expert: `factor` times its even share of the choices of all `num_tokens`; a factor of 0 gives
    every token one."""
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


def moved_bias(bias: Tensor, table: Tensor, rate: float) -> Tensor:
    """The bias of the next batch: down by `rate` where an expert was wanted more than the mean, else up (DeepSeek-AI
    2024, "DeepSeek-V3", section 2.1.2)."""
    wanted = table.sum((0, 1)).double()
    return bias + rate * (wanted.mean() - wanted).sign().to(bias.dtype)


def grouped(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Each expert's MLP on its `counts` of `rows` [R, D], which are sorted by expert; up [E, D, H], down [E, H, D]."""
    parts = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    done = [F.gelu(part @ into) @ out for part, into, out in parts]
    return torch.cat(done) if done else rows


@dataclass(frozen=True)
class Rules:
    """How tokens find experts, and what balances them (below)."""

    top_k: int
    capacity_factor: float
    balance: float
    z: float
    bias_rate: float


class Routed(NamedTuple):
    """What one batch did in one layer, on all ranks."""

    wanted: list[list[list[int]]]  # [n][k][E]
    admitted: list[list[int]]  # [n][E]
    places: int  # of each expert


class Carries(Protocol):
    """What brings rows to experts and back: dispatch.Dispatch, or nothing where all experts are here."""

    def addressed(self, admitted: list[list[int]]) -> Tensor: ...

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor: ...


class Scores(Protocol):
    """A router: tokens [T, D] to scores [T, E]; a `bias` [E] moves the choice, where there is one."""

    bias: nn.Parameter | None

    def __call__(self, tokens: Tensor) -> Tensor: ...


class Weights(Protocol):
    """What a rank holds of all experts: up [e, D, h], down [e, h, D]."""

    up: nn.Parameter
    down: nn.Parameter


class MixtureOfExperts(nn.Module):
    """[..., D] to [..., D] for this rank's tokens; those without a place get zeros, and go on by the residual.

    `extra` is this rank's part of the auxiliary losses, a sum over its tokens; `seen` what was routed, where it is a
    list.

    Args:
        world: all ranks whose tokens share the places of an expert, in the order of their tokens.
        carries: between this rank and those that hold the other experts.
    """

    def __init__(
        self, router: Scores, experts: Weights, rules: Rules, world: dist.ProcessGroup, carries: Carries
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
        return choose(scores, self.rules.top_k, self.router.bias)

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
        """What keeps the experts busy alike: losses now, a bias from the next batch on."""
        balance = balance_loss(choices.probabilities, table)
        self.extra = self.rules.balance * balance + self.rules.z * z_loss(scores)
        self.move_bias(table)

    @torch.no_grad()
    def move_bias(self, table: Tensor) -> None:
        """By what the tokens of all ranks want, so that it stays the same on all."""
        if self.router.bias is not None:
            self.router.bias.copy_(moved_bias(self.router.bias, table, self.rules.bias_rate))
