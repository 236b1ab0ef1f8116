"""Each fault by its mechanism: files, links and processes."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distlab.lab import faults
from distlab.lab.report.records import Said
from distlab.lab.report.run_folder import Journal, Unwritable


def test_a_journal_meets_the_full_disk_in_its_own_sentence(tmp_path: Path) -> None:
    journal = Journal()
    assert journal.open_files == []
    journal.open(tmp_path, 0)
    journal.write(Said("a", "before"))
    faults.fill(journal.open_files)
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
    """The sockets that count as this process's, and not those of the pool of ranks."""
    found: list[socket.socket] = []
    monkeypatch.setattr(faults, "_own", lambda: iter(found))
    return found


def test_the_connections_to_other_processes_are_found(connected: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen(
            [sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()}).recv(1)"]
        )
        link, _ = server.accept()
        with link:
            found = {each.getsockname() for each in faults._own() if each.getpeername() == link.getpeername()}
            own = {each.getsockname() for each in faults._own()} & {each.getsockname() for each in connected}
            assert (found, own) == ({link.getsockname()}, set()), "both ends of the other one are here"
        assert other.wait(30) == 0


def test_what_comes_is_dropped_and_comes_again_once_the_cut_ends(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(far)
    whole = faults.hear_nobody()
    near.sendall(b"word")
    if whole:  # as root, or before Linux 6.15
        with pytest.raises(TimeoutError):
            far.recv(4)
    faults.hear_again()
    far.settimeout(10)
    assert far.recv(4) == b"word"


def test_where_a_filter_takes_a_privilege_nothing_is_dropped_and_that_is_told(
    connected: Pair, own: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(each: socket.socket, instructions: faults.Instructions) -> None:  # noqa: ARG001
        raise PermissionError

    monkeypatch.setattr(faults, "attach", refused)
    own.append(connected[1])
    assert faults.hear_nobody() is False
    connected[0].sendall(b"word")
    assert connected[1].recv(4) == b"word"


def test_a_slow_link_takes_its_time(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(near)
    faults.set_pace(1_000_000)
    near.settimeout(30)
    far.settimeout(30)
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(1_500_000),))
    sender.start()
    left = 1_500_000
    while left:
        left -= len(far.recv(1 << 20))
    sender.join()
    assert time.monotonic() - began > 0.7  # 1.5 s at that rate, less what TCP begins with; else some milliseconds


def test_taking_away_what_is_not_there_does_nothing(connected: Pair) -> None:
    faults._detach(connected[0])


CONTEXT = multiprocessing.get_context("fork")


def in_child(act: Callable[[], None]) -> tuple[int | None, float]:
    """The exit code of a process that does this, and how long it took."""
    began = time.monotonic()
    child = CONTEXT.Process(target=act)
    child.start()
    child.join(30)
    return child.exitcode, time.monotonic() - began


def paused() -> None:
    faults.pause(0.5)
    os._exit(7)


def slowed() -> None:
    """0.3 s of the core, for a tenth of the time."""
    faults.slow_down(0.1)
    while time.process_time() < 0.3:
        pass
    os._exit(7)


def test_a_killed_process_says_nothing() -> None:
    assert in_child(faults.kill)[0] == -signal.SIGKILL


def test_a_pause_ends_by_itself() -> None:
    code, took_s = in_child(paused)
    assert code == 7
    assert took_s > 0.45


def test_a_slow_process_takes_longer_for_the_same() -> None:
    code, took_s = in_child(slowed)
    assert code == 7
    assert took_s > 0.9
