"""Plain SGD equals torch's to the bit and imports nothing; clipping by the global norm of a partitioned model."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.optimizer import PlainSGD, clip_gradients, make_optimizer, named_tensors
from tests.warm_ranks import Ranks


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(5, 3, dtype=torch.float64)


def trained(optimizer_of: type) -> list[torch.Tensor]:
    model = linear()
    optimizer = optimizer_of(model.parameters(), lr=0.3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_plain_sgd_equals_torchs_to_the_bit() -> None:
    for ours, torchs in zip(trained(PlainSGD), trained(torch.optim.SGD), strict=True):
        assert torch.equal(ours, torchs)


def test_a_parameter_without_a_gradient_stays() -> None:
    model = linear()
    before = [parameter.clone() for parameter in model.parameters()]
    PlainSGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_the_optimizers_state_has_dense_names() -> None:
    model = linear()
    adamw = make_optimizer(model.parameters(), Config.read({"LAB_OPTIMIZER": "adamw"}))
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    adamw.step()
    assert {name for name, _ in named_tensors(model, adamw, "optimizer")} == {
        f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")
    }
    assert list(named_tensors(model, make_optimizer(model.parameters(), Config.read({})), "optimizer")) == []


def test_a_step_of_sgd_imports_no_compiler() -> None:
    program = """
import sys, torch
from distlab.lab.workload.optimizer import PlainSGD
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
PlainSGD(model.parameters(), 0.1).step()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


# The global norm over ranks that each hold a part, against torch's own on all gradients together.

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
def test_parts_are_clipped_like_the_whole_model(ranks: Ranks, world_size: int, max_norm: float) -> None:
    results = ranks(world_size, clipped, max_norm, False)
    for of_rank, expected in zip(results, wanted(world_size, max_norm), strict=True):
        for found, right in zip(of_rank, expected, strict=True):
            assert found == pytest.approx(right, abs=1e-14)


def test_a_gradient_that_counts_on_every_rank_is_clipped_too_much(ranks: Ranks) -> None:
    counted_once, everywhere = ranks(3, clipped, 0.5, False)[0], ranks(3, clipped, 0.5, True)[0]
    assert abs(everywhere[1][-1]) < 0.95 * abs(counted_once[1][-1])
