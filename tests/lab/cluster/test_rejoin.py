"""A rank rejoins only a living run with the same settings, in which its earlier process has ended."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.lab.cluster.messages import Member
from distlab.lab.cluster.rejoin import find_left_run, publish
from distlab.lab.config import Config
from distlab.lab.report.run_folder import claim
from tests.lab.report.test_bad_files import spoil

pytestmark = pytest.mark.timeout(60)


def config(folder: Path, rank: int, **settings: str) -> Config:
    common = {"RUN_MODE": "elastic", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    return Config.read(
        common | {"RANK": str(rank), "LAB_RUNS_DIR": str(folder), "LAB_KEY": "that nobody may read"} | settings
    )


def live(folder: Path, rank: int, ready: Connection) -> None:
    """Be `rank` of a run until the connection ends."""
    run = folder / "run"
    claim(run, "abcd", goes_on=False)
    members = {each: Member(each, "host", "127.0.0.1", each, next_port=1000 + each) for each in range(3)}
    cluster: Any = SimpleNamespace(rank=rank, run_id="run", token="abcd", members=members, server_at=("127.0.0.1", 77))
    publish(cluster, config(folder, rank), run)
    ready.send("here")
    ready.recv()


def start_rank_0(folder: Path) -> Any:
    """Start rank 0 of a run in this folder as a process."""
    receiver, sender = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=live, args=(folder, 0, sender), daemon=True)
    process.start()
    assert receiver.poll(20)
    return process


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run whose rank 0 is alive."""
    process = start_rank_0(tmp_path)
    yield tmp_path
    process.kill()
    process.join()


def test_a_dead_rank_finds_the_addresses_of_the_others(alive: Path) -> None:
    left = find_left_run(config(alive, 2))
    assert left is not None and left.run["run_id"] == "run"
    assert left.served_at == [["127.0.0.1", port] for port in (77, 1000, 1001, 1002)]
    assert "nobody may read" not in (alive / "run" / "ranks.json").read_text()


@pytest.mark.parametrize(
    ("rank", "settings"),
    [(0, {}), (2, {"LAB_STEPS": "77"}), (2, {"MASTER_PORT": "29998"}), (2, {"WORLD_SIZE": "4"})],
    ids=["it lives", "other settings", "another port", "another world"],
)
def test_other_processes_find_no_run(alive: Path, rank: int, settings: dict[str, str]) -> None:
    assert find_left_run(config(alive, rank, **settings)) is None


def test_no_rank_rejoins_a_run_that_has_ended(tmp_path: Path) -> None:
    process = start_rank_0(tmp_path)
    process.kill()
    process.join()
    assert (tmp_path / "run" / "ranks.json").exists()
    assert find_left_run(config(tmp_path, 2)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "deep JSON"])
def test_an_invalid_ranks_file_is_skipped(alive: Path, kind: str) -> None:
    spoil(alive / "run" / "ranks.json", kind)
    assert find_left_run(config(alive, 2)) is None
