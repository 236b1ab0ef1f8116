"""A rank rejoins only a run that is alive, of the same settings, in which its process before has ended."""

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
    given = {"RUN_MODE": "elastic", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    return Config.read(
        given | {"RANK": str(rank), "LAB_RUNS_DIR": str(folder), "LAB_KEY": "that nobody may read"} | settings
    )


def live(folder: Path, rank: int, ready: Connection) -> None:
    """Be `rank` of a run until the end of the line."""
    held = folder / "run"
    claim(held, "abcd", goes_on=False)
    members = {each: Member(each, "host", "127.0.0.1", each, next_port=1000 + each) for each in range(3)}
    cluster: Any = SimpleNamespace(rank=rank, run_id="run", token="abcd", members=members, server_at=("127.0.0.1", 77))
    publish(cluster, config(folder, rank), held)
    ready.send("here")
    ready.recv()


def begun(folder: Path) -> Any:
    """Rank 0 of a run in this folder, a process."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=live, args=(folder, 0, theirs), daemon=True)
    process.start()
    assert ours.poll(20)
    return process


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs, with one in which rank 0 lives."""
    process = begun(tmp_path)
    yield tmp_path
    process.kill()
    process.join()


def test_who_is_dead_finds_where_the_others_serve(alive: Path) -> None:
    left = find_left_run(config(alive, 2))
    assert left is not None and left.run["run_id"] == "run"
    assert left.served_at == [["127.0.0.1", port] for port in (77, 1000, 1001, 1002)]
    assert "nobody may read" not in (alive / "run" / "ranks.json").read_text()


@pytest.mark.parametrize(
    ("rank", "settings"),
    [(0, {}), (2, {"LAB_STEPS": "77"}), (2, {"MASTER_PORT": "29998"}), (2, {"WORLD_SIZE": "4"})],
    ids=["it lives", "other settings", "another port", "another world"],
)
def test_nobody_else_does(alive: Path, rank: int, settings: dict[str, str]) -> None:
    assert find_left_run(config(alive, rank, **settings)) is None


def test_a_run_that_is_over_takes_nobody_back(tmp_path: Path) -> None:
    process = begun(tmp_path)
    process.kill()
    process.join()
    assert (tmp_path / "run" / "ranks.json").exists()
    assert find_left_run(config(tmp_path, 2)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "deep JSON"])
def test_a_list_of_ranks_that_is_none_is_passed_over(alive: Path, kind: str) -> None:
    spoil(alive / "run" / "ranks.json", kind)
    assert find_left_run(config(alive, 2)) is None
