"""compose/net.yaml in real containers: the link has the requested speed, and ranks do not keep the capability."""

import re

import pytest

from tests.compose.containers import TINY, TOP, Containers, call

pytestmark = pytest.mark.compose

SLOW = {"LAB_NET_RATE": "100mbit", "LAB_NET_DELAY": "5ms"}
NET_ADMIN = 1 << 12
# The name and capabilities of every program in the container.
STATUS = (
    "for p in /proc/[0-9]*/status; do sed -n 's/^Name:[[:space:]]*//p; s/^CapPrm:[[:space:]]*//p' $p | paste -sd' ' -;"
    " done"
)


def test_a_run_prints_the_requested_and_measured_link(cluster: Containers) -> None:
    cluster.overlay = TOP / "compose" / "net.yaml"
    cluster.up(2, RUN_MODE="dp", LAB_VARIANT="flat", **TINY, **SLOW)
    cluster.wait_for_line(0, "rank 0 of 2")
    programs = [
        line.split() for line in call("docker", "exec", cluster.name(0), "sh", "-c", STATUS).stdout.splitlines()
    ]
    has_net_admin = [
        int(capabilities, 16) & NET_ADMIN for name, capabilities in programs if name in ("python", "entrypoint.sh")
    ]
    assert has_net_admin == [0, 0]  # the entry point, and the rank
    # init is root and keeps its capabilities.
    assert any(int(capabilities, 16) & NET_ADMIN for _, capabilities in programs)
    assert set(cluster.wait().values()) == {0}, cluster.logs()
    run, log = cluster.verdict(), cluster.log(0)
    assert run["verdict"] == "pass"
    assert "LAB_NET_RATE=100mbit and LAB_NET_DELAY=5ms requested; measured" in " ".join(log.split())
    assert re.search(
        r"rerun +.* COMPOSE_FILE=docker-compose.yaml:compose/net.yaml docker compose up$", log, re.MULTILINE
    )
    compared = {entry["name"]: entry for entry in run["comparisons"]}
    assert compared["link rate"]["predicted"] == 1e8
    # 6 % on an idle machine: benchmarks/link.py
    assert compared["link rate"]["measured"] == pytest.approx(1e8, rel=0.2)
    assert compared["link round trip"]["predicted"] == 0.01
    words = " ".join(log.split())  # unwrapped
    if "this kernel has no netem, so LAB_NET_DELAY=5ms delays nothing here" in words:
        assert compared["link round trip"]["measured"] < 0.01
    else:
        assert 0.01 <= compared["link round trip"]["measured"] < 0.03
    assert re.search(r"ms per step .* flat \d", words)


def test_a_slow_link_without_the_overlay_is_refused_with_the_command(cluster: Containers) -> None:
    done = cluster.run_alone("worker0", WORLD_SIZE="2", **SLOW)
    assert done.returncode == 2, done.stdout
    assert "LAB_NET_RATE=100mbit and LAB_NET_DELAY=5ms: this rank's link was not shaped" in done.stdout
    assert "docker compose -f docker-compose.yaml -f compose/net.yaml up" in done.stdout
    assert "Traceback" not in done.stdout
    assert list(cluster.runs.iterdir()) == []
