"""A rank rejoins only a run that is alive, of the same settings, in which its process before has ended."""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.rendezvous_server import Member
from distlab.config import Config
from distlab.rank.rejoin import Addresses, find_left_run, identity
from distlab.report.run_folder import claim
from tests.report.test_bad_files import spoil

pytestmark = pytest.mark.timeout(60)


def config(folder: Path, rank: int, **settings: str) -> Config:
    given = {"RUN_MODE": "elastic", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    return Config.read(given | {"RANK": str(rank), "LAB_RUNS_DIR": str(folder)} | settings)


def live(folder: Path, rank: int, ready: Connection) -> None:
    """Be `rank` of a run until the end of the line."""
    held = folder / "run"
    claim(held, "abcd", goes_on=False)
    members = {each: Member(each, "host", "127.0.0.1", 1000 + each, each) for each in range(3)}
    addresses = Addresses(held, rank, identity(config(folder, rank), "run", "abcd"), members)
    addresses.publish({each: ["127.0.0.1", 2000 + each, 3000 + each] for each in range(3)})
    ready.send("here")
    ready.recv()


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs, with one in which rank 0 lives."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=live, args=(tmp_path, 0, theirs), daemon=True)
    process.start()
    assert ours.poll(20)
    yield tmp_path
    process.kill()
    process.join()


def test_who_is_dead_finds_the_others(alive: Path) -> None:
    addresses = find_left_run(config(alive, 2))
    assert addresses is not None
    assert (addresses.rejoined, addresses.run["run_id"], addresses.opened[1]) == (
        True,
        "run",
        ["127.0.0.1", 2001, 3001],
    )
    assert addresses.members[0].udp_port == 1000


@pytest.mark.parametrize(
    ("rank", "settings"),
    [(0, {}), (2, {"LAB_STEPS": "77"}), (2, {"MASTER_PORT": "29998"}), (2, {"WORLD_SIZE": "4"})],
    ids=["it lives", "other settings", "another port", "another world"],
)
def test_nobody_else_does(alive: Path, rank: int, settings: dict[str, str]) -> None:
    assert find_left_run(config(alive, rank, **settings)) is None


def test_a_run_that_is_over_takes_nobody_back(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=live, args=(tmp_path, 0, theirs), daemon=True)
    process.start()
    assert ours.poll(20)
    process.kill()
    process.join()
    assert (tmp_path / "run" / "ranks.json").exists()
    assert find_left_run(config(tmp_path, 2)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "deep JSON"])
def test_a_list_of_ranks_that_is_none_is_passed_over(alive: Path, kind: str) -> None:
    spoil(alive / "run" / "ranks.json", kind)
    assert find_left_run(config(alive, 2)) is None


def test_what_is_written_has_no_key_and_follows_a_rank_that_moved(tmp_path: Path) -> None:
    os.environ.pop("LAB_KEY", None)
    own = config(tmp_path, 1, LAB_KEY="a key that nobody may read")
    (tmp_path / "run").mkdir()
    addresses = Addresses(tmp_path / "run", 1, identity(own, "run", "abcd"), {1: Member(1, "host", "127.0.0.1", 7, 1)})
    addresses.publish({1: ["127.0.0.1", 8, 9]})
    addresses.readmit(Member(2, "host", "127.0.0.2", 17, 2), ["127.0.0.2", 18, 19])
    text = (tmp_path / "run" / "ranks.json").read_text()
    assert "nobody may read" not in text
    assert '"127.0.0.2", 18, 19' in text


def test_who_is_taken_in_is_heard_again_and_silent_ranks_count_from_then_on() -> None:
    hearing = Hearing(0, range(3), lost_after_s=2.0, now=0.0)
    hearing.forget(2)
    assert hearing.present() == {0, 1}
    hearing.take_in(2, now=10.0)
    assert hearing.present() == {0, 1, 2}
    assert hearing.heard(11.0) == {0, 2}
    back = Hearing(2, range(3), lost_after_s=2.0, now=10.0)
    hearing.take(back.beat(RunPosition(), None, 12.5), now=12.5)
    assert hearing.heard(13.0) == {0, 2}
    assert hearing.silent(16.0) == {1, 2}
