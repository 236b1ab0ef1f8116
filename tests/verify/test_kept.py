"""What a strategy keeps: the most of its microbatches, which are held one at a time."""

import torch

from distlab.verify.counted import most_kept
from distlab.workload.data import Microbatch


class Squares:
    """Keeps its input, and the second microbatch's is twice as long."""

    def backward(self, microbatches: list[Microbatch]) -> None:
        for inputs, _, _ in microbatches:
            inputs.square().sum().backward()


def test_the_largest_microbatch_counts() -> None:
    parts = [torch.ones(length, requires_grad=True) for length in (100, 200, 50)]
    microbatches = [Microbatch(part, part, 1.0) for part in parts]
    strategy: object = Squares()
    assert most_kept(strategy, microbatches) == 800  # type: ignore[arg-type]
