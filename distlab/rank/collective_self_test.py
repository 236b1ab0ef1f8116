"""Every operation of the lab's own transport, in every type, on numbers that are known, before anything is trained.

Small integers, which all types hold exactly, so that any difference is a wrong message. A length that nothing divides
goes through rank 0 and back where that is the way of small sums, a long one from rank to rank, and of an even number of
ranks one pair by pair (distlab/collectives/by_hand.py).
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab import Lab

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
COUNTING = 32  # ranks that put in something: all types hold such sums exactly
SHORT, LONG, LONGEST = 5, 200_003, 5 << 20  # numbers; the last one is of bytes
CONTROL = "tests/rank/test_known_sums.py::test_a_sum_that_lacks_a_rank_is_seen"

Call = Callable[["Numbers"], tuple[Tensor, Tensor]]  # what came of it on this rank, and what should have


class Numbers:
    """What each rank puts in: 1 to 3, by rank and place."""

    def __init__(self, rank: int, world_size: int, length: int, dtype: torch.dtype) -> None:
        self.rank, self.world_size, self.length, self.dtype = rank, world_size, length, dtype
        self.last = world_size - 1

    def of(self, rank: int, shift: int = 0) -> Tensor:
        """Those of one rank, for all or for the one at `shift`."""
        return ((rank < COUNTING) * ((torch.arange(self.length) + 2 * rank + shift) % 3 + 1)).to(self.dtype)

    @property
    def mine(self) -> Tensor:
        return self.of(self.rank)

    @property
    def all(self) -> Tensor:
        """[N, length], of all ranks."""
        return torch.stack([self.of(rank) for rank in range(self.world_size)])

    def parts(self, rank: int) -> list[Tensor]:
        """What a rank has for each other."""
        return [self.of(rank, shift) for shift in range(self.world_size)]

    def blank(self) -> list[Tensor]:
        """A place for each rank's, in which nothing is right."""
        return [torch.zeros(self.length, dtype=self.dtype) for _ in range(self.world_size)]


def check_sums(lab: Lab) -> None:
    """Make them all; a collective of all ranks, for LAB_BACKEND=tcp."""
    lab.at(0, "known sums")
    wrong = list(differing(lab.rank, lab.world_size))
    detail = f"of {len(CALLS)} operations in {len(DTYPES)} types: {', '.join(wrong[:4]) or 'all as they should be'}"
    lab.check("transport", len(wrong), 0, detail=detail, control=CONTROL)


def differing(rank: int, world_size: int) -> Iterator[str]:
    """The operations that leave something else on this rank."""
    for dtype in DTYPES:
        yield from tried(Numbers(rank, world_size, SHORT, dtype), CALLS if dtype in WHOLLY else IN_ALL_TYPES)
    yield from tried(Numbers(rank, world_size, LONG, torch.float32), BY_SIZE)
    yield from tried(Numbers(rank, world_size, LONGEST, torch.uint8), ["all_reduce"])


def tried(numbers: Numbers, names: Iterable[str]) -> Iterator[str]:
    """Those of some of them, at one length and type."""
    for name in names:
        found, wanted = CALLS[name](numbers)
        if not torch.equal(found, wanted):
            yield f"{name} of {numbers.length} in {str(numbers.dtype).removeprefix('torch.')}"


def all_reduce(numbers: Numbers, op: dist.ReduceOp.RedOpType, wanted: Tensor) -> tuple[Tensor, Tensor]:
    found = numbers.mine
    dist.all_reduce(found, op)
    return found, wanted.to(numbers.dtype)


