"""Real ranks that are killed, paused, stopped, and that raise: what every survivor says, how soon, and every exit
code."""

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cluster import watchdog as watches
from distlab.cluster.address import send, udp_socket
from distlab.cluster.failure_detector import FOLLOW_S
from distlab.cluster.heartbeat import SENT_TIMES, Verdict
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.message_signer import MessageSigner
from distlab.cluster.rendezvous_server import STRANGER_S, Claim, RendezvousServer, RendezvousSocket
from distlab.cluster.watchdog import Watchdog
from distlab.config import Config
from tests.cluster.cluster_of_processes import Processes, Rank
from tests.cluster.one_watch import KEY, TOKEN, met
from tests.labs import TINY

NAMED_WITHIN_S = 5.0
QUICK = 2 * 10 + 2  # wake-ups of the two periods in which a rank that leaves says so ten times as often, and both ends
BEAT_BYTES = 500  # of three ranks


def running(processes: Processes, world_size: int = 3, **how: Any) -> list[Rank]:
    ranks = processes.world(world_size, **how)
    for rank in ranks:
        rank.until("(?m)^step 3$")
    return ranks


def sentence(rank: Rank, pattern: str, since: float) -> str:
    """The one line that matches, which came within the bound."""
    found = [(at, line) for at, line in rank.lines if re.search(pattern, line)]
    assert len(found) == 1, rank.text
    assert found[0][0] - since < NAMED_WITHIN_S
    assert "Traceback" not in rank.text
    return found[0][1]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_survivors_alike(processes: Processes, victim: int) -> None:
    ranks = running(processes)
    ranks[victim].process.kill()
    killed_at = time.monotonic()
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    assert [rank.end() for rank in survivors] == [3, 3]
    said = {
        sentence(rank, rf"^rank {victim} lost at step \d+ in \w+: no heartbeat for \d\.\d s", killed_at)
        for rank in survivors
    }
    assert len(said) == 1
    assert all(f"lost [{victim}] survivors" in rank.text for rank in survivors)


def test_a_paused_rank_is_given_up_and_learns_it_when_it_wakes(processes: Processes) -> None:
    ranks = running(processes)
    ranks[1].process.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    assert [ranks[0].end(), ranks[2].end()] == [3, 3]
    assert len({sentence(rank, "^rank 1 lost at step", paused_at) for rank in (ranks[0], ranks[2])}) == 1
    ranks[1].process.send_signal(signal.SIGCONT)
    assert ranks[1].end() == 3
    assert "rank 1 was declared dead by the other ranks: rank 1 lost" in ranks[1].text


def test_a_short_pause_is_forgiven(processes: Processes) -> None:
    ranks = running(processes, 2, steps=60)
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    ranks[1].process.send_signal(signal.SIGCONT)
    assert [rank.end() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_stopped_rank_ends_within_a_second_and_is_named(
    processes: Processes, number: signal.Signals, code: int
) -> None:
    ranks = running(processes)
    stopped_at = time.monotonic()
    ranks[2].process.send_signal(number)
    assert ranks[2].end() == code
    assert ranks[2].ended_at - stopped_at < 1.0
    assert [rank.end() for rank in ranks[:2]] == [3, 3]
    assert len({sentence(rank, f"^rank 2 was stopped by {number.name} at step", stopped_at) for rank in ranks}) == 1


def test_sigterm_ends_a_rank_whose_main_thread_is_blocked_in_a_collective(processes: Processes) -> None:
    ranks = [processes.rank(0, 2), processes.rank(1, 2, deed="sleep")]
    ranks[0].until(r"waiting for [3-5]\.\d s .* in all_reduce")
    stopped_at = time.monotonic()
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].end() == 143
    assert ranks[0].ended_at - stopped_at < 1.0


def test_all_stopped_at_once_all_end_by_their_own_signal(processes: Processes) -> None:
    ranks = running(processes)
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert [rank.end() for rank in ranks] == [143, 143, 143]


