"""What is asked: a model, a machine, and how a step is made.

What was not said is guessed, by rules that are printed, or taken from a finished run: a `comm` run gives the link, a
run that trained gives FLOP/s, so that a step of the lab's own ranks is predicted with numbers of their machine.
"""

import re
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
    """Less memory for more time or for less training: the optimizer's state in the host's memory; each layer's step as
    soon as its gradient is there; adapters of rank `lora` that are trained in place of weights, which then take
    `base_itemsize` bytes."""

    offload: bool = False
    step_in_backward: bool = False
    lora: int = 0
    base_itemsize: float = 2.0


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


# Sizes as people write them, 7B, 80GB, 400Gbit, and back. Units are powers of ten, GiB and its kin powers of two.

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
PREFIXES = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?|\.[0-9]+)"
# What is less is nothing, what is more no machine: an exabyte, 10^18 parameters, 10^9 GPUs, layers or tokens. Between
# them no sum overflows, whatever is multiplied.
LEAST, MOST, MOST_WHOLE = 1e-9, 1e18, 1e9


class NotASize(ValueError):
    """The message says what is wrong with the value, and what is allowed."""


def _matched(pattern: str, written: str, otherwise: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Match[str]:
    match = re.fullmatch(pattern, written.strip(), flags)
    if match is None:
        raise NotASize(otherwise)
    return match


def _bounded(number: str, factor: float, least: float = LEAST, most: float = MOST) -> float:
    value = float(number) * factor
    if value > most:
        raise NotASize(f"is beyond any machine, allowed: up to {most:g}")
    if value < least:
        raise NotASize("is nothing, allowed: more than 0")
    return value


def count(written: str) -> float:
    """7B as 7e9: parameters, or FLOP/s with T; K, M, B (or G) and T are powers of ten."""
    match = _matched(NUMBER + "([KMBGT]?)", written, "is not a number such as 350M, 7B or 1.3B")
    return _bounded(match[1], COUNTS[match[2].upper().replace("G", "B")])


def whole_number(written: str) -> int:
    """A whole number from 1 to a billion."""
    match = _matched("[0-9]+", written, "is not a whole number")
    return int(_bounded(match[0], 1, most=MOST_WHOLE))


def nbytes(written: str) -> float:
    """80GB as 8e10 bytes, 80GiB as 80·2^30."""
    match = _matched(NUMBER + "([kmgt]i|[kmgt]?)b", written, "is not a size such as 80GB, 900MB or 80GiB")
    return _bounded(match[1], PREFIXES[match[2].lower()])


def rate(written: str) -> float:
    """400Gbit, 400Gbit/s, 400Gbps, 50GB/s or 50GBps as bytes a second: B is a byte, and b alone is refused for what it
    may be."""
    otherwise = "is not a rate such as 400Gbit, 100mbit or 400Gbps, in bits, or 50GB/s or 50GBps, in bytes"
    pattern = NUMBER + "([kKmMgGtT]?)(?:((?i:bit)(?:/s)?|bps)|B(?:/s|ps)?)"
    match = _matched(pattern, written, otherwise, re.NOFLAG)
    return _bounded(match[1], PREFIXES[match[2].lower()] / (8 if match[3] else 1))


def seconds(written: str) -> float:
    """5us as 5e-6 seconds; 0 is allowed: a link without latency."""
    match = _matched(NUMBER + "(us|ms|s)", written, "is not a time such as 5us or 2ms")
    return _bounded(match[1], {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()], least=0)


def share(written: str) -> float:
    """40% or 0.4 as 0.4; more than 0, up to 1."""
    match = _matched(NUMBER + "(%?)", written, "is not a share such as 40% or 0.4")
    value = float(match[1]) / (100 if match[2] else 1)
    if not LEAST <= value <= 1:
        raise NotASize("is out of range, allowed: more than 0, up to 1 (100%)")
    return value


def shown_count(value: float) -> str:
    """7e9 as "7B"."""
    for letter in ("T", "B", "M", "K"):
        if value >= COUNTS[letter]:
            return f"{value / COUNTS[letter]:.4g}{letter}"
    return f"{value:.4g}"
