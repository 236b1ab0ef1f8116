"""Machines that share no disk: found before anything is written, refused where a checkpoint would need it."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from distlab.cluster.control_plane import Exchange
from distlab.config import Config, ConfigError
from distlab.rank.preflight import find_separate_disks, seen_by
from distlab.report import run_folder

TOKEN = "0123456789abcdef" * 2


def ask(folders: list[Path], config: Config) -> list[list[str]]:
    """What each rank is told with a folder of its own: a line and all hosts, or the faults."""
    store = dist.HashStore()
    exchanges = [Exchange(store, rank, len(folders), timeout_s=10) for rank in range(len(folders))]

    def one(rank: int) -> list[str]:
        try:
            found = find_separate_disks(exchanges[rank], folders[rank], TOKEN, config)
            return [found.told, *found.hosts] if found else []
        except ConfigError as error:
            return error.faults

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(one, range(len(folders))))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Of three ranks, of which the last is on another machine."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in ("here", "here", "there")]


def test_one_folder_is_not_worth_a_word_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert ask([tmp_path] * 3, Config.read({"LAB_CHECKPOINT_EVERY": "2"})) == [[]] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"LAB_CHECKPOINT_EVERY": "2"}, {"LAB_RESUME": "runs/mine"}])
def test_checkpoints_are_refused_on_every_rank_alike(folders: list[Path], settings: dict[str, str]) -> None:
    found = ask(folders, Config.read(settings))
    ((name, value),) = settings.items()
    assert found[0] == found[1] == found[2]
    (fault,) = found[0]
    assert fault.startswith("LAB_RUNS_DIR='runs' is not one folder: rank 2 on ")
    assert fault.endswith(f"cannot see rank 0's, and {name}={value} needs one on a disk that all machines share")


def test_what_is_refused_leaves_no_folder_but_one_that_holds_a_run(folders: list[Path]) -> None:
    for folder in set(folders):
        (folder / run_folder.FILE).touch()
    (folders[2] / "run.json").touch()
    ask(folders, Config.read({"LAB_CHECKPOINT_EVERY": "2"}))
    assert not folders[0].exists()
    assert sorted(path.name for path in folders[2].iterdir()) == [run_folder.FILE, "run.json"]


def test_without_checkpoints_it_is_said_where_logs_are(folders: list[Path]) -> None:
    found = ask(folders, Config.read({}))
    ((line, *hosts), *others) = found
    assert others == [[line, *hosts]] * 2
    assert hosts == [socket.gethostname()] * 3
    assert line.startswith("not shared by rank 2 on ") and "logs of these ranks stay there" in line


def test_what_an_attempt_before_has_left_is_not_taken_for_rank_0s(folders: list[Path]) -> None:
    (folders[2] / ".seen-ffffffffffffffff").touch()
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda rank: seen_by(Exchange(store, rank, 3, timeout_s=10), folders[rank], TOKEN), range(3))
        )
    assert [unseen for _, unseen in found] == [[2]] * 3
