"""A process sends its stacks while it computes, waits or holds the GIL in C, and is not harmed."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distlab.tools.check.start import script_process
from distlab.tools.check.start.script import STACKS, answer_stack_requests, stacks_of_all_threads
from distlab.tools.check.start.script_process import ProcessState, Stacks, Threads, parsed, threads_of

CALLING = """
def called(n):
    return n if n < 2 else called(n - 1) + called(n - 2)

class Made:
    def __iter__(self):
        yield from range(3)

def at_work():
    while True:
        called(12), [list(Made()) for _ in range(10)]
"""
WAITING = "import time\ndef at_work():\n    time.sleep(100)"
HELD_ASLEEP = "import ctypes\ndef at_work():\n    ctypes.PyDLL(None).usleep(100_000_000)"
HELD_AT_WORK = "import re\ndef at_work():\n    re.match('(a+)+$', 'a' * 60 + 'b')"


@contextmanager
def process(source: str) -> Iterator[tuple[subprocess.Popen[bytes], Stacks]]:
    """A process at work, and the Stacks that read its stacks."""
    stacks, requests = os.pipe(), os.pipe()
    begin = f"from distlab.tools.check.start.script import answer_stack_requests\nanswer_stack_requests({requests[0]}, {stacks[1]})"
    begin += "\nimport time\ntime.sleep(0.2)\nprint(flush=True)\nat_work()"  # the answering thread waits by then
    command = [sys.executable, "-c", f"{source}\n{begin}"]
    with subprocess.Popen(command, pass_fds=(requests[0], stacks[1]), stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.1)
            yield child, Stacks(child.pid, requests[1], stacks[0], lambda: state_of(child.pid))
        finally:
            child.kill()
            for each in (*stacks, *requests):
                os.close(each)


def state_of(process: int) -> ProcessState:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0)


def is_found_at_work(stacks: Stacks) -> bool:
    """Whether its stacks show `at_work`; next to other tests it takes seconds until the process gets a core."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for frames in stacks.request().values():
            if any(each.function == "at_work" for each in frames):
                return True
    return False


def test_many_requests_do_not_harm_a_process_that_calls_functions() -> None:
    with process(CALLING) as (child, stacks):
        assert all(is_found_at_work(stacks) for _ in range(100))
        assert child.poll() is None


def test_the_signal_alone_kills_it() -> None:  # once this fails on all Pythons, requests are no longer needed
    if sys.version_info[:2] != (3, 11):
        pytest.skip("measured on Python 3.11")
    with process(CALLING) as (child, stacks):
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            child.send_signal(STACKS)
            stacks._read()
            time.sleep(0.0005)
        assert child.returncode == -signal.SIGSEGV


def test_the_answer_does_not_use_faulthandler() -> None:
    """faulthandler reads a thread that C++ is just bringing into Python: fully_shard on 3 ranks ended by SIGSEGV."""
    with process(f"{WAITING}\nimport faulthandler\nfaulthandler.dump_traceback = None") as (child, stacks):
        assert is_found_at_work(stacks)
        assert child.poll() is None


def test_stacks_are_written_as_faulthandler_writes_them(tmp_path: Path) -> None:
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait, args=(60,))
    thread.start()
    time.sleep(0.2)  # it is in wait() by then
    assert thread.ident is not None
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    ours, theirs = parsed(stacks_of_all_threads()), parsed((tmp_path / "stacks").read_text())
    wait.set()
    thread.join()
    assert ours[thread.ident] == theirs[thread.ident] and len(ours[thread.ident]) >= 4
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("source", [WAITING, HELD_ASLEEP, HELD_AT_WORK], ids=["asleep", "gil", "gil-at-work"])
def test_a_process_that_waits_or_holds_the_gil_in_c_answers(source: str) -> None:
    with process(source) as (child, stacks):
        assert is_found_at_work(stacks)
        assert child.poll() is None


NO_THREADS: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("waits", "runnable"), [([7, 8], NO_THREADS), ([7, 99], {"python"})], ids=["answering thread", "another thread"]
)
def test_while_a_thread_waits_for_a_core_no_signal_is_sent(
    waits: list[int], runnable: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(HELD_ASLEEP) as (_, stacks):
        with monkeypatch.context() as patched:
            seen = iter(waits)
            patched.setattr(script_process, "threads_of", lambda _: Threads(next(seen), frozenset(runnable)))
            assert stacks.request() == {}
        assert is_found_at_work(stacks)


def test_computing_and_waiting_threads_are_distinguished() -> None:
    idle = "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
    with process(idle + CALLING) as (child, stacks):
        first = threads_of(child.pid)
        assert first.runnable == {"python"}
        assert is_found_at_work(stacks)
        assert threads_of(child.pid).waits > first.waits > 0
    assert threads_of(child.pid) == (0, NO_THREADS)


def test_a_stopped_process_gets_one_request_and_no_signal() -> None:
    with process(CALLING) as (child, stacks):
        child.send_signal(signal.SIGSTOP)
        assert [stacks.request(), stacks.request()] == [{}, {}]
        status = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        pending = next(line for line in status if line.startswith("ShdPnd"))
        assert int(pending.split()[1], 16) & 1 << (STACKS - 1) == 0
        child.send_signal(signal.SIGCONT)
        assert is_found_at_work(stacks)


def test_an_ended_process_has_no_stacks() -> None:
    with process(WAITING) as (child, stacks):
        child.kill()
        child.wait()
        assert stacks.request() == {}


def test_the_answering_thread_is_left_out() -> None:
    source = answer_stack_requests.__code__.co_filename
    text = f'Current thread 0x0b (most recent call first):\n  File "{source}", line 9 in answering\n\n'
    assert parsed(text + 'Thread 0x0a (most recent call first):\n  File "own.py", line 3 in step\n\n').keys() == {10}
