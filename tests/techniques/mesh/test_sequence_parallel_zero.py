"""With sequence parallelism only gradients of replicated weights are summed over the rows' ranks before ZeRO."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.techniques.mesh.strategy import SequenceParallelZero
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)


def summed(group: dist.ProcessGroup, stage: int, microbatches: int) -> list[float]:
    """Gradients of a weight of this rank alone and of a replicated bias. There is one replica, so a shard is the whole
    gradient."""
    torch.manual_seed(0)
    layer, alone = nn.Linear(1, 1), dist.new_group([group.rank()], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    zero = SequenceParallelZero(layer, [layer], alone, stage, replicated=[layer.bias], rows=group)
    zero.begin()
    for index in range(microbatches):
        with zero.microbatch(last=index == microbatches - 1):
            (layer(torch.ones(1, 1)) * (group.rank() + 1)).sum().backward()
    zero.finish()
    gradient = zero.units[0].shard.grad
    assert gradient is not None
    return list(gradient.tolist())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_replicated_gradients_are_summed_once_over_rows(ranks: Ranks, stage: int, microbatches: int) -> None:
    found = ranks(2, summed, stage, microbatches)
    assert found == [[rank * microbatches, 3 * microbatches] for rank in (1, 2)]
