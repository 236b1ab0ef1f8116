"""The planner's question: a model, a machine, and the settings of a step.

Missing values are guessed by rules that are printed, or come from finished runs: the link from a `comm` run, FLOP/s
from a training run, so that a step of the lab's own ranks is predicted with numbers of their machine.
"""

from dataclasses import dataclass, replace

from distlab.tools.plan.gpu import Gpu
from distlab.tools.plan.model import Shape


@dataclass(frozen=True)
class Link:
    """The cost of a message: a latency, and its bytes at one rank's rate, one way; a ring reaches `share` of it.

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
    """Bytes stored per parameter: weight, gradient, whether the optimizer keeps float32 master weights, and its other
    state (8 with Adam)."""

    itemsize: int
    masters: bool
    moment_bytes: float


@dataclass(frozen=True)
class Savings:
    """Options that save memory for time or for fewer trained weights: the optimizer's state on the host (with
    ZeRO-3 all state); each layer's update as soon as its gradient exists; adapters of rank `lora`, with frozen weights
    of `base_itemsize` bytes. `no_sync` does the reverse: whole weights and gradients until the step's end, for fewer
    messages."""

    offload: bool = False
    step_in_backward: bool = False
    lora: int = 0
    base_itemsize: float = 2.0
    no_sync: bool = False


@dataclass(frozen=True)
class Job:
    """All inputs of a cost, in bytes and seconds."""

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
    reserve: float  # share of the memory for the GPU's runtime, its libraries and fragmentation
    fp8: bool = False  # products of layers in 8 bits
    overlap_tp: bool = False  # tensor parallelism's sums overlap with their products
    chunks: int = 1  # pipeline stages per rank
    savings: Savings = Savings()
    loss: str = "fp32"  # how vocabulary scores are stored: a key of memory.LOGIT_BYTES
    once_a_node: bool = True  # a token is sent to a node once, not once per expert there
    overlap_ep: bool = False  # expert messages overlap with another microbatch's compute
    balanced: bool = False  # stages of a pipeline have fewer layers where embedding and output layer are
    hides: bool = True  # compute overlaps with messages, as on a GPU; not if ranks use all cores

    @property
    def node_gpus(self) -> int:
        """Return the GPUs per node. Groups of neighbours always share one only if their size divides this."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def itemsize(self) -> int:
        return self.weights.itemsize

    @property
    def step_tokens(self) -> int:
        return self.global_samples * self.seq

    def on(self, gpus: int) -> "Job":
        """Return the job on more GPUs, with a proportionally larger batch unless it was given."""
        factor = gpus / self.gpus if self.grows else 1
        return replace(self, gpus=gpus, global_samples=round(self.global_samples * factor))

    @property
    def usable_bytes(self) -> float:
        return self.gpu_memory_bytes * (1 - self.reserve)


COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def shown_count(value: float) -> str:
    """Format 7e9 as "7B"."""
    for letter in ("T", "B", "M", "K"):
        if value >= COUNTS[letter]:
            return f"{value / COUNTS[letter]:.4g}{letter}"
    return f"{value:.4g}"
