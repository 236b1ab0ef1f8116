"""Runs without Docker: 5 and 3 local ranks with uneven sizes, and two nodes of torchrun.

The two nodes are two agents on this machine.
"""

import json
import socket
from pathlib import Path

import pytest

from tests.launched import clean
from tests.warm import Warm

TINY = {"LAB_MODEL": "mlp", "LAB_WIDTH": "24", "LAB_DEPTH": "2", "LAB_STEPS": "3", "LAB_BATCH": "17"}
DEPTH = {"dp": "2", "pp": "4"}  # one of three stages has one more layer


def start(command: list[str], runs: Path, **settings: str) -> Warm:
    started = Warm(command[0], command[1:], clean(LAB_RUNS_DIR=str(runs)) | TINY | settings)
    started.stdin.close()
    return started


def ended(processes: list[Warm]) -> list[str]:
    """Return the output of each process, after all have ended with 0."""
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [process.stdout.read() for process in processes]
    assert codes == [0] * len(processes), outputs
    return outputs


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "world_size", "variants"),
    [
        ("dp", 5, {"bucketed"}),
        ("pp", 3, {"1f1b"}),
    ],
)
def test_local_ranks_prove_their_gradients(mode: str, world_size: int, variants: set[str], tmp_path: Path) -> None:
    chosen = ",".join(sorted(variants))
    settings = {"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_DEPTH": DEPTH[mode], "LAB_VARIANT": chosen}
    ended([start(["workers"], tmp_path, **settings)])
    run = json.loads((tmp_path / "latest" / "run.json").read_text())
    assert run["world_size"] == world_size
    proven = {check["variant"] for check in run["checks"] if check["name"] == "gradients" and check["passed"]}
    assert proven == variants


@pytest.mark.timeout(180)
def test_torchrun_works_across_nodes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "workers"]
    nodes = [
        start(["torch.distributed.run", f"--node-rank={node}", *meeting], tmp_path, LAB_VARIANT="flat")
        for node in range(2)
    ]
    assert "PASS" in ended(nodes)[0]
    assert json.loads((tmp_path / "latest" / "run.json").read_text())["world_size"] == 2
