"""Inputs of each rank in a collective, and the expected outputs: by formula, not by another collective.

Every number depends on rank, position and repeat, so a stale chunk, a missing part or a wrong offset changes the
result. Numbers are integers up to 65,521: the sum of eight ranks is exact in float32 in any order, so the tolerance is
0. Outputs and scratch memory are NaN before, so an unwritten position shows even if the previous call left the right
number there.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from distlab.contract import Claims, Mode
from distlab.lab.measure.tensors import largest
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.point_to_point import split

# Numbers repeat after a prime of positions, of which no chunk size is a multiple: an offset of one chunk is detected.
PERIOD = 65_521


REPEATS = 5  # the numbers repeat after so many calls; a period and its sums are kept, 256 KiB each


@cache
def numbers(rank: int, repeat: int, device: torch.device) -> Tensor:
    """Return the first period of `rank`'s input. Each rank has its own increment, or two wrong offsets could cancel."""
    places = torch.arange(PERIOD, device=device)
    return ((places * (1009 + 97 * rank) + 389 * repeat * (rank + 1)) % PERIOD + 1).float()


@cache
def total(world_size: int, repeat: int, device: torch.device) -> Tensor:
    """Return the first period of the sum of all ranks' numbers."""
    return torch.stack([numbers(rank, repeat, device) for rank in range(world_size)]).sum(0)


def rotated(period: Tensor, start: int) -> Tensor:
    """Return the period from position `start` on."""
    return period.roll(-(start % PERIOD)) if start % PERIOD else period


def fill(tensor: Tensor, period: Tensor, start: int = 0) -> None:
    """Fill the flat `tensor` with repetitions of `period`, from its position `start` on."""
    period_here = rotated(period, start)
    for run in tensor.split(PERIOD):
        run.copy_(period_here[: run.numel()])


def largest_difference(found: Tensor, period: Tensor, start: int = 0) -> float:
    """Return the largest difference of the flat `found` from what `fill` would write; infinite if one is NaN."""
    period_here = rotated(period, start)
    wrong = [
        run - period_here[: run.numel()]
        for run in found.split(PERIOD)
        if not torch.equal(run, period_here[: run.numel()])
    ]
    return max(map(largest, wrong), default=0.0)


@dataclass
class Trial:
    """One call of `op` ("all_reduce", ...) on a `whole` tensor, of which `chunk` is `rank`'s."""

    op: str
    rank: int
    world_size: int
    whole: Tensor
    chunk: Tensor
    repeat: int = 0

    @classmethod
    def of(cls, op: str, rank: int, world_size: int, numel: int, device: torch.device) -> "Trial":
        """On `numel` floats."""
        whole = torch.empty(numel, device=device)
        return cls(op, rank, world_size, whole, torch.empty_like(split(whole, world_size)[rank]))

    @property
    def starts(self) -> list[int]:
        """Return the start of each rank's chunk."""
        sizes = [chunk.numel() for chunk in split(self.whole, self.world_size)]
        return [sum(sizes[:rank]) for rank in range(self.world_size)]

    def prepare(self, repeat: int) -> None:
        """Write new numbers into the inputs, and NaN into the outputs."""
        self.repeat = repeat % REPEATS
        mine = numbers(self.rank, self.repeat, self.whole.device)
        if self.op == "all_gather":
            self.whole.fill_(math.nan)
            fill(self.chunk, mine, self.starts[self.rank])
        else:
            self.chunk.fill_(math.nan)
            fill(self.whole, mine)

    def run(self, collective: Collective) -> None:
        """Run the call and nothing else, since it is timed."""
        if self.op == "all_reduce":
            collective.all_reduce(self.whole)
        elif self.op == "reduce_scatter":
            collective.reduce_scatter(self.chunk, self.whole)
        else:
            collective.all_gather(self.whole, self.chunk)

    def error(self) -> float:
        """Return the error of the result, compared with the formula."""
        device = self.whole.device
        if self.op == "all_gather":
            places = enumerate(zip(split(self.whole, self.world_size), self.starts, strict=True))
            return max(
                largest_difference(chunk, numbers(rank, self.repeat, device), start) for rank, (chunk, start) in places
            )
        wanted = total(self.world_size, self.repeat, device)
        if self.op == "reduce_scatter":
            return largest_difference(self.chunk, wanted, self.starts[self.rank])
        return largest_difference(self.whole, wanted)


def lengths(world_size: int) -> list[int]:
    """Return uneven lengths: empty chunks, chunks of one and two, and more than a period."""
    return [1, world_size + 1, 2 * world_size + 1, 1021, PERIOD + 1021]


def uneven(collective: Collective, op: str, device: torch.device) -> float:
    """Return the worst error over all `lengths`, each three times, since scratch memory is reused."""
    rank, world_size, worst = collective.peers.rank, collective.peers.world_size, 0.0
    for numel in lengths(world_size):
        trial = Trial.of(op, rank, world_size, numel, device)
        for repeat in range(3):
            trial.prepare(repeat)
            collective.peers.memory.poison()
            trial.run(collective)
            worst = max(worst, trial.error())
    return worst


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch fill new memory with NaN, or integers with their maximum, inside the block."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler: 812 modules
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


OPERATIONS, COMPARED = ("all_reduce", "reduce_scatter", "all_gather"), {0.25: "256 KiB", 4: "4 MiB", 64: "64 MiB"}
PRIMITIVES, GRADIENTS = 9, 12


def claims(mode: Mode, sweep_mib: float) -> Sequence[Claims]:
    """Return the checks of primitives and gradients, and of each all_reduce's result and bytes."""
    sizes = [name for mib, name in COMPARED.items() if mib <= sweep_mib]
    sent = [f"wire bytes {operation} {size}" for operation in OPERATIONS for size in sizes]
    wrong = "test_a_wrong_all_gather_is_detected"
    return (
        Claims(("forward",), times=PRIMITIVES, fails_in=wrong),
        Claims(("gradients",), times=GRADIENTS),
        Claims(("demo",), fails_in=wrong),
        Claims(("no autograd",), fails_in="test_a_gather_with_a_gradient_is_detected"),
        Claims(("ring",)),
        Claims(("sum",), ("one_by_one", *mode.names), fails_in="test_a_sum_on_rank_0_only_is_detected"),
        Claims(("contents",), mode.names, times=len(OPERATIONS)),
        Claims(("drawn bytes",), mode.names),
        Claims(sent, mode.names),
        Claims(("wire bytes ",), (), fails_in="test_wrong_byte_counts_fail_the_sweep"),
    )
