"""Ulysses attention compared with one process: uneven heads and positions, and ranks without any."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.context_parallel import ulysses
from distlab.techniques.context_parallel.costs import ulysses_messages
from distlab.techniques.context_parallel.strategy import contiguous
from distlab.techniques.context_parallel.ulysses import Swap, UlyssesAttention
from distlab.techniques.tensor_parallel.layers import partition_sizes
from tests.techniques.context_parallel.attending import differences, max_over_ranks
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("world_size", "length", "heads"), [(1, 5, 2), (2, 8, 4), (3, 13, 5), (4, 3, 6), (4, 9, 2), (3, 1, 1)]
)
def test_ulysses_equals_one_process(ranks: Ranks, world_size: int, length: int, heads: int) -> None:
    found = ranks(world_size, differences, UlyssesAttention, contiguous, length, heads)
    assert max(chain(*(errors.values() for errors, _ in found))) < 1e-14
    rows, of_heads = contiguous(length, world_size).num_rows, partition_sizes(heads, world_size)
    sent = [sum(pairs > 0 for pairs in ulysses_messages(rows, of_heads, rank)) for rank in range(world_size)]
    assert [calls for _, calls in found] == sent


class ReversedParts(Swap):
    def exchange(self, parts: tuple[Tensor, ...], shapes: list[tuple[int, int]]) -> list[Tensor]:
        return super().exchange(parts, shapes)[::-1]


class ReversedUlysses(UlyssesAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ulysses, "Swap", ReversedParts)
            return super().__call__(q, k, v)


def test_wrong_order_of_parts_is_detected(ranks: Ranks) -> None:
    assert max_over_ranks(ranks(2, differences, ReversedUlysses, contiguous, 8, 4), "out") > 1e-3


def there_and_back(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Exchange 5 positions and 3 heads, numbered 10 x position + head; return this rank's heads and its positions."""
    rank, size = group.rank(), group.size()
    rows = torch.arange(5).tensor_split(size)[rank]
    x = (10 * rows + torch.arange(3)[:, None]).double()[None, None, :, :, None]
    swap = Swap(Peers(group), contiguous(5, size).num_rows, partition_sizes(3, size))
    by_heads = swap.to_heads(x)
    assert torch.equal(swap.to_rows(by_heads), x)
    return by_heads.flatten().int().tolist(), rows.tolist()


def test_a_rank_receives_all_positions_of_its_heads(ranks: Ranks) -> None:
    assert [heads for heads, _ in ranks(2, there_and_back)] == [
        [0, 10, 20, 30, 40, 1, 11, 21, 31, 41],
        [2, 12, 22, 32, 42],
    ]
