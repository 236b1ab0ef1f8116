"""The processes beside a rank: when one speaks for a rank that cannot, when it keeps silent, what is said for a rank that the
kernel has killed, and that none outlives its rank."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.cluster.address import receive, udp_socket
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier
from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.heartbeat_helper import (
    LATE_S,
    PERIOD_S,
    again,
    leave_last_words,
    runs,
    say_last_words,
    start_heartbeat_helper,
)
from tests.cluster.cluster_of_processes import Processes, Rank
from tests.cluster.one_watch import KEY, TOKEN


def beat(now: float = 1.0) -> dict[str, Any]:
    return Hearing(0, range(2), 2.5, now).beat(RunPosition(3, 7, "flat", now - 0.5), None, now)


class Standing:
    """`stand_in` on a thread, for this process; what it sends arrives at `heard`."""

    def __init__(self) -> None:
        self.notes, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard, self.post = udp_socket(socket.AF_INET, "127.0.0.1"), udp_socket(socket.AF_INET, "127.0.0.1")
        self.heard.settimeout(20 * PERIOD_S)
        self.thread = threading.Thread(target=start_heartbeat_helper, args=(os.getpid(), there, self.post), daemon=True)
        self.thread.start()
        self.notes.send(json.dumps([KEY.hex(), TOKEN.hex()]).encode())
        self.opener = MessageVerifier(KEY, TOKEN, Dropped(print))

    def note(self, message: dict[str, Any]) -> None:
        self.notes.send(json.dumps([message, [self.heard.getsockname()]]).encode())

    def hear(self) -> dict[str, Any]:
        opened = self.opener.open(self.heard.recv(65536), ("127.0.0.1", 1))
        assert opened is not None, "sealed for this run, and as a beat is written"
        return opened.message


@pytest.fixture
def standing() -> Iterator[Standing]:
    one = Standing()
    yield one
    for each in (one.notes, one.heard, one.post):
        each.close()
    one.thread.join(5)
    assert not one.thread.is_alive(), "it ends when its rank has closed the socket"


def test_a_late_rank_is_spoken_for_with_a_higher_count_each_time(standing: Standing) -> None:
    noted = beat(time.monotonic())
    standing.note(noted)
    first, second = standing.hear(), standing.hear()
    counts = [each["counts"][0] for each in (noted, first, second)]
    assert counts == sorted(set(counts))
    assert first["in_phase_s"] >= noted["in_phase_s"] + LATE_S - 0.01
    same = {"rank": 0, "turn": 3, "step": 7, "phase": "flat"}
    assert same.items() <= first.items() and same.items() <= second.items()


def test_before_the_first_beat_there_is_nothing_to_repeat(standing: Standing) -> None:
    standing.heard.settimeout(3 * PERIOD_S)
    with pytest.raises(TimeoutError):
        standing.hear()


def test_a_beat_is_counted_on_from_the_clock_of_both() -> None:
    made = beat(now=1.0)
    assert made["counts"][0] == 1000
    assert again(made, 0.5, 1.5)["counts"] == [1500, 0]
    assert made["counts"][0] == 1000, "the beat itself stays"


def test_a_stopped_process_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    assert runs(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not runs(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(child.pid), "a zombie"
    child.wait()
    assert not runs(child.pid)


def watching(processes: Processes, folder: Path) -> tuple[list[Rank], list[int]]:
    """Two ranks, and the process ids of their helpers."""
    ranks = processes.watches(2, folder)
    for rank in ranks:
        rank.until(r"watches \d+")
    return ranks, [int(rank.lines[1][1].split()[1]) for rank in ranks]


def test_a_call_that_keeps_the_lock_costs_nobody_and_without_the_helper_it_does(
    processes: Processes, tmp_path: Path
) -> None:
    ranks, helpers = watching(processes, tmp_path)
    ranks[1].tell("hold 4.5")
    ranks[1].until("did hold")
    assert all(rank.process.poll() is None and "lost" not in rank.text for rank in ranks)
    os.kill(helpers[1], signal.SIGKILL)
    ranks[1].tell("ready")
    ranks[1].until("did ready")
    time.sleep(1.0)
    assert all(rank.process.poll() is None for rank in ranks), "a dead helper is no dead rank"
    ranks[1].tell("hold 30")
    assert ranks[0].end() == 3
    assert "rank 1 lost" in ranks[0].text


def test_a_helper_ends_with_its_rank_however_that_ends(processes: Processes, tmp_path: Path) -> None:
    ranks, helpers = watching(processes, tmp_path)
    ranks[1].process.kill()
    assert ranks[0].end() == 3
    deadline = time.monotonic() + 5.0
    while any(Path(f"/proc/{helper}").exists() and runs(helper) for helper in helpers):
        assert time.monotonic() < deadline, helpers
        time.sleep(0.05)


def test_a_helper_is_small_and_knows_neither_torch_nor_the_lab(processes: Processes, tmp_path: Path) -> None:
    _, helpers = watching(processes, tmp_path)
    mapped = Path(f"/proc/{helpers[0]}/maps").read_text()
    assert "libpython" in mapped or "python" in mapped
    assert not any(word in mapped for word in ("torch", "numpy", "pydantic"))
    status = dict(line.split(":", 1) for line in Path(f"/proc/{helpers[0]}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 24 * 1024


def test_the_others_are_told_at_the_addresses_that_were_left(tmp_path: Path) -> None:
    place = tmp_path / "words"
    place.touch()
    with udp_socket(socket.AF_INET, "127.0.0.1") as other:
        leave_last_words(2, [b"one", b"two"], socket.AF_INET, [other.getsockname()], place)
        assert place.stat().st_mode & 0o077 == 0
        assert "rank 2 was killed by the OOM killer" in say_last_words(place)
        assert [datagram for datagram, _ in receive(other)] == [b"one", b"two"]


def test_nothing_is_left_where_nobody_would_read_it(tmp_path: Path) -> None:
    leave_last_words(2, [], socket.AF_INET, [], tmp_path / "words")
    assert list(tmp_path.iterdir()) == []
    assert "before it met the others" in say_last_words(tmp_path / "words")
