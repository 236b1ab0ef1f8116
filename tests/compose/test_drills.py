"""Fault injection in real containers: the same faults as in local processes, without privileges."""

import pytest

from tests.compose.containers import TINY, Containers

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]
DRILLED = TINY | {"LAB_VARIANT": "flat", "LAB_STEPS": "8", "LAB_LOST_AFTER_S": "1"}


@pytest.mark.parametrize(
    ("faults", "codes", "verdict"),
    [
        ("kill:rank0@step3", {0: 137, 1: 3, 2: 3}, "lost"),
        ("cut:rank1@step3", {0: 3, 1: 3, 2: 3}, "lost"),
        (
            "pause:rank1:500ms@step2,slow_rank:rank2:0.5@step2,slow_link:rank0:50mbit@step3",
            dict.fromkeys(range(3), 0),
            "pass",
        ),
    ],
    ids=["kill", "cut", "survived"],
)
def test_each_fault_gives_the_expected_verdict(
    cluster: Containers, faults: str, codes: dict[int, int], verdict: str
) -> None:
    assert cluster.run(3, LAB_FAULTS=faults, **DRILLED) == codes, cluster.logs()
    run = cluster.verdict()
    assert run["verdict"] == verdict
    assert {drill["held"] for drill in run["drills"]} == {True}, run["drills"]
    assert len(run["drills"]) == 1 + faults.count(",")
