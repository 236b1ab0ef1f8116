"""A batch that is parted before it is dealt: each shard has some of each microbatch, and one process all of it."""

import pytest
import torch

from distlab.config import Config
from distlab.workload.data import Batches, PartedBatches

pytestmark = pytest.mark.timeout(60)


def batches_of(kind: type[Batches], world_size: int, batch: int, microbatches: int, *, proof: bool) -> Batches:
    config = Config.read(
        {
            "WORLD_SIZE": str(world_size),
            "LAB_MODEL": "mlp",
            "LAB_WIDTH": "4",
            "LAB_BATCH": str(batch),
            "LAB_MICROBATCHES": str(microbatches),
        }
    )
    return kind(config, proof=proof, device=torch.device("cpu"), dtype=torch.float64)


@pytest.mark.parametrize("proof", [False, True])
@pytest.mark.parametrize(
    ("world_size", "batch", "microbatches"), [(3, 13, 4), (4, 16, 4), (4, 17, 2), (1, 5, 5), (2, 9, 1)]
)
def test_shards_of_a_microbatch_are_what_one_process_takes_at_once(
    world_size: int, batch: int, microbatches: int, proof: bool
) -> None:
    batches = batches_of(PartedBatches, world_size, batch, microbatches, proof=proof)
    for step in range(3):
        whole = batches.alone(step)
        dealt = [batches.dealt(step, shard, world_size) for shard in range(world_size)]
        assert {len(parts) for parts in dealt} == {len(whole)} == {microbatches}
        for number, one in enumerate(whole):
            parts = [of_shard[number] for of_shard in dealt]
            assert all(len(part.inputs) > 0 for part in parts)
            assert torch.equal(torch.cat([part.inputs for part in parts]), one.inputs)
            assert {part.share for part in parts} == {one.share}
        ids = [batches.sample_ids(step, shard, world_size) for shard in range(world_size)]
        assert sorted(number for of_shard in ids for number in of_shard) == sorted(batches.full_ids(step))
        taken, _ = batches.samples.take(torch.tensor(ids[0]))
        assert torch.equal(torch.cat([part.inputs for part in dealt[0]]), taken)


def test_in_one_part_it_is_dealt_like_any_other_batch() -> None:
    parted, plain = (batches_of(kind, 3, 10, 1, proof=True) for kind in (PartedBatches, Batches))
    assert torch.equal(parted.alone(0)[0].inputs, plain.full(0).inputs)
    for shard in range(3):
        assert parted.sample_ids(0, shard, 3) == plain.sample_ids(0, shard, 3)


def test_microbatches_are_uneven_where_every_rank_still_gets_a_sample() -> None:
    assert len({len(part.inputs) for part in batches_of(PartedBatches, 2, 16, 4, proof=True).alone(0)}) > 1
    assert {len(part.inputs) for part in batches_of(PartedBatches, 4, 16, 4, proof=True).alone(0)} == {4}
