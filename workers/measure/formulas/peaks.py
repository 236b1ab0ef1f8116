"""The most that a step holds: what one process's passes hold by themselves, and on top of it what a strategy keeps.

    peak = max over the moments of a step ( working + held )

`working` is the batch, what autograd saves, what operations leave for the next, and a fresh gradient until it is handed
over: outlined by one process that drops each gradient when it has it (workers/passes/outline.py). `held` are weights,
gradients, optimizer state and messages of the strategy at that moment, by the rules of its paper: sums of sizes that
change as layers begin and end and as gradients come. After the passes comes the update, with no activations.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol


class Happening(NamedTuple):
    """Something in a pass of one process at which a strategy takes or frees memory.

    dealt: the samples are there; until then the last step's gradients are, too. layer: a layer's forward pass begins.
    left: it ends. output: the gradient of its output is there. gradient: a fresh gradient of a parameter is there.
    taken: it was handed over, and is alive a last time. computed: all of the layer's are. passed: a microbatch is done.
    """

    what: str
    layer: int = -1
    name: str = ""  # of a parameter, "<first layer that has it>.<name in it>"
    numel: int = 0
    highest: int = 0  # the most working bytes since the happening before
    live: int = 0  # working bytes at this moment


class Holding(Protocol):
    """What a strategy holds beside one process's working memory."""

    def held(self) -> float:
        """Bytes now."""

    def after(self, happening: Happening) -> Iterator[float]:
        """React, and tell all amounts that it comes by."""


def pass_peak(outline: Iterable[Happening], holding: Holding) -> float:
    """The most bytes of all moments of the passes."""
    most = 0.0
    for happening in outline:
        most = max(most, happening.highest + holding.held())
        most = max([most, *(happening.live + held for held in holding.after(happening))])
    return most


def adamw_scratch_bytes(sizes: Sequence[int], itemsize: int) -> float:
    """What torch's AdamW adds on the CPU, where it steps parameters of these sizes one after another: the root of a
    second moment and that divided by its bias correction, and of the parameter before still the latter."""
    before = [0, *sizes]
    return float(max((last + 2 * size for last, size in zip(before, sizes, strict=False)), default=0) * itemsize)


class Replicated:
    """Data parallelism: weights and optimizer state, and gradients either in buckets that stay or as they come."""

    def __init__(self, constant: float, gradients: float, itemsize: int, *, in_buckets: bool) -> None:
        self.constant, self.gradients, self.itemsize = constant, gradients, itemsize
        self.in_buckets, self.delivered = in_buckets, gradients

    def held(self) -> float:
        return self.constant + self.delivered

    def after(self, happening: Happening) -> Iterator[float]:
        """A gradient that lies in no bucket stays where autograd made it; later microbatches are added to it."""
        if happening.what == "dealt" and not self.in_buckets:
            self.delivered = 0.0
        if happening.what == "taken":
            self.delivered = min(self.gradients, self.delivered + happening.numel * self.itemsize)
        yield self.held()


def shown_on(device: str) -> str:
    """Why the peak is only shown, on a GPU; empty where it decides."""
    return "on a GPU AdamW steps all tensors at once" if device == "cuda" else ""
