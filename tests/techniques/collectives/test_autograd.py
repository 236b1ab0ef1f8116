"""The primitives' backward passes compared with autograd on one process; the wrong backward must be detected."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives import autograd as ours
from tests.warm_ranks import Ranks

Call = Callable[[Tensor, dist.ProcessGroup], Tensor]
Dense = Callable[[list[Tensor]], list[Tensor]]

# Name -> (whether x has a row per rank [N, ...], the call on ranks, the same in one process), with one loss per rank.
OWN: dict[str, tuple[bool, Call, Dense]] = {
    "send": (False, lambda x, g: ours.send(x, g, g.size() - 1, 0), lambda xs: [xs[-1], *[x[:0] for x in xs[1:]]]),
    "broadcast": (False, lambda x, g: ours.broadcast(x, g, g.size() - 1), lambda xs: [xs[-1]] * len(xs)),
    "scatter": (True, lambda x, g: ours.scatter(x, g, g.size() - 1), lambda xs: list(xs[-1])),
    "gather": (False, lambda x, g: ours.gather(x, g, 0), lambda xs: [torch.stack(xs), *[x[:0] for x in xs[1:]]]),
    "reduce": (False, lambda x, g: ours.reduce(x, g, 0), lambda xs: [sum_of(xs), *[x[:0] for x in xs[1:]]]),
    "all_gather": (False, ours.all_gather, lambda xs: [torch.stack(xs)] * len(xs)),
    "all_reduce": (False, ours.all_reduce, lambda xs: [sum_of(xs)] * len(xs)),
    "all_to_all": (True, ours.all_to_all, lambda xs: list(torch.stack(xs, 1))),
    "reduce_scatter": (True, ours.reduce_scatter, lambda xs: list(sum_of(xs))),
}
REPLICATED: dict[str, tuple[Call, Dense]] = {
    "broadcast": (lambda x, g: ours.broadcast(x, g, 0, "replicated"), lambda xs: [xs[0]] * len(xs)),
    "all_gather": (lambda x, g: ours.all_gather(x, g, "replicated"), lambda xs: [torch.stack(xs)] * len(xs)),
    "all_reduce": (lambda x, g: ours.all_reduce(x, g, "replicated"), lambda xs: [sum_of(xs)] * len(xs)),
}


def sum_of(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def inputs(world_size: int, rows: bool) -> list[Tensor]:
    shape = (world_size, 2, 3) if rows else (2, 3)
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(world_size)
    ]


def loss(output: Tensor, seed: int) -> Tensor:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(50 + seed), dtype=torch.float64)
    return (weights * output**3).sum()


def own(group: dist.ProcessGroup, name: str) -> float:
    rows, call, dense = OWN[name]
    xs = [x.requires_grad_() for x in inputs(group.size(), rows)]
    x = xs[group.rank()].detach().clone().requires_grad_()
    loss(call(x, group), group.rank()).backward()
    total = torch.stack([loss(output, rank) for rank, output in enumerate(dense(xs))]).sum()
    return max_error(x.grad, torch.autograd.grad(total, xs, allow_unused=True)[group.rank()])


def replicated(group: dist.ProcessGroup, name: str, right: bool) -> float:
    call, dense = REPLICATED[name] if right else (OWN[name][1], REPLICATED[name][1])
    xs = [x.requires_grad_() for x in inputs(group.size(), False)]
    x = xs[group.rank()].detach().clone().requires_grad_()
    loss(call(x, group), 0).backward()
    return max_error(x.grad, torch.autograd.grad(loss(dense(xs)[0], 0), xs, allow_unused=True)[group.rank()])


def max_error(measured: Tensor | None, true: Tensor | None) -> float:
    assert measured is not None
    return float((measured - (torch.zeros_like(measured) if true is None else true)).abs().max())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OWN)
def test_gradients_of_local_losses(ranks: Ranks, name: str, world_size: int) -> None:
    assert max(ranks(world_size, own, name)) < 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_of_a_replicated_loss(ranks: Ranks, name: str, world_size: int) -> None:
    assert max(ranks(world_size, replicated, name, True)) < 1e-12


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_negative_control_wrong_backward_is_detected(ranks: Ranks, name: str) -> None:
    assert max(ranks(2, replicated, name, False)) > 1e-2


def megatron(group: dist.ProcessGroup) -> float:
    """Two products split by columns and rows, with f before and g after them; every rank gets the full gradient."""
    x0, w0 = torch.ones(2, 4, dtype=torch.float64), torch.arange(16, dtype=torch.float64).reshape(4, 4)
    x = x0.clone().requires_grad_()
    rank, width = group.rank(), 4 // group.size()
    part = w0[:, rank * width :][:, :width]
    y = ours.all_reduce(torch.relu(ours.copy(x, group) @ part) @ part.t(), group, "replicated")
    y.square().sum().backward()
    dense = x0.clone().requires_grad_()
    (torch.relu(dense @ w0) @ w0.t()).square().sum().backward()
    return max_error(x.grad, dense.grad)


def test_f_and_g_give_tensor_parallel_gradients(ranks: Ranks) -> None:
    assert max(ranks(2, megatron)) == 0
