"""Scripts that start their own ranks: taken over, or refused in a sentence; a function that makes a group is known."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distlab.check.own_ranks import makes_group
from tests.check.cases import SCRIPTS, check

SHARES_A_QUEUE = """
import torch.distributed as dist
import torch.multiprocessing as mp

def run(rank, size, queue):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    queue.put(rank)

if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, args=(2, queue), nprocs=2)
    print([queue.get() for _ in range(2)])
"""


def test_another_number_of_ranks_is_refused_with_the_right_one(tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / "spawned_ranks.py", 2, tmp_path, "3")
    assert checked.code == 2, checked.said
    assert "REFUSED" in checked.said
    assert "the script starts 3 ranks of its own at spawned_ranks.py:" in checked.said
    assert "run it with WORLD_SIZE=3" in checked.said


def test_processes_of_another_number_are_refused_where_they_meet(tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / "process_ranks.py", 3, tmp_path)
    assert checked.code == 2, checked.said
    assert "run it with WORLD_SIZE=2" in checked.said


def test_a_queue_of_the_parent_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "shares.py"
    script.write_text(SHARES_A_QUEUE)
    checked = check(script, 2, tmp_path)
    assert checked.code == 2, checked.said
    assert "share a multiprocessing SimpleQueue" in " ".join(checked.said.split())


def made() -> None:
    dist.init_process_group("gloo")


def made_by_another(rank: int) -> None:  # noqa: ARG001
    made()


class Trainer:
    def setup(self) -> None:
        dist.init_process_group("gloo")

    def fit(self) -> None:
        self.setup()

    def log(self) -> None:
        print("fits")


def fit_one() -> None:
    Trainer().fit()


def helps() -> None:
    print("made")


def closed(function: Any) -> Any:
    def inner() -> None:
        function()

    return inner


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        (made, True), (made_by_another, True), (functools.partial(made_by_another, 1), True), (fit_one, True),
        (closed(made), True), (Trainer().fit, True), (Trainer().log, False), (Trainer, False), (helps, False), (closed(helps), False), (print, False), (None, False),
        (dist.barrier, False),
    ],
)  # fmt: skip
def test_a_function_that_makes_a_group_is_known(function: Any, makes: bool) -> None:
    assert makes_group(function, lambda file: file == __file__) == makes
