"""What a strategy keeps for the backward pass of some microbatches: at most, in one step."""

from workers.contract import Strategy
from workers.measure.activations import SavedActivations
from workers.workload.data import Microbatch


def most_kept(strategy: Strategy, microbatches: list[Microbatch]) -> int:
    """The bytes that autograd holds at most; every rank of the strategy calls it together."""
    with SavedActivations() as saved:
        strategy.backward(microbatches)
    return saved.peak_bytes
