"""The DistributedSampler lesson: its printed figures, our arithmetic against PyTorch's, and the checks' controls."""

import pytest
from torch.utils.data import DistributedSampler

from experiments import train
from workers.config import Config, ConfigError
from workers.rank.refusals import refuse


def test_the_lessons_printed_batches() -> None:
    batches = [[train.by_hand(epoch, rank, 2)[:4] for rank in (0, 1)] for epoch in (0, 1)]
    assert batches == [[[542, 816, 94, 60], [618, 68, 215, 585]], [[588, 223, 689, 932], [148, 575, 935, 343]]]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("epoch", [0, 1])
def test_by_hand_is_what_pytorch_deals(world_size: int, epoch: int) -> None:
    shards = []
    for rank in range(world_size):
        sampler = train.pytorchs(rank, world_size)
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
        assert shards[-1] == train.by_hand(epoch, rank, world_size)
    wrong, twice = train.misdealt(shards)
    assert wrong == 0
    order = train.by_hand(epoch, 0, 1)
    assert sorted(twice) == sorted(train.repeats(order, world_size))
    assert len(twice) == -1000 % world_size


def test_misdealt_sees_what_is_left_out_and_what_comes_again() -> None:
    half = list(range(500))
    assert train.misdealt([half, list(range(500, 1000))]) == (0, [])
    assert train.misdealt([half, half])[0] == 500
    assert train.misdealt([list(range(1000))] * 2)[0] == 1000
    assert train.misdealt([half, [0, *range(500, 1000)]]) == (1, [0])


def test_places_apart_counts_lengths_too() -> None:
    assert train.places_apart([1, 2, 3], [1, 3, 3]) == 1
    assert train.places_apart([1, 2], [1, 2, 3]) == 1


def test_no_sampler_needs_two_ranks() -> None:
    alone = Config.read({"RUN_MODE": "train", "WORLD_SIZE": "1", "LAB_BUG": "no_sampler"})
    with pytest.raises(ConfigError, match="it takes 2 ranks"):
        refuse(alone, train.MODE)
    refuse(alone.model_copy(update={"world_size": 2}), train.MODE)
    refuse(alone.model_copy(update={"bug": "no_set_epoch"}), train.MODE)
