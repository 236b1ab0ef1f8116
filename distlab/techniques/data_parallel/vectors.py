"""A model as two flat vectors, all weights and all gradients: what is pushed, fetched or averaged is one tensor."""

from collections.abc import Iterable

import torch
from torch import nn


class Vectors:
    """The `parameters` of a model, which become views of `weights`, and their gradients views of `gradients`.

        weights     [P]  the numbers stay; whatever is written here, the model computes with
        gradients   [P]  the backward passes add to it, until `zero`

    All parameters are of one dtype and device; a tied one counts once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.gradients = torch.zeros_like(self.weights)
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = zip(self.weights.split(sizes), self.gradients.split(sizes), strict=True)
        for parameter, (weight, gradient) in zip(self.parameters, pieces, strict=True):
            parameter.data = weight.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)

    def zero(self) -> None:
        """Begin a step."""
        self.gradients.zero_()
