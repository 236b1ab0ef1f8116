"""A model as two flat vectors, of all weights and of all gradients, so that each is sent or averaged as one tensor."""

from collections.abc import Iterable

import torch
from torch import nn


class Vectors:
    """The `parameters` of a model as views of `weights`, and their gradients as views of `gradients`.

        weights     [P]  keeps its values; the model computes with whatever is written here
        gradients   [P]  backward passes add to it, until `zero`

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
        """Begin a step: set all gradients to zero."""
        self.gradients.zero_()
