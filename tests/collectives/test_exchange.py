"""The exchange: direct's sum to the bit, in one call, with parts of any size and none."""

import pytest
import torch
import torch.distributed as dist

from distlab.collectives import by_hand, direct
from distlab.collectives.by_hand import Collective
from distlab.measure.traffic import Calls
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)
Call = tuple[str, float, float]


def both(group: dist.ProcessGroup, num_rows: int) -> tuple[list[bool], list[Call]]:
    """Whether both give the same, in a place of its own and in the chunk itself; and what the exchange called."""
    generator = torch.Generator().manual_seed(group.rank())
    rows = torch.randn(num_rows, 7, generator=generator)
    alike = []
    for inside in (False, True):
        outputs = []
        for algorithm in (direct, by_hand):
            whole = rows.clone()
            chunk = whole.tensor_split(group.size())[group.rank()]
            output = chunk if inside else torch.empty_like(chunk)
            with Calls() as calls:
                Collective(group, "it", {"it": algorithm}).reduce_scatter(output, whole)
            outputs.append(output.clone())
        alike.append(torch.equal(*outputs))
    return alike, [(entry.op, entry.calls, entry.called_bytes) for entry in calls.ops()]


@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 6), (2, 5), (3, 7), (3, 2), (4, 9)])
def test_it_is_directs_sum_to_the_bit(ranks: Ranks, world_size: int, num_rows: int) -> None:
    sizes = [len(chunk) for chunk in torch.arange(num_rows).tensor_split(world_size)]
    for rank, (alike, called) in enumerate(ranks(world_size, both, num_rows)):
        assert alike == [True, True]
        assert called == [("all_to_all", 1, pytest.approx(28 * (num_rows - sizes[rank])))]
