"""Scripts that start their own ranks: check runs their function in its ranks, or refuses them with a message."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distlab.tools.check.watch.spawned_ranks import launcher_in, makes_group
from tests.tools.check.cases import SCRIPTS, assert_ended, check, check_text

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
IN_A_POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool

import torch.distributed as dist

def run(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29871", rank=rank, world_size=2)
    dist.barrier()

def square(number):
    return number**2

if __name__ == "__main__":
    print(ThreadPool(2).map(square, range(2)))
    with {pool} as pool:
        print(list(pool.map(square, range(3))))
        print(list(pool.map(run, range(2))))
"""
POOLED = "[0, 1, 4]", "the script starts its own ranks in a P", "at train.py:19", 'int(os.environ["RANK"]) instead'
REFUSED = {
    SHARES_A_QUEUE: ("share a multiprocessing SimpleQueue",),
    IN_A_POOL.format(pool="multiprocessing.Pool(2)"): POOLED,
    IN_A_POOL.format(pool="ProcessPoolExecutor(2)"): POOLED,
    "import subprocess, sys\n\nsubprocess.run([sys.executable, '--version'], check=True)\n"
    "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', 'train.py'])\n": (
        "starts its own ranks at train.py:4 by torch.distributed.run, which check cannot observe",
    ),
}


@pytest.mark.parametrize("text", REFUSED, ids=["a queue", "a pool", "an executor", "a launcher"])
def test_ranks_that_check_cannot_start_are_refused(text: str, tmp_path: Path) -> None:
    assert_ended(check_text(text, tmp_path), 2, *REFUSED[text])


@pytest.mark.parametrize(
    ("name", "size", "words", "messages"),
    [
        ("spawned_ranks", 2, ["3"], ["REFUSED", "the script starts 3 ranks of its own at spawned_ranks.py:", "=3"]),
        ("process_ranks", 3, [], ["run it with WORLD_SIZE=2"]),  # where they meet
    ],
)
def test_another_number_of_ranks_is_refused(
    name: str, size: int, words: list[str], messages: list[str], tmp_path: Path
) -> None:
    assert_ended(
        check(SCRIPTS / "right" / f"{name}.py", size, tmp_path, *words), 2, "run it with WORLD_SIZE", *messages
    )


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["/usr/bin/torchrun", "a.py"], "torchrun"), ("torchrun --nproc-per-node 2 a.py", "torchrun"),
        (["python3", "-u", "-m", "torch.distributed.launch", "a.py"], "torch.distributed.launch"),
        (["echo", "torchrun"], ""), ("ls", ""), ([b"ls"], ""), (Path("/bin/ls"), ""), ([], ""),
        (["python3", "-m"], ""),
    ],
)  # fmt: skip
def test_a_launcher_is_recognised_by_its_command(command: Any, launcher: str) -> None:
    assert launcher_in(command) == launcher


def creates_group() -> None:
    dist.init_process_group("gloo")


def calls_creator(rank: int) -> None:  # noqa: ARG001
    creates_group()


class Trainer:
    def setup(self) -> None:
        dist.init_process_group("gloo")

    def fit(self) -> None:
        self.setup()

    def log(self) -> None:
        print("fits")


def fit_one() -> None:
    Trainer().fit()


def prints() -> None:
    print("made")


def closed(function: Any) -> Any:
    def inner() -> None:
        function()

    return inner


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        (creates_group, True), (calls_creator, True), (functools.partial(calls_creator, 1), True), (fit_one, True),
        (closed(creates_group), True), (Trainer().fit, True), (Trainer().log, False), (Trainer, False), (prints, False), (closed(prints), False), (print, False), (None, False),
        (dist.barrier, False),
    ],
)  # fmt: skip
def test_a_function_that_creates_a_group_is_recognised(function: Any, makes: bool) -> None:
    assert makes_group(function, lambda file: file == __file__) == makes
