"""compose/live.yaml in real containers: the page of a run on a published port, and a rank that is killed meanwhile."""

import json
import time
import urllib.request
from typing import Any

import pytest

from distlab.cluster.launch import free_port
from tests.compose.containers import TINY, TOP, Containers, call

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]

RED_S = 3.0


def state(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:  # it is not there yet
        return {"ranks": [], "verdict": "", "sent_bytes": []}


def until(port: int, holds: Any, bound_s: float) -> dict[str, Any]:
    """The first snapshot for which `holds` is true."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        if holds(found := state(port)):
            return found
        time.sleep(0.05)
    raise AssertionError(f"not in {bound_s} s: {found}")


def hows(snapshot: dict[str, Any]) -> list[str]:
    return [rank["how"] for rank in snapshot["ranks"]]


def test_a_rank_that_is_killed_is_seen_from_the_host(cluster: Containers) -> None:
    cluster.overlay = TOP / "compose" / "live.yaml"
    port = str(free_port())
    long = TINY | {"LAB_VARIANT": "flat", "LAB_STEPS": "100000", "LAB_PROOF": "0"}
    cluster.up(2, LAB_LIVE_PORT=port, **long)
    try:
        seen = until(int(port), lambda found: any(rank["step"] > 5 for rank in found["ranks"]), 90)
        assert hows(seen) == ["running"] * 2
        assert seen["sent_bytes"][0][1] > 0  # between containers, each by its own address
        cluster.docker("kill", 1)
        until(int(port), lambda found: hows(found)[1:] == ["lost"], RED_S)
        assert cluster.wait()[0] == 3
        last = until(int(port), lambda found: "rank 1 lost at step" in found["sentence"], 20)
        assert (last["verdict"], hows(last)) == ("lost", ["ended", "lost"])
        written = call(
            "docker", "exec", f"{cluster.project}-live-1", "sh", "-c", "touch runs/x || echo no", check=False
        )
        assert "no" in written.stdout
    finally:
        cluster.compose("rm", "--stop", "--force", "live", variables={"LAB_LIVE_PORT": port})
