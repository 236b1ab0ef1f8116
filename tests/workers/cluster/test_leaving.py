"""A worker that is killed in the middle of an asynchronous variant: the others go on, pass, and say which rank left
when."""

import json
import re
import sys
import time
from pathlib import Path

from tests.labs import TINY
from tests.workers.cluster.cluster_of_processes import Processes, Rank

ENDLESS = TINY | {"RUN_MODE": "server", "LAB_PROOF": "0", "LAB_STEPS": "3000", "LAB_MODEL": "mlp"}


def started(processes: Processes, folder: Path, **variables: str) -> list[Rank]:
    """Three real ranks of RUN_MODE=server; returns once the asynchronous run has begun."""
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.port), "LAB_RUN_ID": "run"}
    common = ENDLESS | where | {"LAB_RUNS_DIR": str(folder)} | variables
    ranks = [processes.run([sys.executable, "-m", "workers"], common | {"RANK": str(rank)}) for rank in range(3)]
    ranks[0].until("in whatever order they come")
    time.sleep(0.5)
    return ranks


def test_the_others_go_on_without_a_worker_that_is_killed(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, LAB_VARIANT="downpour")
    ranks[2].process.kill()
    assert [rank.end() for rank in ranks] == [0, 0, 137], ranks[0].text
    words = r"^rank 2 lost at step \d+ in downpour: no heartbeat for \d\.\d s; the others go on$"
    said = [re.findall(words, rank.text, re.MULTILINE) for rank in ranks[:2]]
    assert len(said[0]) == 1 and said[0] == said[1], ranks[0].text + ranks[1].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (lost,) = run["lost"]
    assert (run["verdict"], run["errors"], lost["rank"]) == ("pass", [], 2)
    assert lost["step"] > 0 and lost["reason"].endswith("; the others went on")
    assert all(check["passed"] for check in run["checks"])
    assert {"updates", "final weights"} <= {check["name"] for check in run["checks"]}
    assert "without rank 2" in ranks[0].lines[-1][1]
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"rank 2 lost at step {lost['step']}" in report


def test_the_loss_of_the_server_ends_all(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, LAB_VARIANT="ssp")
    ranks[0].process.kill()
    assert [rank.end() for rank in ranks] == [137, 3, 3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verdict"] == "lost"
