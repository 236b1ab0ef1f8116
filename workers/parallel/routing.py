"""Routing: which tokens go to which experts, decided by each rank for its own, as one process would for all of them.

What one process decides depends on tokens of other ranks in two ways only: how many of them stand before one's own in
an expert's queue, and how many there are. So every rank tells all others how often its tokens chose each expert, k x E
numbers, and from this table each knows the place of its own tokens, what every other rank will send, and the whole
batch's balance. A queue holds first choices before second ones, in each the ranks in their order, and their tokens in
theirs (Lepikhin et al. 2020, "GShard", algorithm 1, whose groups each have queues of their own; here there is one for
all).

Shapes: T tokens of this rank, k choices of each, E experts, n ranks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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


def kept(experts: Tensor, table: Tensor, rank: int, places: int) -> Tensor:
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
