"""The launcher: its exit code is the worst of its ranks', it labels their lines, and no rank outlives it."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.lab.cluster.launch import (
    DECODER,
    VARIABLE,
    Died,
    LauncherPipe,
    RankPipe,
    free_port,
    named_run,
    variables,
    worst,
)
from distlab.lab.config import Config
from tests.lab.cluster.cluster_of_processes import Processes, Rank

# A launcher whose ranks do one action each.
LAUNCH = """
import os, signal, sys, time
from distlab.lab.cluster.launch import LauncherPipe, launch
from distlab.lab.config import Config

def be_rank():
    rank, action = int(os.environ["RANK"]), os.environ["ACTION"]
    print("hello", os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
    if action == "codes": return [0, 3, 1][rank]
    if action == "raise": raise ValueError("a made-up failure")
    if action == "read": return 0 if sys.stdin.read() == "" and os.read(0, 1) == b"" else 1
    if action == "kill" and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    if action == "descriptors": print("opened", len(os.listdir("/proc/self/fd")))
    if action in ("dies", "crash"):
        parent = LauncherPipe()
        if action == "crash" and rank == 1: os.kill(os.getpid(), signal.SIGSEGV)
        if action == "dies" and rank == 1: print("broken     MASTER_PORT is used"); return 3
        if action == "dies" and rank == 2: time.sleep(1.0); print("imported")
        if action == "dies": parent.start_waiting()
        time.sleep(60)
    if action == "stay":
        try:
            print("pid", os.getpid())
            time.sleep(60)
        except KeyboardInterrupt:
            return 130
    return 0

sys.exit(launch(Config.read(), be_rank))
"""


def launched(processes: Processes, action: str) -> Rank:
    return processes.run([sys.executable, "-c", LAUNCH], {"WORLD_SIZE": "3", "ACTION": action})


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([3, 1, 2], 2),
        ([3, 1, 137], 1),
        ([3, -9, -15], 3),
        ([-9, -15, 0], 137),
        ([143, 0], 143),
        ([130, 143], 130),
        ([-15], 143),
    ],
)
def test_the_worst_exit_code(codes: list[int], expected: int) -> None:
    assert worst(codes) == expected


def test_lines_are_labelled_with_their_rank(processes: Processes) -> None:
    launcher = launched(processes, "codes")
    assert launcher.end() == 1
    lines = [line for line in processes.all[0].text.splitlines() if " | " in line]
    assert sorted(lines) == [f"rank {rank} | hello 3 127.0.0.1" for rank in range(3)]


def test_a_rank_has_no_input_and_no_descriptors_of_other_ranks(processes: Processes) -> None:
    assert launched(processes, "read").end() == 0
    launcher = launched(processes, "descriptors")
    assert launcher.end() == 0
    opened = sorted(map(int, re.findall(r"opened (\d+)", launcher.text)))
    assert opened == [opened[0] + 2 * before for before in range(3)], "more than multiprocessing's two per earlier rank"


def test_a_rank_that_raises_ends_with_1(processes: Processes) -> None:
    launcher = launched(processes, "raise")
    assert launcher.end() == 1
    assert "rank 2 | ValueError: a made-up failure" in launcher.text


def test_a_killed_rank_has_the_code_of_its_signal(processes: Processes) -> None:
    assert launched(processes, "kill").end() == 137


@pytest.mark.parametrize(
    ("action", "code", "sentence"),
    [
        ("crash", 3, "rank 1 was killed by SIGSEGV before all ranks had joined"),
        ("dies", 3, "rank 1 ended with exit code 3 before all ranks had joined: broken     MASTER_PORT is used"),
    ],
)
def test_a_rank_that_dies_before_joining_is_named_at_once_and_ends_the_others(
    processes: Processes, action: str, code: int, sentence: str
) -> None:
    launcher = launched(processes, action)
    assert launcher.end(20) == code, "no rank sleeps for its 60 s"
    lines = launcher.text.splitlines()
    assert {sentence, f"rank 0 | broken     {sentence}", f"rank 2 | broken     {sentence}"} <= set(lines)
    if action == "dies":
        assert lines.index("rank 2 | imported") < lines.index(f"rank 2 | broken     {sentence}"), (
            "it was not waiting yet"
        )


def test_a_rank_that_has_joined_leaves_deaths_to_the_watchdog() -> None:
    pipe = RankPipe()
    assert not pipe.joined()
    os.environ[VARIABLE] = str(pipe.rank_end.detach())
    rank = LauncherPipe()
    assert VARIABLE not in os.environ, "no child process of the rank inherits the variable"
    deaths: list[tuple[int, str]] = []
    rank.joined(lambda dead, how: deaths.append((dead, how)))
    rank.start_waiting()
    pipe.send(Died(1, "killed by SIGKILL", "rank 1 was killed by SIGKILL", explained=False))
    time.sleep(0.2)  # this process has not ended
    assert deaths == [(1, "killed by SIGKILL")]
    assert pipe.joined()
    assert not pipe.may_leave()
    rank.may_leave()
    assert pipe.may_leave()
    assert pipe.joined()
    pipe.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGKILL, 137)]
)
def test_no_rank_outlives_the_launcher(processes: Processes, number: signal.Signals, code: int) -> None:
    launched(processes, "stay")
    launcher = processes.all[0]
    launcher.until(r"(?s)(pid \d+.*){3}")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", launcher.text)]
    launcher.process.send_signal(number)
    # A rank without a handler dies by the signal, or after Ctrl-C by KeyboardInterrupt, which Python turns into the same.
    assert launcher.end(10) == code, launcher.text
    sentence = f"stopped    by {number.name} before all ranks had joined"
    assert (sentence in launcher.text) == (number != signal.SIGKILL)
    deadline = time.monotonic() + 3
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


IGNORES = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from distlab.lab.cluster.departure import Signals
signals = Signals()
signal.raise_signal(signal.SIGHUP)
print(signals.wait(0.2), flush=True)
signal.raise_signal(signal.SIGTERM)
print(signals.wait(0.2).name, flush=True)
"""


def test_an_ignored_signal_stays_ignored(processes: Processes) -> None:
    """As under nohup."""
    nohup = processes.run([sys.executable, "-c", IGNORES], {})
    assert nohup.end() == 0
    assert nohup.text.splitlines() == ["None", "SIGTERM"]


def test_the_variables_of_a_rank() -> None:
    assert variables(Config.read({"WORLD_SIZE": "2"}), 1, 29500, "0123456789abcdef") == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "LAB_KEY": "0123456789abcdef",
    }


