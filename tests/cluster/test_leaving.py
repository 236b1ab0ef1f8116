"""A rank that is killed or paused where the others go on without it: they pass, and say which rank left when."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.cluster_of_processes import Processes, Rank
from tests.labs import TINY

SERVER = TINY | {"RUN_MODE": "server", "LAB_STEPS": "100", "LAB_MODEL": "mlp"}
DIES_AT_STEP = 20


ELASTIC = TINY | {"RUN_MODE": "elastic", "LAB_STEPS": "100", "LAB_MODEL": "mlp", "LAB_LOSSES": "0"}


def started(
    processes: Processes, folder: Path, variant: str, dies: int, by: str = "SIGKILL", mode: dict[str, str] = SERVER
) -> list[Rank]:
    """Three real ranks, of which one kills or stops itself in the middle of a variant that goes on without it."""
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.port), "LAB_RUN_ID": "run"}
    common = mode | where | {"LAB_RUNS_DIR": str(folder), "LAB_VARIANT": variant}
    deadly = ["tests.cluster.dying_rank", variant, str(DIES_AT_STEP), by]
    modules = [deadly if rank == dies else ["workers"] for rank in range(3)]
    return [
        processes.run([sys.executable, "-m", *module], common | {"RANK": str(rank)})
        for rank, module in enumerate(modules)
    ]


def test_the_others_go_on_without_a_worker_that_is_killed(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "downpour", dies=2)
    assert [rank.end() for rank in ranks] == [0, 0, 137], ranks[0].text
    words = r"^rank 2 lost at step \d+ in downpour: no heartbeat for \d\.\d s; the remaining ranks continue$"
    said = [re.findall(words, rank.text, re.MULTILINE) for rank in ranks[:2]]
    assert len(said[0]) == 1 and said[0] == said[1], ranks[0].text + ranks[1].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (lost,) = run["lost"]
    assert (run["verdict"], run["errors"], lost["rank"]) == ("pass", [], 2)
    assert lost["step"] == DIES_AT_STEP and lost["reason"].endswith("; the remaining ranks continued")
    assert all(check["passed"] for check in run["checks"])
    held = {"updates", "final weights"}
    assert held <= {check["name"] for check in run["checks"]}, "without it the others are held to what was applied"
    assert "without rank 2" in ranks[0].lines[-1][1]
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"rank 2 lost at step {lost['step']}" in report


def test_the_loss_of_the_server_ends_all(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "ssp", dies=0)
    assert [rank.end() for rank in ranks] == [137, 3, 3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verdict"] == "lost"
    for survivor in ranks[1:]:
        named_at = next(at for at, line in survivor.lines if "rank 0 lost" in line)
        assert survivor.ended_at - named_at < 8, "however busy the machine is"


DIES_BEFORE_RECORDS = """
import os, signal, sys
from distlab.cli.run import main
from distlab.rank import preflight
preflight.find_separate_disks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


def test_a_loss_before_any_record_was_written_leaves_a_verdict_too(processes: Processes, tmp_path: Path) -> None:
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.port), "LAB_RUN_ID": "run"}
    common = TINY | {"RUN_MODE": "dp", "LAB_RUNS_DIR": str(tmp_path)} | where
    commands = [["-m", "workers"], ["-c", DIES_BEFORE_RECORDS], ["-m", "workers"]]
    ranks = [
        processes.run([sys.executable, *command], common | {"RANK": str(rank)}) for rank, command in enumerate(commands)
    ]
    assert [rank.end() for rank in ranks] == [3, 137, 3], ranks[0].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["verdict"], [lost["rank"] for lost in run["lost"]]) == ("lost", [1])
    assert (run["run_mode"], run["world_size"], run["unseen"]) == ("dp", 3, [{"rank": 1, "host": None}])


WAKES_ITSELF = """
import time
from distlab.cluster.shutdown import Departure
from distlab.cluster.shutdown import Signals
from distlab.cluster.lost_ranks import Verdict
signals = Signals()
signals.open()
def write(verdict, succession):
    signals.wake()
    time.sleep(0.5)
    print("written", flush=True)
Departure(signals, print, write).leave(Verdict(3, "rank 1 lost"), object())
"""


def test_a_wake_does_not_cut_short_what_a_rank_writes(processes: Processes) -> None:
    rank = processes.run([sys.executable, "-c", WAKES_ITSELF], {})
    assert rank.end() == 3
    assert [line for _, line in rank.lines] == ["rank 1 lost", "written"]


@pytest.mark.parametrize(
    ("mode", "variant"), [(SERVER, "downpour"), (ELASTIC, "peer_memory")], ids=["server", "elastic"]
)
def test_who_was_declared_dead_and_wakes_while_the_report_is_drawn_changes_nothing(
    processes: Processes, tmp_path: Path, mode: dict[str, str], variant: str
) -> None:
    ranks = started(processes, tmp_path, variant, dies=2, by="SIGSTOP", mode=mode)
    deadline = time.monotonic() + 90
    while not list((tmp_path / "run").glob(".ready.*")):
        assert time.monotonic() < deadline, ranks[0].text
        time.sleep(0.01)
    ranks[2].process.send_signal(signal.SIGCONT)
    assert [rank.end() for rank in ranks] == [0, 0, 3], ranks[0].text
    assert "rank 2 was declared dead by the other ranks" in ranks[2].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["verdict"], [lost["rank"] for lost in run["lost"]]) == ("pass", [2])
    assert (tmp_path / "run" / "report.html").exists()
    assert not list((tmp_path / "run").glob(".ready.*")) + list((tmp_path / "run").glob(".report.*"))