def test_of_a_broken_link_all_name_the_higher_end_and_both_ends(processes: Processes) -> None:
    ranks = [processes.rank(0, 3), processes.rank(1, 3, deed="cut2"), processes.rank(2, 3, deed="cut1")]
    assert [rank.end() for rank in ranks] == [3, 3, 3]
    words = "rank 2 lost at step \\d+ in \\w+: rank 1 and rank 2 lost heartbeats from each other"
    assert len({sentence(rank, f"^{words}", 1e9) for rank in ranks[:2]}) == 1
    assert re.search(f"rank 2 was declared dead by the other ranks: {words}", ranks[2].text)


def test_of_two_that_lose_each_other_each_names_the_other_and_none_goes_on(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, deed="cut1"), processes.rank(1, 2, deed="cut0")]
    assert [rank.end() for rank in ranks] == [3, 3]
    assert "rank 1 lost at step" in ranks[0].text
    assert "rank 0 lost at step" in ranks[1].text


def test_a_rank_that_raises_is_named_with_its_error(processes: Processes) -> None:
    ranks = [processes.rank(0, 3, deed="raise"), processes.rank(1, 3), processes.rank(2, 3)]
    assert [rank.end() for rank in ranks] == [1, 3, 3]
    assert (
        len(
            {
                sentence(rank, "^rank 0 failed at step 2 in compute: ValueError: a made-up failure$", 1e9)
                for rank in ranks
            }
        )
        == 1
    )


def test_a_rank_that_raises_and_freezes_still_names_the_dead_one(processes: Processes, tmp_path: Path) -> None:
    """Its peer's death closes connections, so it raises; frozen meanwhile, as on a machine with too much to do, it
    counts the silence anew, and waits for as long again."""
    ranks = processes.watches(2, tmp_path)
    ranks[1].until("watches")
    time.sleep(1.0)
    ranks[0].process.kill()
    ranks[1].tell("raise")
    time.sleep(1.0)
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    ranks[1].process.send_signal(signal.SIGCONT)
    assert ranks[1].end() == 3
    assert "verdict 3 lost [0]" in ranks[1].text


def test_a_slow_rank_is_named_and_nothing_ends(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, steps=5), processes.rank(1, 2, steps=5, deed="sleep")]
    assert [rank.end() for rank in ranks] == [0, 0]
    assert re.search(
        r"waiting for [3-5]\.\d s at step 2 in all_reduce for rank 1 \(at step 2 in compute for [2-6]\.\d s\)",
        ranks[0].text,
    )
    assert "waiting for rank 0" not in ranks[1].text.partition("joined")[2]
    for rank, phase in zip(ranks, ("all_reduce", "compute"), strict=True):
        assert re.search(f"(?m)^heard of .*{phase}", rank.text), "whoever asks hears each period where the rank is"


def test_ranks_may_leave_at_different_times_and_the_watch_is_cheap(processes: Processes, tmp_path: Path) -> None:
    ranks = processes.watches(3, tmp_path)
    for rank in (ranks[0], ranks[2]):
        rank.tell("finish")
    time.sleep(3.0)  # longer than the silence of a lost rank
    ranks[1].tell("finish")
    assert [rank.end() for rank in ranks] == [0, 0, 0]
    assert ranks[2].ended_at <= ranks[1].ended_at
    for rank in ranks:
        assert "lost" not in rank.text
        told = re.search(r"woke (\d+) times in (\S+) s and sent (\d+) B", rank.text)
        assert told is not None, rank.text
        woken, seconds, sent_bytes = int(told[1]), float(told[2]), int(told[3])
        # What it costs, whatever else the machine does: a period of beats to two others, quick ones at the end.
        assert woken <= seconds / PERIOD_S + QUICK
        assert sent_bytes <= 2 * BEAT_BYTES * (woken + SENT_TIMES)


def test_a_rank_alone_ends_at_once(processes: Processes) -> None:
    assert processes.rank(0, 1, steps=3).end() == 0


@pytest.mark.parametrize(("silent", "times"), [(set(), 1), ({1}, 2)])
def test_who_meets_an_error_beside_a_silent_rank_waits_longer_for_the_verdict(silent: set[int], times: int) -> None:
    watch: Any = object.__new__(Watchdog)
    watch.config, watch._judging = SimpleNamespace(lost_after_s=0.1), SimpleNamespace(settle_s=0.1)
    watch.hearing, watch._forgiven_at = SimpleNamespace(silent=lambda now: silent), 0.0
    began, takes_s = time.monotonic(), 0.2 + FOLLOW_S + 2 * PERIOD_S
    watch._wait_for_a_verdict()
    assert times * takes_s <= time.monotonic() - began < (times + 0.9) * takes_s


