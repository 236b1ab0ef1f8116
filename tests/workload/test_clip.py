"""The global norm over ranks that each hold a part, against torch's own on all gradients together."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.testing.warm_ranks import Ranks
from distlab.workload.strategy import clip_gradients

pytestmark = pytest.mark.timeout(60)


def gradients(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(3 + rank, generator=draw, dtype=torch.float64)]


def shared() -> Tensor:
    """A gradient that every rank holds."""
    return torch.arange(4, dtype=torch.float64)


def clipped(group: dist.ProcessGroup, max_norm: float, counted_everywhere: bool) -> list[list[float]]:
    own, whole = gradients(group.rank()), shared()
    counts = group.rank() == 0 or counted_everywhere
    clip_gradients([*own, *([whole] if counts else [])], [*own, whole], max_norm, group)
    return [tensor.tolist() for tensor in (*own, whole)]


def wanted(world_size: int, max_norm: float) -> list[list[list[float]]]:
    parameters = [
        nn.Parameter(torch.zeros_like(g)) for g in [*(gradients(rank)[0] for rank in range(world_size)), shared()]
    ]
    for parameter, g in zip(parameters, [*(gradients(rank)[0] for rank in range(world_size)), shared()], strict=True):
        parameter.grad = g
    nn.utils.clip_grad_norm_(parameters, max_norm)
    values = [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None]
    return [[own, values[-1]] for own in values[:-1]]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("world_size", [1, 3])
def test_parts_are_clipped_as_the_whole(ranks: Ranks, world_size: int, max_norm: float) -> None:
    results = ranks(world_size, clipped, max_norm, False)
    for of_rank, expected in zip(results, wanted(world_size, max_norm), strict=True):
        for found, right in zip(of_rank, expected, strict=True):
            assert found == pytest.approx(right, abs=1e-14)


def test_a_gradient_that_counts_on_every_rank_is_clipped_too_much(ranks: Ranks) -> None:
    counted_once, everywhere = ranks(3, clipped, 0.5, False)[0], ranks(3, clipped, 0.5, True)[0]
    assert abs(everywhere[1][-1]) < 0.95 * abs(counted_once[1][-1])
