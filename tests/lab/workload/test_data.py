"""Batches: shards are disjoint, complete, weighted by samples and repeatable; and the text of gpt."""

import os
import random
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.lab.config import Config
from distlab.lab.workload import data
from distlab.lab.workload.data import Batches, PartedBatches, shard_sizes

SIZES = {"LAB_WIDTH": "8", "LAB_SEQ": "5"}


def batches_of(proof: bool = True, **settings: str) -> Batches:
    return Batches(Config.read(SIZES | settings), proof=proof, device=torch.device("cpu"), dtype=torch.float64)


@given(st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_shards_are_complete_and_never_empty(batch: int, num_shards: int, uneven: bool) -> None:
    if batch < num_shards:
        return
    sizes = shard_sizes(batch, num_shards, uneven=uneven)
    assert sum(sizes) == batch
    assert min(sizes) >= 1
    if uneven and batch > num_shards > 1:
        assert len(set(sizes)) > 1


def test_the_lessons_shards() -> None:
    assert shard_sizes(32, 4, uneven=True) == [8, 6, 9, 9]
    assert Config.read({"LAB_MODEL": "line"}).batch == 32
    assert Config.read({"LAB_MODEL": "line", "LAB_BATCH": "7"}).batch == 7
    assert [len(batches_of(False, LAB_MODEL="line").sample_ids(0, shard, 4)) for shard in range(4)] == [8, 6, 9, 9]


def test_the_lessons_points() -> None:
    draw = random.Random(1)
    x = draw.uniform(-1.0, 1.0)
    y = 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)
    points = batches_of(LAB_MODEL="line").full(0)
    assert (points.inputs[0].item(), points.targets[0].item()) == (x, y)
    assert points.inputs.shape == points.targets.shape == (32, 1)


@pytest.mark.parametrize("model", ["gpt", "mlp", "line"])
@pytest.mark.parametrize(
    ("batch", "num_shards", "microbatches"), [(7, 3, 1), (16, 4, 2), (9, 2, 4), (5, 5, 1), (8, 1, 3)]
)
def test_the_microbatches_are_the_batch_and_their_weights_sum_to_one(
    model: str, batch: int, num_shards: int, microbatches: int
) -> None:
    batches = batches_of(LAB_MODEL=model, LAB_BATCH=str(batch), LAB_MICROBATCHES=str(microbatches))
    for step in range(3):
        dealt = [batches.microbatches(step, shard, num_shards) for shard in range(num_shards)]
        flat = [part for parts in dealt for part in parts]
        assert all(1 <= len(parts) <= microbatches for parts in dealt)
        assert torch.equal(torch.cat([part.inputs for part in flat]), batches.full(step).inputs)
        assert torch.equal(torch.cat([part.targets for part in flat]), batches.full(step).targets)
        assert sum(part.share * part.targets.numel() for part in flat) == pytest.approx(1.0, abs=1e-12)
        ids = [sample for shard in range(num_shards) for sample in batches.sample_ids(step, shard, num_shards)]
        assert ids == batches.full_ids(step)
        assert len(set(ids)) == batch


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_the_proof_has_two_batches_per_epoch(model: str) -> None:
    batches = batches_of(LAB_MODEL=model)
    assert batches.proof_steps == 3
    assert sorted(batches.full_ids(0) + batches.full_ids(1)) == list(range(32))
    assert sorted(batches.full_ids(2) + batches.full_ids(3)) == list(range(32))
    assert batches.full_ids(2) != batches.full_ids(0)


def test_batches_repeat_and_follow_the_seed() -> None:
    assert batches_of(False).full_ids(5) == batches_of(False).full_ids(5) != batches_of(False, LAB_SEED="2").full_ids(5)


def test_gpt_predicts_the_next_byte() -> None:
    inputs, targets, share = batches_of().full(0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs.shape, inputs.dtype, share) == ((16, 5), torch.int64, 1 / 80)


@pytest.mark.parametrize(
    ("environ", "replicas", "words"),
    [
        (
            {"LAB_BATCH": "16", "LAB_MICROBATCHES": "2"},
            4,
            "16 samples per step = 2 x 2 x 4 (microbatch, accumulated, replicas)",
        ),
        ({"LAB_BATCH": "17"}, 3, "17 samples per step = 6 + 6 + 5 on the replicas, 1 microbatch each"),
        ({"LAB_MODEL": "line"}, 4, "32 samples per step = 8 + 6 + 9 + 9 on the replicas, 1 microbatch each"),
        ({"RUN_MODE": "pp"}, 1, "16 samples per step = 4 x 4 x 1 (microbatch, accumulated, replicas)"),
    ],
)
def test_the_effective_batch_is_stated(environ: dict[str, str], replicas: int, words: str) -> None:
    assert data.effective_batch(Config.read(environ), replicas) == words


def test_faults_of_sizes() -> None:
    config = Config.read({"LAB_BATCH": "6", "LAB_MICROBATCHES": "2"})
    assert data.refusals(config, 3) == []
    assert "smaller than WORLD_SIZE=7" in data.refusals(config, 7)[0]
    assert "allowed: 1 to 1" in data.refusals(config, 4)[0]


# A batch that is split into microbatches first: each shard has a part of each microbatch, one process the whole.

pytestmark = pytest.mark.timeout(60)


