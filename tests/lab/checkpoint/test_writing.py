"""One checkpoint of several ranks: for any sharding, complete or absent even if a rank fails or is killed."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.lab.checkpoint import locate, manifest, storage
from distlab.techniques.collectives.sharded_tensor import flat_piece
from tests.lab.checkpoint.made_up import checkpoint, manifest_of
from tests.launched import ended_warm
from tests.warm_ranks import Ranks

MATRIX = torch.arange(35.0).view(5, 7)


def state_of(rank: int, ranks: int, matrix: torch.Tensor) -> storage.State:
    """Return a flat shard of the matrix, a replicated vector, a number in pieces, and a tensor of the last rank."""
    chunk = -(-matrix.numel() // ranks)
    run = matrix.flatten()[rank * chunk :][:chunk].clone()
    state = {"flat/weights.m": flat_piece(run, rank * chunk, matrix.shape), "flat/weights.v": matrix[0] + 1}
    if rank == ranks - 1:
        state |= {
            "flat/optimizer.step.m": flat_piece(matrix.flatten()[-1:], 0, torch.Size([])),
            "flat/weights.last": matrix[-1] + 1,
        }
    return {name: tensor for name, tensor in state.items() if not (hasattr(tensor, "boxes") and not tensor.boxes)}


def save_sharded(group: dist.ProcessGroup, folder: str) -> int:
    state = state_of(group.rank(), group.size(), MATRIX)
    loss_parts: dict[str, list[float | None]] = {"flat": [0.25 * (group.rank() + 1)]}
    storage.write_checkpoint(
        Path(folder), manifest_of(1, losses={"flat": []}), state, group, loss_parts, needed_bytes=0
    )
    return storage.needed_bytes(state, group)


def parts(tensor: Any) -> list[torch.Tensor]:
    return [box for _, box in tensor.boxes] if hasattr(tensor, "boxes") else [tensor]


def load_sharded(group: dist.ProcessGroup, folder: str) -> bool:
    state, wanted = (state_of(group.rank(), group.size(), matrix) for matrix in (torch.zeros(5, 7), MATRIX))
    storage.load_state(state, Path(folder) / "step-00000001", group)
    loaded, expected = ([part for tensor in each.values() for part in parts(tensor)] for each in (state, wanted))
    return all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@pytest.mark.parametrize(("saved_by", "read_by"), [(3, 2), (1, 8), (8, 3)])
def test_any_number_of_ranks_loads_any_checkpoint(ranks: Ranks, tmp_path: Path, saved_by: int, read_by: int) -> None:
    predicted = set(ranks(saved_by, save_sharded, str(tmp_path)))
    assert ranks(read_by, load_sharded, str(tmp_path)) == [True] * read_by
    dense = storage.load_dense(tmp_path / "step-00000001", "flat/")
    assert torch.equal(dense["weights.m"], MATRIX) and torch.equal(dense["weights.last"], MATRIX[-1] + 1)
    saved = manifest.read(tmp_path / "step-00000001")
    assert locate.damage(tmp_path / "step-00000001", saved) == []
    assert len(predicted) == 1
    assert (max(predicted) - 4 * (35 + 7 + 1 + 7)) % storage.ENTRY_BYTES == 0  # each number once
    assert saved.num_bytes < 1.5 * max(predicted)
    assert saved.losses == {"flat": [sum(0.25 * (rank + 1) for rank in range(saved_by))]}


def save_on_a_bad_disk(group: dist.ProcessGroup, folder: str) -> str:
    """Save with a limit of 4 KiB per file on rank 1."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        state = {f"flat/weights.{group.rank()}": torch.zeros(4000)}
        storage.write_checkpoint(Path(folder), manifest_of(20), state, group, {"flat": []}, needed_bytes=0)
    except storage.Unsaved as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def test_a_disk_error_of_one_rank_reaches_all_and_keeps_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    assert ranks(3, save_on_a_bad_disk, str(tmp_path)) == ["File too large"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def save_more_than_fits(group: dist.ProcessGroup, folder: str) -> str:
    try:
        storage.write_checkpoint(Path(folder), manifest_of(20), {}, group, {"flat": []}, needed_bytes=1 << 60)
    except storage.Unsaved as error:
        return str(error)
    return "saved"


def test_a_disk_without_enough_space_is_not_written_to(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks(2, save_more_than_fits, str(tmp_path))
    assert all(
        re.fullmatch("No space left on device: .* is needed, including .* for logs, and .* is free", text)
        for text in errors
    )
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, torch, torch.distributed as dist
from pathlib import Path
from tests.lab.checkpoint.made_up import manifest_of
from distlab.lab.checkpoint import storage
folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[2] == "data":
    storage.Writer.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
else:
    storage._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # the manifest is there, its folder not yet renamed
storage.write_checkpoint(folder, manifest_of(20), {"flat/weights.w": torch.zeros(3)}, dist.group.WORLD, {"flat": []}, needed_bytes=0)
"""


@pytest.mark.parametrize("moment", ["data", "manifest"])
def test_a_process_killed_during_a_save_keeps_the_checkpoint_before(tmp_path: Path, moment: str) -> None:
    checkpoint(tmp_path, 10)
    done = ended_warm("-c", [KILLED, str(tmp_path), moment], environ=os.environ, timeout_s=60)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".step-00000020.partial" / "__0_0.distcp").exists()
    found = locate.newest_good(tmp_path, pytest.fail)
    assert found is not None and found.manifest.step == 10
