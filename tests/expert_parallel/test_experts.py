"""The layer around experts on ranks: outputs, gradients and losses of one process's mixture, and what it notes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.expert_parallel.layer import AllToAll, Dispatch, MixtureOfExperts, Placement, Routed
from distlab.testing.warm_ranks import Ranks
from distlab.workload.experts import Mixing, Mixture

pytestmark = pytest.mark.timeout(120)
WIDTH, HIDDEN = 4, 6


def dense(mixing: Mixing) -> Mixture:
    torch.manual_seed(5)
    layer = Mixture(WIDTH, HIDDEN, mixing).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return layer


def on_ranks(mixing: Mixing, group: dist.ProcessGroup) -> MixtureOfExperts:
    """This rank's part of the dense layer."""
    layer, placement = dense(mixing), Placement.spread(mixing.num_experts, HIDDEN, ep=group.size())
    for key in ("up", "down"):
        part = getattr(layer.experts, key).detach()[placement.box(key, group.rank())].clone()
        setattr(layer.experts, key, torch.nn.Parameter(part))
    held = [placement.experts_of(rank) for rank in range(group.size())]
    carries = Dispatch(held, range(group.size()), group.rank(), AllToAll(group))
    return MixtureOfExperts(layer.router, layer.experts, mixing, group, carries)


def compared(group: dist.ProcessGroup, mixing: Mixing, dealt: list[int]) -> tuple[dict[str, float], list[Routed]]:
    """How far this rank's tokens, their gradients, its experts and its router are from one process's."""
    torch.manual_seed(7)
    tokens = torch.randn(sum(dealt), WIDTH, dtype=torch.float64)
    alone, mine = dense(mixing), on_ranks(mixing, group)
    whole = tokens.clone().requires_grad_()
    wanted = alone(whole)
    assert alone.extra is not None
    (wanted.square().sum() + alone.extra).backward()
    here = tokens.split(dealt)[group.rank()].clone().requires_grad_()
    mine.seen = []
    found = mine(here)
    assert mine.extra is not None
    (found.square().sum() + mine.extra).backward()
    scores: Any = mine.router
    router, extra = scores.weight.grad.clone(), mine.extra.detach().clone()
    dist.all_reduce(router, group=group)
    dist.all_reduce(extra, group=group)
    box = Placement.spread(mixing.num_experts, HIDDEN, ep=group.size()).box("up", group.rank())
    assert whole.grad is not None
    assert alone.experts.up.grad is not None
    pairs: dict[str, tuple[Any, Any]] = {
        "outputs": (found, wanted.split(dealt)[group.rank()]),
        "tokens": (here.grad, whole.grad.split(dealt)[group.rank()]),
        "experts": (mine.experts.up.grad, alone.experts.up.grad[box]),
        "router": (router, alone.router.weight.grad),
        "extra": (extra, alone.extra),
    }
    if mixing.by_bias:
        pairs["bias"] = (mine.router.bias, alone.router.bias)
    return {
        name: (one - other).abs().max().item()
        for name, (one, other) in pairs.items()
        if one is not None and one.numel()
    }, mine.seen


@pytest.mark.parametrize(
    ("mixing", "dealt"),
    [
        (Mixing(4, 1, 1.0, 0.1, 0.01, by_bias=False), [9, 4]),
        (Mixing(5, 2, 0.6, 0.1, 0.0, by_bias=True), [6, 1, 7]),
        (Mixing(2, 2, 0.0, 0.0, 0.1, by_bias=False), [3, 3, 3]),
    ],
    ids=["switch", "top_2", "more ranks than experts"],
)
def test_ranks_make_what_one_process_makes(ranks: Ranks, mixing: Mixing, dealt: list[int]) -> None:
    notes = []
    for differences, seen in ranks(len(dealt), compared, mixing, dealt):
        assert {"outputs", "tokens", "router", "extra"} <= set(differences)
        assert max(differences.values()) < 1e-12, differences
        notes.append(seen)
    assert all(seen == notes[0] for seen in notes)
    ((wanted, admitted, places),) = notes[0]
    assert sum(sum(map(sum, of_rank)) for of_rank in wanted) == sum(dealt) * mixing.top_k
    taken = [sum(of) for of in zip(*admitted, strict=True)]
    assert max(taken) <= places
    assert (sum(taken) < sum(dealt) * mixing.top_k) == (mixing.capacity_factor > 0)


def unnoted(group: dist.ProcessGroup) -> tuple[Any, Any]:
    layer = on_ranks(Mixing(2, 1, 0.0, 0.0, 0.0, by_bias=False), group)
    return layer(torch.zeros(2, 3, WIDTH, dtype=torch.float64)).shape, layer.seen


def test_it_notes_nothing_unless_it_is_asked_and_keeps_the_shape(ranks: Ranks) -> None:
    assert ranks(1, unnoted) == [(torch.Size([2, 3, WIDTH]), None)]
