"""Untrusted files: a pickle runs nothing, and a file that is cut, malformed or without a rank is one sentence."""

import io
import json
import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distlab.tools.check.dump.reading import Dump, Log, Stacks, Unreadable, files_in, read, version_fault
from tests.tools.check.dump.synthetic import dump, entry

RIGHT = dump([entry("all_reduce", 0)], {"0": [0, 1]})


class RunsCode:
    """Unpickling it calls os.mkdir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def written(folder: Path, name: str, data: bytes | str) -> Path:
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / name


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_3", "dump_3", "comm_lib_trace_rank_3.pkl", "node7_rank3", "x_rank-3.json"]
)
def test_the_rank_is_in_the_name(name: str, tmp_path: Path) -> None:
    found = read(written(tmp_path, name, pickle.dumps(RIGHT)))
    assert isinstance(found, Dump)
    assert (found.rank, found.version, found.groups) == (3, "2.10", {"0": ("default_pg", (0, 1))})


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="but a dump has only dicts"):
        read(written(tmp_path, "dump_0", pickle.dumps({"version": "2.10", "entries": [RunsCode(tmp_path / "made")]})))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle.dumps(RIGHT)[:-20], "cut off"),
        (json.dumps(RIGHT)[:-20].encode(), "cut off"),
        (b"", "it is empty"),
        (b'{"a": 1}', "no dump of torch's flight recorder"),
        (pickle.dumps([1, 2]), "no dump of torch's flight recorder"),
        (b"[1, 2]", "no stacks of py-spy"),
        (b"\x80\x04" + b"(" * 10, "cut off"),
    ],
)
def test_an_unreadable_file_is_explained(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(written(tmp_path, "dump_0", data))


def test_a_dump_without_a_rank_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    with pytest.raises(Unreadable, match="its name has no rank"):
        read(written(folder, "dump", pickle.dumps(RIGHT)))


def test_versions() -> None:
    assert not version_fault("2.4") and not version_fault("2.10")
    assert "is not one of 2.0 to 2.10" in version_fault("3.1")
    assert "is not one of 2.0 to 2.10" in version_fault("new")


STACK = [("wait", "torch/distributed/distributed_c10d.py", 3252), ("<module>", "/home/me/train.py", 14)]


@pytest.mark.parametrize("kind", ["faulthandler", "py-spy", "py-spy --json"])
def test_stacks(kind: str, tmp_path: Path) -> None:
    text = {
        "faulthandler": "Thread 0x00007fb978459b80 (most recent call first):\n"
        + "".join(f'  File "{file}", line {line} in {name}\n' for name, file, line in STACK),
        "py-spy": 'Process 7: python train.py\nPython v3.11.7\n\nThread 7 (active): "MainThread"\n'
        + "".join(f"    {name} ({file}:{line})\n" for name, file, line in STACK),
        "py-spy --json": json.dumps(
            [{"thread_id": 7, "frames": [{"name": name, "filename": file, "line": line} for name, file, line in STACK]}]
        ),
    }[kind]
    found = read(written(tmp_path, "rank5.txt", text))
    assert isinstance(found, Stacks) and found.rank == 5
    assert [(frame.function, frame.line) for frame in found.threads[0]] == [("wait", 3252), ("<module>", 14)]


def test_a_log_of_many_ranks(tmp_path: Path) -> None:
    found = read(written(tmp_path, "job.log", "hello\n[rank3]: Traceback\n[rank3]: ValueError: no\n[rank0]: bye\n"))
    assert isinstance(found, Log)
    assert found.by_rank == {3: "Traceback\nValueError: no", 0: "bye"}


def test_a_log_in_a_folder_of_its_rank(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0" / "3"
    folder.mkdir(parents=True)
    written(folder, "stderr.log", "hello\n")
    (path,) = files_in([tmp_path])
    found = read(path)
    assert isinstance(found, Log) and found.by_rank == {3: "hello\n"}


def test_random_bytes_raise_only_unreadable(tmp_path: Path) -> None:
    draw = random.Random(0)
    right = pickle.dumps(RIGHT)
    for _ in range(300):
        data = bytearray(right)
        for _ in range(3):
            data[draw.randrange(2, len(data))] = draw.randrange(256)
        with suppress(Unreadable):
            read(written(tmp_path, "dump_0", bytes(data)))
    assert pickle.load(io.BytesIO(right)) == RIGHT
