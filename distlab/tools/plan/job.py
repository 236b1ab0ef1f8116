"""What is asked: a model, a machine, and how a step is made.

What was not said is guessed, by rules that are printed, or taken from a finished run: a `comm` run gives the link, a
run that trained gives FLOP/s, so that a step of the lab's own ranks is predicted with numbers of their machine.
"""

from dataclasses import dataclass, replace

from distlab.tools.plan.gpu import Gpu
from distlab.tools.plan.model import Shape


@dataclass(frozen=True)
class Link:
    """What a message costs: a latency, and its bytes at a rate that is one rank's, one way; a ring gets `share` of it.

    `halves`: the time of a reduce_scatter and an all_gather over that of an all_reduce, which sends the same.
    """

    latency_s: float
    bytes_per_s: float
    share: float = 1.0
    halves: float = 1.0

    @property
    def effective(self) -> float:
        return self.bytes_per_s * self.share


@dataclass(frozen=True)
class Weights:
    """What is stored of a parameter: bytes of a weight and of a gradient, whether the optimizer keeps weights of its own
    in float32, and bytes of what else it remembers (8 with Adam)."""

    itemsize: int
    masters: bool
    moment_bytes: float


@dataclass(frozen=True)
class Savings:
    """Less memory for more time or for less training, and with `no_sync` more memory for fewer messages, weights and
    gradients whole until a step's end: the optimizer's state in the host's memory, all with ZeRO-3; each layer's step as
    soon as its gradient is there; adapters of rank `lora` that are trained in place of weights, which then take
    `base_itemsize` bytes."""

    offload: bool = False
    step_in_backward: bool = False
    lora: int = 0
    base_itemsize: float = 2.0
    no_sync: bool = False


@dataclass(frozen=True)
class Job:
    """Everything that a cost depends on. Bytes are bytes, seconds seconds."""

    num_parameters: float
    gpus: int
    gpu_memory_bytes: float
    shape: Shape
    seq: int
    samples: int  # of one microbatch
    global_samples: int  # of a step, over all GPUs, the same for every strategy
    grows: bool  # with the GPUs, where it was not given
    gpu: Gpu
    link: Link  # between nodes
    node_link: Link  # inside a node
    gpus_per_node: int
    weights: Weights
    recompute: str
    flash: bool  # attention keeps no scores
    sequence_parallel: bool
    reserve: float  # share of the memory that is left to the GPU's runtime, its libraries and fragmentation
    fp8: bool = False  # products of layers in 8 bits
    overlap_tp: bool = False  # sums of tensor parallelism go on beside the products that they belong to
    chunks: int = 1  # stages of a pipeline's rank
    savings: Savings = Savings()
    loss: str = "fp32"  # what is kept of the scores over the vocabulary: a key of memory.LOGIT_BYTES
    once_a_node: bool = True  # a token goes to another node once, not once for each of its experts there
    overlap_ep: bool = False  # a token's way to its experts and back goes on beside another microbatch's compute
    balanced: bool = False  # stages of a pipeline have fewer layers where embedding and output layer are
    hides: bool = True  # compute goes on beside messages, as on a GPU; not where ranks fill the cores that move them

    @property
    def node_gpus(self) -> int:
        """GPUs that share a node. Neighbours share one wherever they stand only if their number divides this."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def itemsize(self) -> int:
        return self.weights.itemsize

    @property
    def step_tokens(self) -> int:
        return self.global_samples * self.seq

    def on(self, gpus: int) -> "Job":
        """The same on more GPUs: with a batch as much larger, unless it was given."""
        factor = gpus / self.gpus if self.grows else 1
        return replace(self, gpus=gpus, global_samples=round(self.global_samples * factor))

    @property
    def usable_bytes(self) -> float:
        return self.gpu_memory_bytes * (1 - self.reserve)


COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def shown_count(value: float) -> str:
    """7e9 as "7B"."""
    for letter in ("T", "B", "M", "K"):
        if value >= COUNTS[letter]:
            return f"{value / COUNTS[letter]:.4g}{letter}"
    return f"{value:.4g}"