@given(st.binary(max_size=200) | st.from_type(dict).map(repr).map(str.encode) | st.sampled_from([
    b"[]", b"[" * 100_000, b"9" * 5000, b'{"type": "Died", "sentence": 1, "explained": true}', b'{"type": "OutputLost"}',
    rb'{"type": "OutputLost", "why": "\ud800"}', b'{"type": "Died", "sentence": "a", "explained": 1}',
]))  # fmt: skip
def test_invalid_messages_of_a_launcher_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any error of the decoder
        DECODER.decode(data)


def test_a_message_of_the_launcher_is_decoded() -> None:
    pipe = RankPipe()
    pipe.send(Died(1, "killed", "rank 1 died: \udcff", explained=False))
    assert DECODER.decode(pipe.rank_end.recv(65536)) == Died(1, "killed", "rank 1 died: ?", explained=False)
    pipe.close()
    pipe.rank_end.close()


def test_the_port_of_a_run_is_not_an_ephemeral_port() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chosen = {free_port() for _ in range(200)}
    assert not any(first <= port <= last for port in chosen) and len(chosen) > 190


# A launcher that hangs in the import for its ranks.
IMPORTS = """
import sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "distlab.lab.rank.finish":
            print("importing", flush=True)
            time.sleep(60)

for name in [name for name in sys.modules if name.startswith("distlab")]:
    del sys.modules[name]
sys.meta_path.insert(0, Slow())
from distlab.cli.run import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (["dp"], signal.SIGTERM, 143),
        (["check", __file__], signal.SIGINT, 130),
        (["prove", __file__], signal.SIGHUP, 143),
    ],
    ids=["run", "check", "prove"],
)
def test_a_launcher_stopped_during_imports_reports_it_and_leaves_no_folder(
    processes: Processes, words: list[str], number: signal.Signals, code: int
) -> None:
    launcher = processes.run([sys.executable, "-c", IMPORTS, *words], {"LAB_RUNS_DIR": str(processes.runs)})
    launcher.until("importing")
    launcher.process.send_signal(number)
    assert launcher.end(10) == code, launcher.text
    assert f"stopped    by {number.name}" in launcher.text
    assert not processes.runs.exists()


def test_a_launcher_names_the_run_and_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_RUN_ID", "")
    with named_run(Config.read({"LAB_RUNS_DIR": str(tmp_path)})) as folder:
        assert folder.is_dir() and folder == tmp_path / os.environ["LAB_RUN_ID"]
    assert list(tmp_path.iterdir()) == []
    with named_run(Config.read({"LAB_RUNS_DIR": str(tmp_path), "LAB_RUN_ID": "mine"})) as folder:
        assert folder == tmp_path / "mine" and not folder.exists()
