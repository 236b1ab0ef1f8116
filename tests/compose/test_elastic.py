"""`RUN_MODE=elastic` in containers: a killed and restarted container rejoins the run."""

import pytest

from tests.compose.containers import Containers

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]
WORLD_SIZE = 3
SETTINGS = {
    "RUN_MODE": "elastic", "LAB_VARIANT": "join", "LAB_LOSSES": "0", "LAB_MODEL": "mlp", "LAB_WIDTH": "16",
    "LAB_DEPTH": "1", "LAB_STEPS": "5000", "LAB_SAVED_EVERY": "1000",
}  # fmt: skip


def test_a_restarted_container_rejoins_the_run(cluster: Containers) -> None:
    cluster.up(WORLD_SIZE, **SETTINGS)
    cluster.wait_for_line(0, "is killed by fault injection", timeout_s=120)
    cluster.docker("kill", 2)
    cluster.docker("start", 2)
    assert cluster.wait(timeout_s=200) == {0: 0, 1: 0, 2: 0}, cluster.logs()
    cluster.wait_for_line(2, r"rejoined at step \d+ of join, [\d.]+ s after its first packet")
    run = cluster.verdict()
    assert (run["verdict"], [entry["rank"] for entry in run["lost"]]) == ("pass", [2])
    assert run["lost"][0]["reason"].endswith("until it came back")
