"""The mechanism of each fault: files, links and processes."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distlab.lab.rank import fault_injection
from distlab.lab.report.records import Said
from distlab.lab.report.run_folder import Journal, Unwritable


def test_a_journal_reports_a_full_disk(tmp_path: Path) -> None:
    journal = Journal()
    assert journal.open_files == []
    journal.open(tmp_path, 0)
    journal.write(Said("a", "before"))
    fault_injection.fill(journal.open_files)
    with pytest.raises(Unwritable, match=r"cannot be written any more \(No space left on device\)"):
        journal.say("after")
    with pytest.raises(Unwritable):
        journal.write(Said("a", "after"))
    assert "before" in (tmp_path / "rank0.jsonl").read_text()
    assert "after" not in (tmp_path / "rank0.jsonl").read_text()


WAIT_S = 0.3
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connected() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(WAIT_S)
            near.settimeout(WAIT_S)
            yield near, far


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Replace this process's connections by these, without those of the pool of ranks."""
    found: list[socket.socket] = []
    monkeypatch.setattr(fault_injection, "_connections_to_others", lambda: iter(found))
    return found


def test_the_connections_to_other_processes_are_found(connected: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen(
            [sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()}).recv(1)"]
        )
        link, _ = server.accept()
        with link:
            found = {
                each.getsockname()
                for each in fault_injection._connections_to_others()
                if each.getpeername() == link.getpeername()
            }
            own = {each.getsockname() for each in fault_injection._connections_to_others()} & {
                each.getsockname() for each in connected
            }
            assert (found, own) == ({link.getsockname()}, set()), "this process has both ends of the other one"
        assert other.wait(30) == 0


def test_a_slow_link_limits_the_rate(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(near)
    fault_injection.set_pace(1_000_000)
    near.settimeout(30)
    far.settimeout(30)
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(1_500_000),))
    sender.start()
    left = 1_500_000
    while left:
        left -= len(far.recv(1 << 20))
    sender.join()
    assert (
        time.monotonic() - began > 0.7
    )  # 1.5 s at that rate, less TCP's first bytes; without a limit some milliseconds


CONTEXT = multiprocessing.get_context("fork")


def in_child(act: Callable[[], None]) -> tuple[int | None, float]:
    """Return the exit code of a child process that calls `act`, and its seconds."""
    began = time.monotonic()
    child = CONTEXT.Process(target=act)
    child.start()
    child.join(30)
    return child.exitcode, time.monotonic() - began


def paused() -> None:
    fault_injection.pause(0.5)
    os._exit(7)


def slowed() -> None:
    """Compute for 0.3 s, with a tenth of the core."""
    fault_injection.slow_down(0.1)
    while time.process_time() < 0.3:
        pass
    os._exit(7)


def test_a_pause_ends_by_itself() -> None:
    code, took_s = in_child(paused)
    assert code == 7
    assert took_s > 0.45


def test_a_slow_process_takes_longer() -> None:
    code, took_s = in_child(slowed)
    assert code == 7
    assert took_s > 0.9
