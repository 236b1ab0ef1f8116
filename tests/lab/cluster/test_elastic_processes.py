"""`RUN_MODE=elastic` in real processes: partitioned ranks, and killed ranks that are restarted."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.cluster.launch import free_port
from tests.lab.cluster.cluster_of_processes import Rank

pytestmark = pytest.mark.timeout(300)
WORLD_SIZE = 3
SETTINGS = {
    "RUN_MODE": "elastic", "LAB_VARIANT": "join", "LAB_LOSSES": "0", "LAB_MODEL": "mlp", "LAB_WIDTH": "16",
    "LAB_DEPTH": "1", "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "LAB_KEY": "a key for this test alone",
    "LAB_JOIN_TIMEOUT_S": "120", "LAB_SAVED_EVERY": "1000",
}  # fmt: skip


class Processes:
    """Ranks that a test starts itself, without the launcher."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.started = folder, list[Rank]()
        own = {"LAB_RUNS_DIR": str(folder), "MASTER_PORT": str(free_port())}
        self.settings = SETTINGS | own | settings

    def start(self, rank: int) -> None:
        self.started.append(Rank([sys.executable, "-m", "workers"], self.settings | {"RANK": str(rank)}))

    def output(self, number: int) -> str:
        return self.started[number].text

    def codes(self, timeout_s: float = 200) -> list[int]:
        """Return the exit codes of all, in the order of their starts."""
        deadline = time.monotonic() + timeout_s
        return [each.end(max(0.1, deadline - time.monotonic())) for each in self.started]

    def verdict(self) -> dict[str, Any]:
        (path,) = self.folder.glob("elastic-*/run.json")
        run: dict[str, Any] = json.loads(path.read_text())
        return run


@contextmanager
def paused(ranks: list[Rank]) -> Iterator[None]:
    """Pause these ranks within the block."""
    for rank in ranks:
        rank.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            rank.process.send_signal(signal.SIGCONT)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made: list[Processes] = []

    def make(**settings: str) -> Processes:
        made.append(Processes(tmp_path, **settings))
        for rank in range(int(made[-1].settings["WORLD_SIZE"])):
            made[-1].start(rank)
        return made[-1]

    yield make
    for process in [rank.process for each in made for rank in each.started]:
        process.kill()
        process.wait()


def test_in_a_partition_the_majority_continues_and_the_minority_stops(world: Callable[..., Processes]) -> None:
    cut = world(LAB_STEPS="400", LAB_FAULTS="cut:rank0@step40", LAB_LOST_AFTER_S="2")
    assert cut.codes() == [3, 0, 0], cut.output(0)
    assert "rank 0 is partitioned from the cluster at step" in cut.output(0), "the minority reports it"
    for rank in (1, 2):
        assert re.search(
            r"rank 0 lost at step \d+ in [^:]*: no heartbeat for 2 s; the remaining ranks continue", cut.output(rank)
        )
    run = cut.verdict()
    assert (run["verdict"], [entry["rank"] for entry in run["lost"]]) == ("pass", [0])
    assert [drill["held"] for drill in run["drills"]] == [True]
    assert {check["name"] for check in run["checks"]} >= {"weights", "optimizer", "samples", "updates kept"}


def test_two_partitioned_ranks_of_five_stop_and_three_continue(world: Callable[..., Processes]) -> None:
    faults = "cut:rank0@step40,cut:rank3@step40"
    cut = world(WORLD_SIZE="5", LAB_STEPS="400", LAB_FAULTS=faults, LAB_LOST_AFTER_S="2")
    assert cut.codes() == [3, 0, 0, 3, 0], cut.output(1)
    for rank in (0, 3):
        assert f"rank {rank} is partitioned from the cluster at step" in cut.output(rank), "the minority reports it"
    run = cut.verdict()
    assert (run["verdict"], sorted(entry["rank"] for entry in run["lost"])) == ("pass", [0, 3])
    assert [drill["held"] for drill in run["drills"]] == [True, True]


@pytest.mark.parametrize(("rank", "variant"), [(0, "join"), (2, "zero1"), (2, "restart")])
def test_a_killed_rank_that_is_restarted_rejoins(world: Callable[..., Processes], rank: int, variant: str) -> None:
    ranks = world(LAB_STEPS="600", LAB_LOST_AFTER_S="60", LAB_VARIANT=variant)
    ranks.started[0].until("is killed by fault injection", 120)
    time.sleep(0.5)
    ranks.started[rank].process.kill()
    ranks.started[rank].process.wait()
    survivors = [each for number, each in enumerate(ranks.started) if number != rank]
    ranks.start(rank)
    with paused(survivors):  # otherwise they would finish before it has started
        ranks.started[WORLD_SIZE].until("rejoins the run", 120)
    others = [0 if each != rank else 128 + signal.SIGKILL for each in range(WORLD_SIZE)]
    assert ranks.codes() == [*others, 0], ranks.output(3)
    text = " ".join(ranks.output(3).split())
    found = re.search(rf"rejoined at step (\d+) of {variant}, ([\d.]+) s after its first packet", text)
    assert found is not None, ranks.output(3)
    run = ranks.verdict()
    assert (run["verdict"], [entry["rank"] for entry in run["lost"]]) == ("pass", [rank])
    # The others may or may not have noticed the loss before it rejoined.
    assert run["lost"][0]["reason"].endswith("until it came back")


def test_a_rank_that_rejoined_survives_the_loss_of_the_server_that_admitted_it(
    world: Callable[..., Processes],
) -> None:
    ranks = world(WORLD_SIZE="4", LAB_STEPS="900", LAB_LOST_AFTER_S="60")
    first = ranks.started
    first[0].until("is killed by fault injection", 120)
    time.sleep(0.5)
    for rank in (3, 0):
        first[rank].process.kill()
    first[0].process.wait()
    ranks.start(0)
    with paused(first[1:3]):
        first[4].until("rejoins the run", 120)
    first[2].until("rank 3 lost", 120)
    first[4].until("is killed by fault injection", 120)  # it is a member again
    first[1].process.kill()  # rank 1 served: rank 0 serves again, at the port of its new process
    killed = 128 + signal.SIGKILL
    assert ranks.codes() == [killed, killed, 0, killed, 0], ranks.output(4)
    lost = {entry["rank"]: entry["reason"] for entry in ranks.verdict()["lost"]}
    assert lost.keys() == {0, 1, 3} and lost[0].endswith("until it came back")
