"""A worker that is killed in the middle of an asynchronous variant: the others go on, pass, and say which rank left
when."""

import json
import re
import sys
from pathlib import Path

from tests.labs import TINY
from tests.workers.cluster.cluster_of_processes import Processes, Rank

SERVER = TINY | {"RUN_MODE": "server", "LAB_STEPS": "100", "LAB_MODEL": "mlp"}
DIES_AT_STEP = 20


def started(processes: Processes, folder: Path, variant: str, dies: int) -> list[Rank]:
    """Three real ranks of RUN_MODE=server, of which one kills itself in the middle of the asynchronous run."""
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.port), "LAB_RUN_ID": "run"}
    common = SERVER | where | {"LAB_RUNS_DIR": str(folder), "LAB_VARIANT": variant}
    deadly = ["tests.workers.cluster.dying_rank", variant, str(DIES_AT_STEP)]
    modules = [deadly if rank == dies else ["workers"] for rank in range(3)]
    return [
        processes.run([sys.executable, "-m", *module], common | {"RANK": str(rank)})
        for rank, module in enumerate(modules)
    ]


def test_the_others_go_on_without_a_worker_that_is_killed(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "downpour", dies=2)
    assert [rank.end() for rank in ranks] == [0, 0, 137], ranks[0].text
    words = r"^rank 2 lost at step \d+ in downpour: no heartbeat for \d\.\d s; the others go on$"
    said = [re.findall(words, rank.text, re.MULTILINE) for rank in ranks[:2]]
    assert len(said[0]) == 1 and said[0] == said[1], ranks[0].text + ranks[1].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (lost,) = run["lost"]
    assert (run["verdict"], run["errors"], lost["rank"]) == ("pass", [], 2)
    assert lost["step"] == DIES_AT_STEP and lost["reason"].endswith("; the others went on")
    assert all(check["passed"] for check in run["checks"])
    held = {"updates", "final weights", "samples of the run", "weights of the run", "gradients of the run"}
    assert held <= {check["name"] for check in run["checks"]}, "what was applied is computed again without it"
    assert "without rank 2" in ranks[0].lines[-1][1]
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"rank 2 lost at step {lost['step']}" in report


def test_the_loss_of_the_server_ends_all(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "ssp", dies=0)
    assert [rank.end() for rank in ranks] == [137, 3, 3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verdict"] == "lost"
