"""LARS compared with its formula, with pytorch_optimizer, and with weights sharded over ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from distlab.techniques.large_batch import Lars, split_by_decay
from tests.techniques.large_batch.sharded import groups, train, trained_in_parts, weights
from tests.warm_ranks import Ranks

DECAY = 0.1


def test_one_step_is_the_papers_formula() -> None:
    weight, bias = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.tensor([1.0]))
    # The gradient points against the weight, so ‖g + βw‖ is not ‖g‖ + β‖w‖.
    weight.grad, bias.grad = torch.tensor([[-0.6, -0.8]]), torch.tensor([2.0])
    Lars(split_by_decay([weight, bias], DECAY), lr=0.5, trust=0.01).step()
    rate = 0.01 * 5 / (1 + DECAY * 5)
    wanted = torch.tensor([[3.0, 4.0]]) - 0.5 * rate * (
        torch.tensor([[-0.6, -0.8]]) + DECAY * torch.tensor([[3.0, 4.0]])
    )
    assert torch.allclose(weight, wanted, rtol=1e-6)
    assert bias.item() == pytest.approx(1 - 0.5 * 2)  # neither scaled nor decayed


def test_equal_to_pytorch_optimizer() -> None:
    from pytorch_optimizer import LARS

    ours, theirs = weights(torch.float32), weights(torch.float32)
    found = train(Lars(groups(ours, DECAY), 0.5, trust=0.02), ours, torch.float32)
    split: list[dict[str, Any]] = [{"params": theirs[:1] + theirs[2:], "weight_decay": DECAY}, {"params": theirs[1:2]}]
    reference = LARS(split, lr=0.5, trust_coefficient=0.02)
    for mine, wanted in zip(found, train(reference, theirs, torch.float32), strict=True):
        assert (mine - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_a_zero_norm_gives_the_trust_rate(zero: str) -> None:
    weight = nn.Parameter(torch.zeros(1, 2) if zero == "weight" else torch.ones(1, 2))
    weight.grad = torch.zeros(1, 2) if zero == "gradient" else torch.ones(1, 2)
    before = weight.detach().clone()
    Lars(split_by_decay([weight], DECAY), lr=1.0, trust=0.001).step()
    step = 1.0 if zero == "weight" else DECAY
    assert torch.allclose(before - weight, torch.full((1, 2), 0.001 * step), rtol=1e-3)


def test_sharded_steps_equal_unsharded_steps(ranks: Ranks) -> None:
    assert max(ranks(3, trained_in_parts, Lars, 50.0, DECAY, True)) <= 1e-12
    assert max(ranks(3, trained_in_parts, Lars, 50.0, DECAY, False)) > 1e-3  # each by the norm of its own part
