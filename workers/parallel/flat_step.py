"""An optimizer's step on a piece of the flat vector of weights: plain SGD, or AdamW (Loshchilov and Hutter 2019).

Both compute a weight from its own gradient and moments alone, so a piece is stepped like the whole, and pieces can be
cut anew at any time. Nothing is changed in place: whoever steps may still take it back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's own


class Piece(NamedTuple):
    """What is stepped: `weights` [n], and AdamW's moments as the two rows of [2, n]; SGD's have no rows, [0, n]."""

    weights: Tensor
    moments: Tensor


def fresh(weights: Tensor, optimizer: str) -> Piece:
    """The piece before the first step."""
    return Piece(weights.clone(), weights.new_zeros(2 if optimizer == "adamw" else 0, len(weights)))


def stepped(piece: Piece, gradient: Tensor, lr: float, number: int) -> Piece:
    """The piece after its step `number`, which counts from 1; `gradient` [n]."""
    weights, moments = piece
    if not len(moments):
        return Piece(weights - lr * gradient, moments)
    mean = moments[0].lerp(gradient, 1 - BETA_1)
    square = BETA_2 * moments[1] + (1 - BETA_2) * gradient * gradient
    size = lr / (1 - BETA_1**number)
    denominator = square.sqrt() / (1 - BETA_2**number) ** 0.5 + EPSILON
    return Piece(weights * (1 - lr * DECAY) - size * mean / denominator, torch.stack([mean, square]))