CONFIG = Config(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")  # type: ignore[call-arg]
HOST, MEMBER = [Claim(rank, 2, "dp", "v1", uid=f"uid{rank}") for rank in (0, 1)]


class Started:
    """A watch of rank 0 whose end is noted, the desk it serves, and rank 1's socket."""

    def __init__(self) -> None:
        self.own, self.of_member, at_desk = [udp_socket(socket.AF_INET, "127.0.0.1") for _ in range(3)]
        self.board = RendezvousServer(HOST, "127.0.0.1", self.own.getsockname()[1], "dp-1", window_s=60.0)
        ip, port = self.of_member.getsockname()
        self.board.answer(MEMBER, ip, port, 0.0)
        self.board.seal(TOKEN.hex(), 29501, 0.0)
        cluster = met(CONFIG, self.own, [self.own.getsockname()[1], port])
        self.desk = cluster.desk = RendezvousSocket(self.board, at_desk, KEY, cluster.dropped)
        self.watch = Watchdog(cluster, CONFIG, print, lambda *_: None)
        self.ended, self.verdict = threading.Event(), Verdict(0, "")
        self.watch._departure.leave = self._leave  # type: ignore[assignment, method-assign]

    def _leave(self, verdict: Verdict, _survivors: list[int]) -> None:
        """In place of the end of this process: that of the thread."""
        self.verdict = verdict
        self.ended.set()
        self.watch._ended.set()

    def close(self) -> None:
        self.watch._signals.close()
        for one in (self.own, self.of_member, self.desk.udp):
            one.close()


@pytest.fixture
def refused() -> Iterator[Started]:
    """The watch runs, and a stranger of another WORLD_SIZE has come after the seal."""
    one = Started()
    for now in (0.1, STRANGER_S + 0.2):
        one.board.answer(replace(HOST, rank=2, world_size=3, uid="stranger"), "127.0.0.1", 9, now)
    one.watch.start()
    yield one
    if not one.ended.is_set():
        one.watch.finish()
    one.close()


def beat(refused: Started) -> None:
    message: dict[str, Any] = {
        "kind": "beat", "rank": 1, "turn": 0, "calls": 0, "step": 0, "phase": "start", "in_phase_s": 0.0, "memory": None,
        "accepted": 0, "bound": 0, "ended": 0, "left": 0, "counts": [0, 1], "hears": [[3, [1]]],
    }  # fmt: skip
    send(refused.of_member, MessageSigner(KEY).seal(message, TOKEN), refused.own.getsockname())


def question(refused: Started) -> None:
    knock = {"kind": "claim", "claim": asdict(MEMBER), "knows": 0}
    send(refused.of_member, MessageSigner(KEY).seal(knock, refused.desk._seal.sender), refused.desk.udp.getsockname())


@pytest.mark.parametrize("sign", [beat, question])
def test_rank_0_stays_for_a_member_on_its_way_in(refused: Started, sign: Any) -> None:
    assert not refused.ended.wait(4 * PERIOD_S)
    sign(refused)
    assert refused.ended.wait(8 * PERIOD_S)
    assert refused.verdict.exit_code == 3
    assert refused.verdict.sentence.startswith("WORLD_SIZE=3 on rank 2")


def test_rank_0_waits_for_no_member_for_ever(monkeypatch: pytest.MonkeyPatch, refused: Started) -> None:
    monkeypatch.setattr(watches, "LINGER_S", 2 * PERIOD_S)
    assert refused.ended.wait(8 * PERIOD_S)


def test_a_rank_whose_gpu_hangs_ends_though_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "RAISES_S", 2 * PERIOD_S)
    one = Started()
    one.watch.gave_up = lambda: True
    one.watch.start()
    assert one.ended.wait(8 * PERIOD_S)
    one.close()
    assert one.verdict.exit_code == 1
    assert "LAB_COLLECTIVE_TIMEOUT_S=300: NCCL gave it up, and this rank's GPU hangs" in one.verdict.sentence


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
from distlab.cluster.heartbeat import Verdict
signals = Signals()
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