def mean(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Of what can be divided; of whole numbers the sum."""
    if not numbers.dtype.is_floating_point:
        return all_reduce(numbers, dist.ReduceOp.SUM, numbers.all.sum(0))
    return all_reduce(numbers, dist.ReduceOp.AVG, numbers.all.sum(0) / numbers.world_size)


def every_second(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """A tensor that does not lie in one piece; what lies between stays as it was."""
    found = torch.stack([numbers.mine, numbers.mine], 1)
    dist.all_reduce(found[:, 0])
    return found, torch.stack([numbers.all.sum(0).to(numbers.dtype), numbers.mine], 1)


def waited_for_later(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Two that are under way at once."""
    one, other = numbers.mine, 2 * numbers.mine
    works = [dist.all_reduce(each, async_op=True) for each in (one, other)]
    for work in reversed(works):
        assert work is not None
        work.wait()
    total = numbers.all.sum(0)
    return torch.stack([one, other]), torch.stack([total, 2 * total]).to(numbers.dtype)


def reduce(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = numbers.mine
    dist.reduce(found, numbers.last)
    return (found, numbers.all.sum(0).to(numbers.dtype)) if numbers.rank == numbers.last else (found, found)


def broadcast(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = numbers.mine
    dist.broadcast(found, numbers.last)
    return found, numbers.of(numbers.last)


def all_gather(numbers: Numbers) -> tuple[Tensor, Tensor]:
    places = numbers.blank()
    dist.all_gather(places, numbers.mine)
    return torch.stack(places), numbers.all


def all_gather_single(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = torch.cat(numbers.blank())
    dist.all_gather_into_tensor(found, numbers.mine)
    return found, numbers.all.flatten()


def reduce_scatter(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = numbers.blank()[0]
    dist.reduce_scatter(found, numbers.parts(numbers.rank))
    return found, summed_for(numbers)


def reduce_scatter_single(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = numbers.blank()[0]
    dist.reduce_scatter_tensor(found, torch.cat(numbers.parts(numbers.rank)))
    return found, summed_for(numbers)


def summed_for(numbers: Numbers) -> Tensor:
    """What all have for this rank."""
    parts = [numbers.of(rank, numbers.rank) for rank in range(numbers.world_size)]
    return torch.stack(parts).sum(0).to(numbers.dtype)


def gather(numbers: Numbers) -> tuple[Tensor, Tensor]:
    places = numbers.blank() if numbers.rank == numbers.last else None
    dist.gather(numbers.mine, places, numbers.last)
    return (torch.stack(places), numbers.all) if places is not None else (numbers.mine, numbers.mine)


def scatter(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found, root = numbers.blank()[0], numbers.last
    dist.scatter(found, numbers.parts(root) if numbers.rank == root else None, root)
    return found, numbers.of(root, numbers.rank)


def all_to_all(numbers: Numbers) -> tuple[Tensor, Tensor]:
    places = numbers.blank()
    dist.all_to_all(places, numbers.parts(numbers.rank))
    return torch.stack(places), torch.stack([numbers.of(rank, numbers.rank) for rank in range(numbers.world_size)])


def passed_on(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """To the next rank, two messages of one tag, which come in their order."""
    after, before = (numbers.rank + 1) % numbers.world_size, (numbers.rank - 1) % numbers.world_size
    first, second = numbers.blank()[0], numbers.blank()[0]
    works = [dist.isend(each, after, tag=1) for each in (numbers.mine, numbers.mine + 1)]
    for place in (first, second):
        dist.recv(place, before, tag=1)
    for work in works:
        assert work is not None
        work.wait()
    wanted = numbers.of(before)
    return torch.stack([first, second]), torch.stack([wanted, wanted + 1])


CALLS: dict[str, Call] = {
    "all_reduce": lambda numbers: all_reduce(numbers, dist.ReduceOp.SUM, numbers.all.sum(0)),
    "the least": lambda numbers: all_reduce(numbers, dist.ReduceOp.MIN, numbers.all.amin(0)),
    "the most": lambda numbers: all_reduce(numbers, dist.ReduceOp.MAX, numbers.all.amax(0)),
    "the mean": mean,
    "every second": every_second,
    "two all_reduces": waited_for_later,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_single,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_single,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "send and recv": passed_on,
}
# What moves bytes alone is alike in all types, and each call costs what the slowest rank takes to be scheduled: all in
# all types took 34 s on two cores with a load of 28.
WHOLLY = (torch.float32, torch.uint8)
IN_ALL_TYPES = ("all_reduce", "reduce", "reduce_scatter", "send and recv")
BY_SIZE = ("all_reduce", "two all_reduces", "reduce_scatter", "all_gather", "send and recv")
