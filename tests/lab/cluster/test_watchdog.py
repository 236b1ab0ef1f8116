"""Real ranks that are killed, paused or stopped, or raise: the sentence of each survivor, its time, and all exit codes."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.lab.cluster import watchdog as watches
from distlab.lab.cluster.rank_server import PERIOD_S
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config
from tests.lab.cluster.cluster_of_processes import Processes, Rank
from tests.labs import TINY

NAMED_WITHIN_S = 2.0  # of a death; the median is under 1 s
LOST_AFTER_S = 2.5


def running(processes: Processes, world_size: int = 3, **options: Any) -> list[Rank]:
    ranks = processes.world(world_size, **options)
    for rank in ranks:
        rank.until("(?m)^step 3$")
    return ranks


def sentence(rank: Rank, pattern: str, since: float, within_s: float = NAMED_WITHIN_S) -> str:
    """Return the one line that matches, printed within the time limit."""
    found = [(at, line) for at, line in rank.lines if re.search(pattern, line)]
    assert len(found) == 1, rank.text
    assert found[0][0] - since < within_s, rank.text
    assert "Traceback" not in rank.text
    return found[0][1]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_in_one_sentence_by_all_survivors(processes: Processes, victim: int) -> None:
    ranks = running(processes)
    ranks[victim].process.kill()
    killed_at = time.monotonic()
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    assert [rank.end() for rank in survivors] == [3, 3]
    words = rf"^rank {victim} lost at step \d+ in \w+: its connection ended$"
    assert len({sentence(rank, words, killed_at) for rank in survivors}) == 1
    assert all(f"lost [{victim}] survivors" in rank.text for rank in survivors)


def test_two_ranks_killed_at_once_are_named_in_one_sentence(processes: Processes) -> None:
    ranks = running(processes, 4)
    for victim in (3, 1):
        ranks[victim].process.kill()
    assert [ranks[0].end(), ranks[2].end()] == [3, 3]
    words = r"^rank 1 lost at step \d+ in \w+: its connection ended; rank 3 lost at step"
    assert len({sentence(rank, words, 1e9) for rank in (ranks[0], ranks[2])}) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_paused_rank_is_declared_dead_and_reports_that_when_it_wakes(processes: Processes, victim: int) -> None:
    """Also rank 0, which then reads the verdict of the others."""
    ranks = running(processes)
    ranks[victim].process.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    assert [rank.end() for rank in survivors] == [3, 3]
    words = rf"^rank {victim} lost at step \d+ in \w+: no heartbeat for [\d.]+ s"
    for rank in survivors:
        sentence(rank, words, paused_at, LOST_AFTER_S + NAMED_WITHIN_S)
    ranks[victim].process.send_signal(signal.SIGCONT)
    assert ranks[victim].end() == 3
    assert f"rank {victim} was declared dead by the other ranks: rank {victim} lost" in ranks[victim].text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_short_pause_ends_no_rank(processes: Processes, victim: int) -> None:
    ranks = running(processes, 2, steps=60)
    ranks[victim].process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    ranks[victim].process.send_signal(signal.SIGCONT)
    assert [rank.end() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("number", "code", "victim"), [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 2), (signal.SIGHUP, 143, 0)]
)
def test_a_stopped_rank_ends_within_a_second_and_is_named(
    processes: Processes, number: signal.Signals, code: int, victim: int
) -> None:
    ranks = running(processes)
    stopped_at = time.monotonic()
    ranks[victim].process.send_signal(number)
    assert ranks[victim].end() == code
    assert ranks[victim].ended_at - stopped_at < 1.0
    assert [rank.end() for rank in ranks if rank is not ranks[victim]] == [3, 3]
    words = f"^rank {victim} was stopped by {number.name} at step"
    assert len({sentence(rank, words, stopped_at, 3.0) for rank in ranks}) == 1


def test_sigterm_ends_a_rank_whose_main_thread_is_blocked_in_a_collective(processes: Processes) -> None:
    ranks = [processes.rank(0, 2), processes.rank(1, 2, action="sleep")]
    ranks[0].until(r"waiting for [3-5]\.\d s .* in all_reduce")
    stopped_at = time.monotonic()
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].end() == 143
    assert ranks[0].ended_at - stopped_at < 1.0


def test_ranks_stopped_at_once_all_end_by_their_own_signal(processes: Processes) -> None:
    ranks = running(processes)
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert [rank.end() for rank in ranks] == [143, 143, 143]


def test_a_rank_that_receives_nothing_from_the_server_is_partitioned(processes: Processes) -> None:
    ranks = [processes.rank(rank, 3, action="deaf" if rank == 2 else "") for rank in range(3)]
    assert [rank.end() for rank in ranks] == [3, 3, 3]
    words = (
        r"^rank 2 is partitioned from the cluster at step \d+ in \w+: no heartbeat from rank 0, though both are alive"
    )
    assert len({sentence(rank, words, 1e9) for rank in ranks[:2]}) == 1
    assert "rank 0 lost at step" in ranks[2].text, "it knows no more than that"


def test_a_server_without_a_core_is_not_the_death_of_rank_0(processes: Processes) -> None:
    rank = processes.rank(0, 1, steps=60, action="stall", LAB_LOST_AFTER_S="1")
    assert rank.end() == 0, rank.text


def test_a_rank_that_raises_is_named_with_its_error(processes: Processes) -> None:
    ranks = [processes.rank(0, 3, action="raise"), processes.rank(1, 3), processes.rank(2, 3)]
    assert [rank.end() for rank in ranks] == [1, 3, 3]
    words = "^rank 0 failed at step 2 in compute: ValueError: a made-up failure$"
    assert len({sentence(rank, words, 1e9) for rank in ranks}) == 1


def test_a_slow_rank_is_named_and_nothing_ends(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, steps=5), processes.rank(1, 2, steps=5, action="sleep")]
    assert [rank.end() for rank in ranks] == [0, 0]
    assert re.search(
        r"waiting for [3-5]\.\d s at step 2 in all_reduce for rank 1 \(at step 2 in compute for [2-6]\.\d s\)",
        ranks[0].text,
    )
    assert "waiting for rank 0" not in ranks[1].text.partition("joined")[2]
    for rank, phase in zip(ranks, ("all_reduce", "compute"), strict=True):
        assert re.search(f"(?m)^phases .*{phase}", rank.text), "on_period gets the phase of each period"
        woken, seconds = re.findall(r"woke (\d+) times in (\S+) s", rank.text)[0]
        assert int(woken) <= float(seconds) / PERIOD_S + 2, "the watch is cheap"


def test_ranks_may_leave_at_different_times(processes: Processes) -> None:
    ranks = [processes.rank(rank, 3, steps=3, action="leave_late" if rank == 1 else "") for rank in range(3)]
    assert [rank.end() for rank in ranks] == [0, 0, 0]
    assert not any(" lost" in rank.text for rank in ranks)


def test_a_single_rank_ends_at_once(processes: Processes) -> None:
    assert processes.rank(0, 1, steps=3).end() == 0


# The verdict is final once rank 0 has written it, after all others have acknowledged it.


def ready(processes: Processes, **variables: str) -> list[Rank]:
    ranks = [processes.rank(rank, 3, steps=2, action="agree", **variables) for rank in range(3)]
    for rank in ranks:
        rank.until("ready")
    return ranks


def test_all_ranks_return_once_the_verdict_is_written(processes: Processes) -> None:
    ranks = ready(processes)
    for rank in ranks[:2]:
        rank.write("now")
    time.sleep(0.5)
    assert not any(word in rank.text for rank in ranks for word in ("published", "agreed")), "rank 2 has not yet"
    ranks[2].write("now")
    for rank in ranks:
        rank.until("agreed")
    assert "published" in ranks[0].text
    for rank in ranks:
        rank.write("end")
    assert [rank.end() for rank in ranks] == [0, 0, 0]


def test_a_rank_killed_after_its_acknowledgement_changes_nothing(processes: Processes) -> None:
    ranks = ready(processes)
    for rank in ranks[1:]:
        rank.write("now")
    time.sleep(0.5)
    ranks[0].write("now")
    ranks[0].until("published")
    ranks[2].process.kill()
    for rank in ranks[:2]:
        rank.until("agreed")
        rank.write("end")
    assert [rank.end() for rank in ranks[:2]] == [0, 0]


def test_the_verdict_is_open_if_rank_0_is_lost_after_acknowledgements(processes: Processes) -> None:
    ranks = ready(processes)
    for rank in ranks[1:]:
        rank.write("now")
    time.sleep(0.5)
    ranks[0].process.kill()
    assert [rank.end() for rank in ranks[1:]] == [3, 3]
    words = (
        r"^rank 0 lost at step .*, after this rank had acknowledged the verdict: run.json shows whether it is final$"
    )
    assert len({sentence(rank, words, 1e9) for rank in ranks[1:]}) == 1


def test_a_rank_that_never_acknowledges_is_named(processes: Processes) -> None:
    ranks = ready(processes, LAB_COLLECTIVE_TIMEOUT_S="2")
    for rank in ranks[:2]:
        rank.write("now")
    assert ranks[0].end() == 1
    assert "timed out waiting for rank 2 at the verdict after 2 s" in ranks[0].text


def test_a_rank_whose_gpu_hangs_ends_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "RAISES_S", 2 * PERIOD_S)
    ended: list[Any] = []
    watch: Any = object.__new__(Watchdog)
    watch.nccl_aborted, watch._failed_at, watch.others = (lambda: True), None, {}
    watch.config, watch.cluster = Config.read({"RANK": "0", "MASTER_ADDR": "a"}), SimpleNamespace(rank=0)
    watch.main = SimpleNamespace(here=lambda: SimpleNamespace(step=4, turn=0, calls=0, __str__=lambda _: ""))
    watch._end = lambda *verdicts: ended.extend(verdicts)
    watch._judge_device()
    assert not ended
    time.sleep(2 * PERIOD_S)
    watch._judge_device()
    assert ended[0].exit_code == 1
    assert "LAB_COLLECTIVE_TIMEOUT_S=300: NCCL aborted it, and this rank's GPU hangs" in ended[0].sentence


SERVER = TINY | {"RUN_MODE": "server", "LAB_STEPS": "100", "LAB_MODEL": "mlp"}
DIES_AT_STEP = 20


ELASTIC = TINY | {"RUN_MODE": "elastic", "LAB_STEPS": "100", "LAB_MODEL": "mlp", "LAB_LOSSES": "0"}


def started(
    processes: Processes, folder: Path, variant: str, dies: int, by: str = "SIGKILL", mode: dict[str, str] = SERVER
) -> list[Rank]:
    """Start three real ranks, of which one kills or stops itself in a variant that continues without it."""
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.port), "LAB_RUN_ID": "run"}
    common = mode | where | {"LAB_RUNS_DIR": str(folder), "LAB_VARIANT": variant}
    deadly = ["tests.lab.cluster.dying_rank", variant, str(DIES_AT_STEP), by]
    modules = [deadly if rank == dies else ["workers"] for rank in range(3)]
    return [
        processes.run([sys.executable, "-m", *module], common | {"RANK": str(rank)})
        for rank, module in enumerate(modules)
    ]


def test_the_others_continue_without_a_killed_worker(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "downpour", dies=2)
    assert [rank.end() for rank in ranks] == [0, 0, 137], ranks[0].text
    words = r"^rank 2 lost at step \d+ in downpour: its connection ended; the remaining ranks continue$"
    printed = [re.findall(words, rank.text, re.MULTILINE) for rank in ranks[:2]]
    assert len(printed[0]) == 1 and printed[0] == printed[1], ranks[0].text + ranks[1].text
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (lost,) = run["lost"]
    assert (run["verdict"], run["errors"], lost["rank"]) == ("pass", [], 2)
    assert lost["step"] == DIES_AT_STEP and lost["reason"].endswith("; the remaining ranks continued")
    assert all(check["passed"] for check in run["checks"])
    kept = {"updates", "final weights"}
    assert kept <= {check["name"] for check in run["checks"]}, "the others are compared with the applied updates"
    assert any("PASS" in line and "without rank 2" in line for _, line in ranks[0].lines)
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"rank 2 lost at step {lost['step']}" in report


def test_the_loss_of_the_server_ends_all(processes: Processes, tmp_path: Path) -> None:
    ranks = started(processes, tmp_path, "downpour", dies=0)
    assert [rank.end() for rank in ranks] == [137, 3, 3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verdict"] == "lost"
    for survivor in ranks[1:]:
        named_at = next(at for at, line in survivor.lines if "rank 0 lost" in line)
        assert survivor.ended_at - named_at < 8, "however busy the machine is"


DIES_BEFORE_RECORDS = """
import os, signal, sys
from distlab.cli.run import main
from distlab.lab.rank import preflight
preflight.find_separate_disks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


def test_a_loss_before_the_first_record_has_a_verdict_too(processes: Processes, tmp_path: Path) -> None:
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
from distlab.lab.cluster.departure import Departure, Signals
from distlab.lab.cluster.messages import Verdict
signals = Signals()
def write(verdict, succession):
    signals.wake()
    time.sleep(0.5)
    print("written", flush=True)
Departure(signals, print, write).leave(Verdict(3, "rank 1 lost"), object())
"""


def test_a_wake_does_not_shorten_the_time_to_write_records(processes: Processes) -> None:
    rank = processes.run([sys.executable, "-c", WAKES_ITSELF], {})
    assert rank.end() == 3
    assert [line for _, line in rank.lines] == ["rank 1 lost", "written"]


@pytest.mark.parametrize(("mode", "variant"), [(SERVER, "downpour"), (ELASTIC, "join")], ids=["server", "elastic"])
def test_a_rank_declared_dead_that_wakes_changes_nothing(
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
