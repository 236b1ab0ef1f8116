"""Dropout whose masks belong to samples and positions, so that any cut of a batch drops what one process drops.

Each block drops some of what its attention and its MLP add (Srivastava et al. 2014, section 4). What a generator gives
depends on what was drawn before, and no two ranks draw the same things: ranks with other samples would have to draw
anew, ranks that hold the same activations alike, and where rows are cut each rank its own. Systems keep a generator for
each of these and never equal one process. Here a mask is a function of the run's seed, the layer and the sample, drawn
whole, of which a rank takes the rows that it has. A sample has the same mask whenever it comes, too.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("attention", "mlp")  # of a block, whose results are dropped from


class Dropouts:
    """The dropouts of one model on one rank.

    Args:
        layers: whose parts named in PARTS lose a `share` of the numbers that they give.
        shape: of what these give of one whole sample: [S, D] of a text.
    """

    def __init__(self, layers: Sequence[nn.Module], share: float, seed: int, shape: tuple[int, ...]) -> None:
        self.share, self.seed, self.shape = share, seed, shape
        self.rows: Tensor | None = None  # the positions of this rank's rows; None: all
        self.rows_first = False  # [rows, B, D] in the place of [B, rows, D]
        self.samples: list[int] = []  # those that are worked on now, by their checksums
        self._dealt: list[list[int]] = []
        for index, layer in enumerate(layers):
            for name, part in layer.named_children():
                if name in PARTS:
                    part.register_forward_hook(partial(self._drop, f"{index}.{name}"))

    def checksums(self, inputs: Tensor) -> list[int]:
        """What the masks of these whole samples are drawn by."""
        return [zlib.crc32(sample.double().cpu().numpy().tobytes()) for sample in inputs]

    def deal(self, microbatches: Sequence[Tensor]) -> None:
        """Begin a step on the inputs of these microbatches."""
        self._dealt = [self.checksums(inputs) for inputs in microbatches]

    def turn_to(self, microbatch: int) -> None:
        """What is computed from now on is of this microbatch."""
        self.samples = self._dealt[microbatch]

    def mask(self, part: str, sample: int) -> Tensor:
        """Of one whole sample: zero where it is dropped, else what keeps the sum as it was."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {part} {sample}".encode()))
        return (torch.rand(self.shape, generator=generator) >= self.share) / (1 - self.share)

    def _drop(self, part: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not self.samples:  # a shape is asked for, or an empty microbatch
            return output
        masks = torch.stack([self.mask(part, sample) for sample in self.samples])
        masks = masks if self.rows is None else masks[:, self.rows]
        return output * (masks.transpose(0, 1) if self.rows_first else masks).to(output)
