"""What is asked: a model, a machine, and how a step is made. What was not said is guessed, by rules that are
printed."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A GPT of `layers` blocks, `heads` heads in all `width` numbers wide."""

    layers: int
    width: int
    heads: int

    @property
    def num_parameters(self) -> float:
        """12·L·h²: four matrices of h x h in attention, two of h x 4h behind it; embeddings and biases are left out."""
        return 12.0 * self.layers * self.width**2


@dataclass(frozen=True)
class Link:
    """What a message costs: a latency, and its bytes at a rate that is one rank's, one way."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Job:
    """Everything that a cost depends on. Bytes are bytes, seconds seconds, `flops` a GPU's peak in FLOP/s."""

    num_parameters: float
    gpus: int
    gpu_memory_bytes: float
    shape: Shape
    seq: int
    samples: int  # of one microbatch
    global_samples: int  # of a step, over all GPUs, the same for every strategy
    grows: bool  # with the GPUs, where it was not given
    link: Link  # between nodes
    node_link: Link  # inside a node
    gpus_per_node: int
    flops: float
    flops_from: str  # whose peak that is, in words
    utilisation: float
    itemsize: int  # of weights, gradients and activations
    masters: bool  # the optimizer keeps weights of its own in float32: mixed precision
    moments: int  # of the optimizer: 2 with Adam
    recompute: str
    sequence_parallel: bool
    reserve: float  # share of the memory that is left to the GPU's runtime, its libraries and fragmentation

    @property
    def node_gpus(self) -> int:
        """GPUs that share a node. Neighbours share one wherever they stand only if their number divides this."""
        return min(self.gpus, self.gpus_per_node)

    def on(self, gpus: int) -> "Job":
        """The same on more GPUs: with a batch as much larger, unless it was given."""
        factor = gpus / self.gpus if self.grows else 1
        return replace(self, gpus=gpus, global_samples=round(self.global_samples * factor))

    @property
    def usable_bytes(self) -> float:
        """Of a GPU's memory."""
        return self.gpu_memory_bytes * (1 - self.reserve)


ASPECT = 128  # width over layers, as in GPT-3 of 6.7B (4096 over 32) and of 175B (12288 over 96)


def guessed(
    num_parameters: float, layers: int | None = None, width: int | None = None, heads: int | None = None
) -> Shape:
    """A GPT-like shape of P = 12·L·h² with h = 128·L; whatever is given stays. 7B: 32 layers, 4096 wide; 175B: 96,
    12288."""
    layers = layers or guessed_layers(num_parameters, width)
    width = width or guessed_width(math.sqrt(num_parameters / (12 * layers)), heads)
    return Shape(layers, width, heads or guessed_heads(width))


def guessed_layers(num_parameters: float, width: int | None) -> int:
    """L = P/(12·h²), or with h = 128·L a multiple of 4."""
    if width is not None:
        return max(1, round(num_parameters / (12 * width**2)))
    exact: float = (num_parameters / (12 * ASPECT**2)) ** (1 / 3)
    return max(1, 4 * round(exact / 4) or round(exact))


def guessed_width(exact: float, heads: int | None) -> int:
    """The nearest multiple of the heads; or of 8 heads, each of 128 numbers or, in a narrow model, a smaller power of
    two."""
    if heads is None:
        heads = 8 * min(128, 1 << max(0, int(math.log2(max(1.0, exact / 16)))))
    return heads * max(1, round(exact / heads))


def guessed_heads(width: int) -> int:
    """As many as divide the width, of 128 numbers or more each; in a narrow model 8 at most."""
    return max(count for count in range(1, max(8, width // 128) + 1) if width % count == 0)
