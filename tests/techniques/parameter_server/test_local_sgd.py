"""The outer step compared with torch's own SGD, and a model as two vectors."""

import torch
import torch.distributed as dist
from torch import nn

from distlab.techniques.data_parallel.vectors import Vectors
from distlab.techniques.parameter_server.local_sgd import OuterStep
from tests.warm_ranks import Ranks


def rounds(group: dist.ProcessGroup, lr: float, momentum: float, local_steps: int) -> list[torch.Tensor]:
    """Return the common weights after each of four rounds, in which rank r uses its own gradients."""
    weights = torch.ones(5, dtype=torch.float64)
    outer = OuterStep(weights, group, local_steps, lr=lr, momentum=momentum)
    fractions, found = [0.5, 0.2, 0.3], []
    for step in range(4 * local_steps):
        weights -= 0.1 * gradient(group.rank(), step)
        outer.step(fractions[group.rank()])
        if (step + 1) % local_steps == 0:
            found.append(weights.clone())
    return found


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def test_the_outer_step_is_nesterov_sgd_on_the_weighted_mean_of_changes(ranks: Ranks) -> None:
    for lr, momentum, local_steps in ((1.0, 0.0, 1), (1.0, 0.0, 3), (0.7, 0.9, 2)):
        weights = torch.ones(5, dtype=torch.float64, requires_grad=True)
        reference = torch.optim.SGD([weights], lr=lr, momentum=momentum, nesterov=momentum > 0)
        every_rank = ranks(3, rounds, lr, momentum, local_steps)
        for index in range(4):
            steps = range(index * local_steps, (index + 1) * local_steps)
            moved = torch.zeros(5, dtype=torch.float64)
            for rank, fraction in enumerate((0.5, 0.2, 0.3)):
                moved += fraction * torch.stack([0.1 * gradient(rank, step) for step in steps]).sum(dim=0)
            weights.grad = moved
            reference.step()
            for of_rank in every_rank:
                assert torch.equal(of_rank[index], every_rank[0][index])
                torch.testing.assert_close(of_rank[index], weights.detach(), rtol=0, atol=1e-14)


def test_a_model_shares_memory_with_its_two_vectors() -> None:
    layer = nn.Linear(3, 2)
    before = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
    vectors = Vectors(layer.parameters())
    assert torch.equal(vectors.weights, before)
    for times in (1, 2):
        layer(torch.ones(3)).sum().backward()
        assert vectors.gradients.tolist() == [times] * 8
    vectors.zero()
    assert layer.weight.grad is not None and layer.weight.grad.sum() == 0
    vectors.weights.fill_(1.0)
    assert layer(torch.ones(3)).tolist() == [4.0, 4.0]
