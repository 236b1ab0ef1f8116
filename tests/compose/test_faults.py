"""Faults of a real container, also of rank 0's, and the message of every survivor."""

import re
import time
from collections.abc import Callable

import pytest

from tests.compose.containers import TINY, Containers, call, parse_time

pytestmark = pytest.mark.compose

WORLD_SIZE = 3
NAMED_WITHIN_S = 5.0
ENDED_WITHIN_S = 10.0  # all survivors, with the verdict written and most of the report
STOPPED_WITHIN_S = 1.0
COMPOSE_S = 1.0  # the start of Compose itself
# Trains for 10 s and more: long enough to be interrupted, short enough to end if nothing interrupts it.
LONG = TINY | {"LAB_STEPS": "20000", "LAB_VARIANT": "flat", "LAB_PROOF": "0"}
TRAINS = r"working .* of \d+ steps\)"  # the heartbeat, every ten seconds

# Fills the container's memory at about 100 MB a second, so that heartbeats still report it, with many small processes: the
# kernel kills the largest one, the rank.
FILL_MEMORY = """while :; do python -S -c 'import time; x = b"x" * 40_000_000; time.sleep(60)' & sleep 0.4; done"""


def kill(cluster: Containers, rank: int) -> None:
    cluster.docker("kill", rank)


def pause(cluster: Containers, rank: int) -> None:
    cluster.docker("pause", rank)


def disconnect(cluster: Containers, rank: int) -> None:
    cluster.docker(f"network disconnect {cluster.project}_default", rank)


def fill_memory(cluster: Containers, rank: int) -> None:
    call("docker", "exec", cluster.name(rank), "sh", "-c", FILL_MEMORY, check=False)


ENDED = r"rank {} lost at step \d+ in .*: its connection ended"
SILENT = r"rank {} lost at step \d+ in .*: no heartbeat for"
# The fault, the message of the survivors, and the victim's exit code, None while it hangs.
FAULTS: dict[str, tuple[Callable[[Containers, int], None], str, int | None]] = {
    "kill": (kill, ENDED, 137),
    "pause": (pause, SILENT, None),
    "disconnect": (disconnect, SILENT, 3),
    "memory": (fill_memory, r"rank {} lost at step \d+ in .*: killed by the OOM killer", 137),
}


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        ("kill", 0),
        ("pause", 2),
        ("disconnect", 0),
        ("memory", 2),
    ],
)
def test_every_survivor_names_the_lost_rank(cluster: Containers, fault: str, victim: int) -> None:
    inject, pattern, code = FAULTS[fault]
    cluster.up(WORLD_SIZE, **LONG, **({"LAB_MEMORY": "700m"} if fault == "memory" else {}))
    cluster.wait_for_line(0, TRAINS, timeout_s=100)
    acted_at = time.time()
    inject(cluster, victim)
    if code == 137:  # memory takes seconds to fill, so the time counts from the end of the rank
        assert cluster.wait(victim) == {victim: code}
        acted_at = parse_time(cluster.state(victim)["FinishedAt"])
    survivors = [rank for rank in range(WORLD_SIZE) if rank != victim]
    sentences = [cluster.wait_for_line(rank, pattern.format(victim), timeout_s=20) for rank in survivors]
    assert len({text for text, _ in sentences}) == 1, "survivors disagree"
    assert max(at for _, at in sentences) - acted_at < NAMED_WITHIN_S
    assert set(cluster.wait(*survivors).values()) == {3}
    assert max(parse_time(cluster.state(rank)["FinishedAt"]) for rank in survivors) - acted_at < ENDED_WITHIN_S
    run = cluster.verdict()
    assert run["verdict"] == "lost"
    assert [lost["rank"] for lost in run["lost"]] == [victim]
    if code is None:
        cluster.docker("unpause", victim)
        assert cluster.wait(victim) == {victim: 3}
        assert f"rank {victim} was declared dead by the other ranks" in cluster.log(victim)
    elif code != 137:
        assert cluster.wait(victim) == {victim: code}


PIPELINE = LONG | {"RUN_MODE": "pp", "LAB_VARIANT": "1f1b", "LAB_DEPTH": "4", "LAB_SLEEP_MS": "5"}


def test_a_rank_killed_between_send_and_receive_is_named(cluster: Containers) -> None:
    cluster.up(WORLD_SIZE, **PIPELINE)
    cluster.wait_for_line(0, TRAINS, timeout_s=100)
    acted_at = time.time()
    kill(cluster, 1)
    sentences = [cluster.wait_for_line(rank, ENDED.format(1), timeout_s=20) for rank in (0, 2)]
    assert len({text for text, _ in sentences}) == 1, "survivors disagree"
    assert max(at for _, at in sentences) - acted_at < NAMED_WITHIN_S
    assert set(cluster.wait(0, 2).values()) == {3}


def test_docker_stop_ends_every_rank_in_under_a_second(cluster: Containers) -> None:
    cluster.up(WORLD_SIZE, **LONG)
    cluster.wait_for_line(0, TRAINS, timeout_s=100)
    stopped_at = time.time()
    cluster.compose("stop")
    assert set(cluster.wait().values()) == {143}, cluster.logs()
    assert (
        max(parse_time(cluster.state(rank)["FinishedAt"]) for rank in range(WORLD_SIZE)) - stopped_at
        < STOPPED_WITHIN_S + COMPOSE_S
    )
    for rank in range(WORLD_SIZE):
        assert f"rank {rank} was stopped by SIGTERM" in cluster.log(rank)


def test_docker_stop_ends_ranks_that_are_still_joining(cluster: Containers) -> None:
    cluster.up(2, **LONG)
    cluster.wait_until_started()
    cluster.docker("stop", 1)
    cluster.docker("stop", 0)
    assert cluster.wait() == {0: 143, 1: 143}, cluster.logs()


def test_ranks_that_never_join_are_named(cluster: Containers) -> None:
    cluster.world_size = 2
    cluster.compose(
        "up", "-d", "--no-build", "worker0", "worker1", variables={"WORLD_SIZE": "4", "LAB_JOIN_TIMEOUT_S": "4", **LONG}
    )
    assert cluster.wait() == {0: 3, 1: 3}
    for rank in range(2):
        assert re.search(r"ranks 2 and 3|ranks 2, 3", cluster.log(rank)), cluster.logs()
