"""`make fit` at a small size: the kernel kills dp, the survivors report it, and fsdp trains in the same memory;
tests/cli/test_fit.py has runs that do not end so."""

import re

import pytest

from tests.compose.containers import Containers, call

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]

SMALL = {"WORLD_SIZE": "2", "LAB_WIDTH": "384", "LAB_DEPTH": "6", "LAB_STEPS": "2"}


def test_dp_runs_out_of_memory_and_fsdp_fits(cluster: Containers) -> None:
    environ = SMALL | {"COMPOSE_PROJECT_NAME": cluster.project, "LAB_RUNS_DIR": str(cluster.runs)}
    done = call("./compose/fit.sh", environ=environ, timeout_s=220, check=False)
    output = done.stdout
    assert done.returncode == 0, output
    assert "rank 1 was killed by the OOM killer" in output
    # The place is that of the last heartbeat, up to a quarter of a second before the end. Memory grows from building the
    # variants to their first step: in CI and on busy cores the rank was killed in three different places.
    place = r"[^:\n]+"
    named = rf"rank 1 lost at step 0 in {place}: killed by the OOM killer"
    assert set(re.findall(rf"worker(\d)-1 +\| {named}", output)) == {"0"}, output
    codes = re.findall(r"worker(\d)-1 exited with code (\d+)", output.partition("--- dp with one container")[2])
    assert sorted(codes[:2]) == [("0", "3"), ("1", "137")]
    assert re.search(r"killed +by the OOM killer: rank 1; allow more than LAB_MEMORY=\d+m", output)
    assert [code for _, code in codes[2:]] == ["0"] * 2
