"""The DistributedSampler lesson: its printed figures, our sampler compared with PyTorch's, and checks that must fail."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from distlab.experiments import train
from distlab.lab.config import Config, ConfigError
from distlab.lab.lab import Lab
from distlab.lab.rank.preflight import refuse
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.verdict import judge
from tests.labs import failed, lab_of
from tests.warm_ranks import Ranks


def test_the_lessons_printed_batches() -> None:
    batches = [[train.by_hand(epoch, rank, 2)[:4] for rank in (0, 1)] for epoch in (0, 1)]
    assert batches == [[[542, 816, 94, 60], [618, 68, 215, 585]], [[588, 223, 689, 932], [148, 575, 935, 343]]]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("epoch", [0, 1])
def test_by_hand_equals_pytorchs_sampler(world_size: int, epoch: int) -> None:
    shards = []
    for rank in range(world_size):
        sampler = train.pytorchs(rank, world_size)
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
        assert shards[-1] == train.by_hand(epoch, rank, world_size)
    wrong, twice = train.wrong_shards(shards)
    assert wrong == 0
    order = train.by_hand(epoch, 0, 1)
    assert sorted(twice) == sorted(train.repeats(order, world_size))
    assert len(twice) == -1000 % world_size


def test_wrong_shards_counts_missing_and_repeated_samples() -> None:
    half = list(range(500))
    assert train.wrong_shards([half, list(range(500, 1000))]) == (0, [])
    assert train.wrong_shards([half, half])[0] == 500
    assert train.wrong_shards([list(range(1000))] * 2)[0] == 1000
    assert train.wrong_shards([half, [0, *range(500, 1000)]]) == (1, [0])


def test_count_differences_includes_missing_entries() -> None:
    assert train.count_differences([1, 2, 3], [1, 3, 3]) == 1
    assert train.count_differences([1, 2], [1, 2, 3]) == 1


def test_no_sampler_needs_two_ranks() -> None:
    alone = Config.read({"RUN_MODE": "train", "WORLD_SIZE": "1", "LAB_BUG": "no_sampler"})
    with pytest.raises(ConfigError, match="it takes 2 ranks"):
        refuse(alone, train.MODE)
    refuse(alone.model_copy(update={"world_size": 2}), train.MODE)
    refuse(alone.model_copy(update={"bug": "no_set_epoch"}), train.MODE)


class BlockSampler:
    """Assigns each rank a block of the order instead of every N-th sample: disjoint and complete, but wrong."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self) -> Any:
        order = train.by_hand(self.epoch, 0, 1)
        size = len(order) // self.world_size
        return iter(order[self.rank * size : self.rank * size + size])


def set_epoch(sampler: BlockSampler, epoch: int) -> None:
    sampler.epoch = epoch


def gather_early(lab: Lab, data: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the data before it is multiplied."""
    gathered = [torch.zeros_like(data) for _ in range(lab.world_size)]
    dist.all_gather(gathered, data, group=lab.group)
    return data * (lab.rank + 1), torch.cat(gathered)


def gather_twice(lab: Lab, data: Tensor) -> tuple[Tensor, Tensor]:
    """Compute and gather twice."""
    train_computed(lab, data)
    return train_computed(lab, data)


train_computed = train.computed


def run_wrongly(group: dist.ProcessGroup, folder: str, computed: Any, parts: dict[str, Any]) -> list[str]:
    settings = {"RUN_MODE": "train", "WORLD_SIZE": str(group.size()), "MASTER_ADDR": "127.0.0.1"}
    lab = lab_of(group, settings, folder)
    with patch.object(train, "computed", computed):
        train.run(lab, **parts)
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


def failed_with(ranks: Ranks, folder: Path, computed: Any = train_computed, **parts: Any) -> set[str]:
    lines = ranks(2, run_wrongly, str(folder), computed, parts)
    return failed(judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)}))


def test_shards_of_blocks_fail_their_checks(ranks: Ranks, tmp_path: Path) -> None:
    assert failed_with(ranks, tmp_path, sampler_of=BlockSampler, begin_epoch=set_epoch) == {"by hand", "gathered"}


def test_a_wrong_gather_fails_its_check(ranks: Ranks, tmp_path: Path) -> None:
    assert failed_with(ranks, tmp_path / "stale", gather_early) == {"gathered"}
    assert failed_with(ranks, tmp_path / "twice", gather_twice) == {"called bytes"}
    assert failed_with(ranks, tmp_path / "right") == set()
