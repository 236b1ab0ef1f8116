"""LARS and LAMB where their formulas have corners, on layers made for it: whole, and in parts over the ranks.

A fresh model has no layer of zeros, none without a gradient and none beyond LAMB's bound of 10, so a few steps of it
would not tell a wrong one. And where ranks hold parts of a weight, its norm is that of all parts: a part's own would
turn the update.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.largebatch.recipes import Recipe
from experiments.largebatch.reference import State, rate_of
from workers.lab import Lab
from workers.passes.proof import TOLERANCE
from workers.workload.model import Model

STEPS = 4
CONTROLS = "tests/experiments/test_largebatch.py::{}"


def drawn(seed: int) -> list[Tensor]:
    """Six tensors of normal numbers, float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(6, 5), (4, 3), (3, 7), (5, 4), (7, 2), (5,)]  # [rows, columns], and a bias
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def first_weights(seed: int) -> list[Tensor]:
    """The second layer is zero, the fourth has a norm of 40."""
    weights = drawn(seed)
    weights[1] = torch.zeros_like(weights[1])
    weights[3] *= 40 / weights[3].norm()
    return weights


def gradients_of(step: int, weights: Sequence[Tensor]) -> list[Tensor]:
    """The third layer has none; the fifth's points against its weights, where ‖g + βw‖ is far from ‖g‖ + β‖w‖."""
    gradients = [0.1 * each for each in drawn(1000 + step)]
    gradients[2] = torch.zeros_like(gradients[2])
    gradients[4] = -1e-3 * weights[4]
    return gradients


def hold_layers(lab: Lab, name: str, recipe: Recipe) -> None:
    """A few steps of the recipe's optimizer, on every rank whole and in parts, against the formula."""
    start = first_weights(lab.config.seed)
    whole = Trained(recipe, lab, start, None)
    parts = Trained(recipe, lab, [own_rows(each, lab) for each in start], lab.group)
    wanted, rate = State.fresh(start), rate_of(name, 1.0, 1, 0, 1)
    for step in range(STEPS):
        gradients = gradients_of(step, start)
        whole.step(gradients)
        parts.step([own_rows(each, lab) for each in gradients])
        wanted = wanted.stepped(name, gradients, rate, step + 1)
    detail = "a layer of zeros, one without a gradient, one of norm 40, one whose gradient points against its weights"
    lab.check(
        "layers",
        whole.off(wanted.weights),
        TOLERANCE,
        name,
        detail,
        control=CONTROLS.format("test_a_corner_that_is_wrong_fails_the_run"),
    )
    rows = [own_rows(each, lab) for each in wanted.weights]
    detail = "of the same layers, each rank with some rows of them"
    lab.check(
        "global norms",
        parts.off(rows),
        TOLERANCE,
        name,
        detail,
        control=CONTROLS.format("test_norms_of_a_rank_alone_fail_the_run"),
    )


def own_rows(tensor: Tensor, lab: Lab) -> Tensor:
    """This rank's part, a run of rows: parts are uneven, and may be empty."""
    return tensor.tensor_split(lab.world_size)[lab.rank]


class Trained:
    """Layers that the recipe's optimizer steps."""

    def __init__(
        self, recipe: Recipe, lab: Lab, weights: Sequence[Tensor], sharded_over: dist.ProcessGroup | None
    ) -> None:
        self.parameters = [nn.Parameter(each.clone()) for each in weights]
        model = Model("layers", [nn.ParameterList(self.parameters)], nn.Identity())
        self.optimizer = recipe.optimizer(model, lab.config, sharded_over=sharded_over)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def off(self, wanted: Sequence[Tensor]) -> float:
        """The largest difference of any number, infinite where one is none."""
        pairs = zip(self.parameters, wanted, strict=True)
        differences = [(mine.detach() - other).abs().flatten() for mine, other in pairs]
        return torch.cat([*differences, torch.zeros(1)]).nan_to_num(torch.inf).max().item()
