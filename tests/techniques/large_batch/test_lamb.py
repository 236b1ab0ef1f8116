"""LAMB compared with its formula, with pytorch_optimizer, and with weights sharded over ranks."""

import math

import pytest
import torch
from torch import nn

from distlab.techniques.large_batch import Lamb, split_by_decay
from tests.techniques.large_batch.sharded import groups, trained_in_parts, weights
from tests.warm_ranks import Ranks

DECAY, EPS = 0.1, 1e-6


def stepped(weight: list[float], gradient: list[float], **settings: object) -> torch.Tensor:
    """The first update of a matrix of one row, at rate 1."""
    parameter = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
    parameter.grad = torch.tensor([gradient], dtype=torch.float64)
    before = parameter.detach().clone()
    Lamb(split_by_decay([parameter], DECAY), lr=1.0, **settings).step()  # type: ignore[arg-type]
    return (before - parameter.detach())[0]


def test_two_steps_are_the_papers_formula() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer, w = Lamb(split_by_decay([weight], DECAY), lr=0.5), weight.detach().clone()
    m = v = torch.zeros(1, 2, dtype=torch.float64)
    for step, gradient in enumerate(torch.tensor([[[1.0, -2.0]], [[0.5, 3.0]]], dtype=torch.float64), 1):
        weight.grad = gradient
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        r = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + EPS) + DECAY * w
        w = w - 0.5 * w.norm() / r.norm() * r
        assert torch.allclose(weight, w, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_equal_to_pytorch_optimizer(decay: float) -> None:
    """pytorch_optimizer leaves the bias of m and v in r. The trust ratio cancels any factor of r + λw, so its λ is
    divided by the factor of r."""
    from pytorch_optimizer import Lamb as Theirs

    ours, theirs = weights(torch.float32)[:1], weights(torch.float32)[:1]  # it would scale a bias, too
    with torch.no_grad():
        ours[0].mul_(5)  # a norm above the bound of 10
        theirs[0].mul_(5)
    reference = Theirs(theirs, lr=0.01, adam_debias=True, weight_decouple=False, eps=1e-12)
    optimizer = Lamb(split_by_decay(ours, decay), 0.01, eps=1e-12)  # eps weighs differently without that bias
    for step in range(4):
        unbiased = math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        reference.param_groups[0]["weight_decay"] = decay / unbiased
        ours[0].grad, theirs[0].grad = (
            torch.randn(7, 5, generator=torch.Generator().manual_seed(step)) for _ in range(2)
        )
        optimizer.step()
        reference.step()
        assert ours[0].detach().norm() > 10
        assert (ours[0] - theirs[0]).abs().max() < 2e-6  # of weights up to 10, in float32


def test_bounds_of_the_norm() -> None:
    free, bound = stepped([3.0, 4.0], [1.0, 1.0]), stepped([3.0, 4.0], [1.0, 1.0], bounds=(0.0, 2.0))
    assert free.norm().item() == pytest.approx(5)
    assert bound.norm().item() == pytest.approx(2)
    assert stepped([0.3, 0.4], [1.0, 1.0], bounds=(1.0, 10.0)).norm().item() == pytest.approx(1)


def test_zero_norms_and_vectors_take_adams_step() -> None:
    assert stepped([0.0, 0.0], [1e-3, -1e3]).tolist() == pytest.approx([1, -1], rel=2e-3)
    assert stepped([0.0, 0.0], [0.0, 0.0]).tolist() == [0, 0]
    bias = nn.Parameter(torch.tensor([5.0]))
    bias.grad = torch.tensor([7.0])
    Lamb(split_by_decay([bias], DECAY), lr=0.5).step()
    assert bias.item() == pytest.approx(4.5)


def test_sharded_steps_equal_unsharded_steps(ranks: Ranks) -> None:
    assert max(ranks(3, trained_in_parts, Lamb, 0.1, DECAY, True)) <= 1e-12
    assert max(ranks(3, trained_in_parts, Lamb, 0.1, DECAY, False)) > 1e-3


def test_groups_by_shape_equal_split_by_decay() -> None:
    found, wanted = split_by_decay(weights(), DECAY), groups(weights(), DECAY)
    assert [[p.shape for p in group["params"]] for group in found] == [
        [p.shape for p in group["params"]] for group in wanted
    ]
    assert [(g["weight_decay"], g["adapted"]) for g in found] == [(DECAY, True), (0.0, False)]