def parted_of(kind: type[Batches], world_size: int, batch: int, microbatches: int, *, proof: bool) -> Batches:
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
def test_shards_of_a_microbatch_add_up_to_that_of_one_process(
    world_size: int, batch: int, microbatches: int, proof: bool
) -> None:
    batches = parted_of(PartedBatches, world_size, batch, microbatches, proof=proof)
    for step in range(3):
        whole = batches.alone(step)
        dealt = [batches.microbatches(step, shard, world_size) for shard in range(world_size)]
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


def test_with_one_part_it_is_split_like_other_batches() -> None:
    parted, plain = (parted_of(kind, 3, 10, 1, proof=True) for kind in (PartedBatches, Batches))
    assert torch.equal(parted.alone(0)[0].inputs, plain.full(0).inputs)
    for shard in range(3):
        assert parted.sample_ids(0, shard, 3) == plain.sample_ids(0, shard, 3)


def test_microbatches_are_uneven_if_every_rank_gets_a_sample() -> None:
    assert len({len(part.inputs) for part in parted_of(PartedBatches, 2, 16, 4, proof=True).alone(0)}) > 1
    assert {len(part.inputs) for part in parted_of(PartedBatches, 4, 16, 4, proof=True).alone(0)} == {4}


# The text of gpt: equal on every rank, or refused in one sentence.


def config_of(path: Path | None = None, **settings: str) -> Config:
    return Config.read(settings | ({"LAB_TEXT": str(path)} if path else {}))


def test_the_default_is_pythons_own_source() -> None:
    first = data.read_text(config_of())
    assert 2**20 < len(first) <= data.MAX_BYTES
    assert first == data.read_text(config_of())
    assert b"import" in first
    assert data.text_refusals(config_of()) == []


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second ")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert data.read_text(config_of(tmp_path)) == b"first second third"


def test_no_more_files_are_opened_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 60)
    opened: list[str] = []
    plain = os.open

    def counted(path: Path, flags: int) -> int:
        opened.append(path.name)
        return plain(path, flags)

    monkeypatch.setattr(data, "MAX_BYTES", 100)
    monkeypatch.setattr(os, "open", counted)
    assert data.read_text(config_of(tmp_path)) == b"a" * 60 + b"b" * 40
    assert opened == ["a", "b"]


def test_a_long_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * (data.MAX_BYTES + 10))
    assert len(data.read_text(config_of(tmp_path / "long"))) == data.MAX_BYTES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"x" * 64, "has 64 bytes, but a sample of LAB_SEQ=64 needs at least 65"),
    ],
)
def test_an_unreadable_text_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    faults = data.text_refusals(config_of(path))
    assert len(faults) == 1
    assert words in faults[0]
    assert str(path) in faults[0]
    assert data.text_refusals(config_of(path, LAB_MODEL="mlp")) == []


def test_one_sample_is_enough(tmp_path: Path) -> None:
    import torch

    from distlab.lab.workload.data import Batches

    (tmp_path / "text").write_bytes(bytes(range(65)))
    config = config_of(tmp_path / "text")
    assert data.text_refusals(config) == []
    inputs, targets, _ = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64).full(2)
    assert inputs[3].tolist() == list(range(64))
    assert targets[3].tolist() == list(range(1, 65))


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (fault,) = data.text_refusals(config_of(tmp_path / "pipe"))
    assert "is neither a file nor a folder: each rank would read other text from a pipe or a device" in fault
    assert data.digest(config_of(tmp_path / "pipe")) == ""


@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    (fault,) = data.text_refusals(config_of(Path(device)))
    assert "is neither a file nor a folder" in fault


@pytest.mark.parametrize("path", ["x" * 300, "/x" * 3000, "/proc/self/environ", "/proc/kmsg"])
def test_paths_without_a_regular_file_are_refused(path: str) -> None:
    (fault,) = data.text_refusals(config_of(Path(path)))
    assert fault.startswith("LAB_TEXT=")
    assert len(fault) < 400


def test_only_regular_files_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"text")
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "c").symlink_to("/dev/urandom")
    (tmp_path / "d").symlink_to(tmp_path / "d")
    (tmp_path / "e").symlink_to(tmp_path)  # a folder within itself
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "f"))
        assert data.read_text(config_of(tmp_path)) == b"text"


def test_a_circular_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (fault,) = data.text_refusals(config_of(tmp_path / "loop"))
    assert "cannot be read: Too many levels of symbolic links" in fault


def test_a_folder_with_too_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_ENTRIES", 5)
    for number in range(6):
        (tmp_path / str(number)).touch()
    (fault,) = data.text_refusals(config_of(tmp_path))
    assert "has more than 5 files and folders" in fault


def test_ranks_compare_a_checksum_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one")
    before = data.digest(config_of(tmp_path / "text"))
    (tmp_path / "text").write_bytes(b"two")
    assert before != data.digest(config_of(tmp_path / "text"))


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 5))
def test_consecutive_samples_are_those_of_the_steps(first: int, count: int, seed: int) -> None:
    batches = batches_of(LAB_MODEL="mlp", LAB_BATCH="12", LAB_SEED=str(seed))
    stream = [sample for step in range(6) for sample in batches.full_ids(step)]
    assert batches.ids_from(first, count) == stream[first : first + count]


def test_kept_sizes_are_those_of_the_first_shards() -> None:
    batches = batches_of(LAB_MODEL="line", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", RANK="0")
    assert [batches.kept_sizes(size) for size in (4, 3, 1)] == [[8, 6, 9, 9], [8, 6, 9], [8]]
