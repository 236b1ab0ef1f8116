"""What happens around a run: signals, disks, folders, clocks, locales, slow clients. Each is tried on a run of three
local ranks, whose exit code, sentence and bound have to be what docs/reliability.md says.

    python -m benchmarks.fuzz surroundings [NAME ...]

A case that this machine cannot make (a mount without root) is printed as not tried, with the reason.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from distlab.cluster.launch import free_port
from distlab.report.table import aligned

TOP = Path(__file__).parents[2]
SMALL = {
    "RUN_MODE": "dp", "WORLD_SIZE": "3", "LAB_MODEL": "mlp", "LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_STEPS": "2000",
    "LAB_VARIANT": "flat",
}  # fmt: skip
END_S = 150.0
LEFT_S = 5.0  # after the launcher's end: what is still there then was left behind
# What Python runs at each start: its wall clock is as far off as a file says.
CLOCK = """
import os, pathlib, time
real, file = time.time, pathlib.Path(os.environ["CLOCK"])
time.time = lambda: real() + float(file.read_text() or 0)
"""
SLOW_CLIENTS = 60
PATHS = ("/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/run/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/\x00")


class NotTried(Exception):
    """Why this machine cannot make the case."""


class Started:
    """One run under way, in a folder of its own."""

    def __init__(self, top: Path, settings: Mapping[str, str], prefix: Sequence[str]) -> None:
        self.top, self.runs = top, top / "runs"
        kept = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE", name)}
        self.environ = {**kept, **SMALL, "LAB_RUNS_DIR": str(self.runs), "PYTHONPATH": str(TOP), **settings}
        self.output = top / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "workers"], cwd=top, env=self.environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """All that was printed."""
        return self.output.read_text(errors="replace")

    def until_trained(self) -> None:
        """Return once the timed steps are under way."""
        deadline = time.monotonic() + END_S
        while "proof      " not in self.said:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(0.5)

    def ranks(self) -> list[int]:
        """The process of each rank: those that the launcher has started."""
        return [
            int(each) for each in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def processes(self) -> list[int]:
        """All processes of this run that are alive, by its folder in their environment."""
        mark, found = f"LAB_RUNS_DIR={self.runs}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return found

    def end(self) -> int | None:
        """The exit code, None where it did not end in END_S."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None


class Case(NamedTuple):
    """What is tried, and what has to come of it."""

    what: str
    codes: set[int]
    says: str  # a pattern in what is printed
    act: Callable[["Started"], None] | None = None  # once the run trains
    settings: Mapping[str, str] = {}
    prefix: Sequence[str] = ()
    before: Callable[[Path], None] | None = None  # in the folder of runs


def mounted(script: str) -> list[str]:
    """A command's beginning that runs it in a mount namespace of its own, after `script`."""
    return ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh"]


def send(number: signal.Signals, rank: int | None = None) -> Callable[[Started], None]:
    """To the launcher, or to one rank."""
    return lambda run: os.kill(run.process.pid if rank is None else run.ranks()[rank], number)


def remove_runs(run: Started) -> None:
    """The folder of all runs, with this one's in it."""
    shutil.rmtree(run.runs)


def jump(run: Started) -> None:
    """The wall clock of all ranks goes two days on, then four back."""
    clock = run.top / "clock"
    for days in (2, -2):
        clock.write_text(str(days * 86400.0))
        time.sleep(1.0)


def attack_page(run: Started) -> None:
    """Clients that never finish their question, and paths that lead out of the folder."""
    port = int(run.environ["LAB_LIVE_PORT"])
    with ExitStack() as stack:
        for _ in range(SLOW_CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        for path in PATHS:
            with socket.create_connection(("127.0.0.1", port), 5) as client:
                client.settimeout(10)
                client.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                answer = b""
                with suppress(OSError):
                    while part := client.recv(65536):
                        answer += part
            assert b"root:" not in answer, f"{path} leads out of the folder"
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            client.settimeout(10)
            client.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert client.recv(64).startswith(b"HTTP/1."), "the page does not answer beside slow clients"


def mount_disk(runs: Path) -> None:
    """The folder of runs on a disk of its own."""
    disk, place = str(runs.parent / "disk"), str(runs)
    commands = (["truncate", "-s", "64m", disk], ["mkfs.ext4", "-q", disk], ["mount", "-o", "loop", disk, place])
    for command in commands:
        if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            raise NotTried(f"{command[0]} {command[1]} is not allowed here")


def break_disk(run: Started) -> None:
    """As the kernel does where a disk fails: nothing more is written to it, open files included."""
    subprocess.run(["mount", "-o", "remount,abort", run.runs], check=True)


def link_latest(runs: Path) -> None:
    """runs/latest leads round in a circle."""
    (runs / "latest").symlink_to("latest")


def make_latest(runs: Path) -> None:
    """runs/latest is a folder of somebody's, with something in it."""
    (runs / "latest").mkdir()
    (runs / "latest" / "mine").write_text("mine")


def link_out(runs: Path) -> None:
    """The folder of the run leads elsewhere."""
    (runs.parent / "elsewhere").mkdir()
    (runs / "named").symlink_to(runs.parent / "elsewhere")


def cases(top: Path) -> dict[str, Case]:
    """By name; `top` is the folder of the run that is tried."""
    full = mounted(f"mount -t tmpfs -o size=200k none {top}/runs")
    lost = r"rank 1 (lost|was killed|ended|failed|was stopped)"
    return {
        "locale": Case("LC_ALL=C, ASCII alone", {0}, "PASS", settings={"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}),
        "home": Case("no HOME, USER, LOGNAME, TMPDIR", {0}, "PASS", prefix=["env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "TMPDIR"]),
        "shm": Case("/dev/shm that nobody can write to", {0}, "PASS", prefix=mounted("mount -t tmpfs -o ro none /dev/shm")),
        "disk_full": Case("a disk of 200 kB", {1}, r"cannot be written any more \(No space left on device\): free space", prefix=full),
        "disk_read_only": Case("a disk that fails in mid-run, so that it is read-only", {1}, r"cannot be written any more \(Read-only file system\)", before=mount_disk, act=break_disk),
        "removed": Case("runs/ is removed while the run trains", {1}, r"was removed|No such file", act=remove_runs),
        "hangup": Case("SIGHUP to the launcher", {143}, "was stopped by SIGHUP", act=send(signal.SIGHUP)),
        "term_rank": Case("SIGTERM to rank 1", {3}, lost, act=send(signal.SIGTERM, 1)),
        "int_rank": Case("SIGINT to rank 1", {3}, lost, act=send(signal.SIGINT, 1)),
        "hup_rank": Case("SIGHUP to rank 1", {3}, lost, act=send(signal.SIGHUP, 1)),
        "quit_rank": Case("SIGQUIT to rank 1", {3}, lost, act=send(signal.SIGQUIT, 1)),
        "abort_rank": Case("SIGABRT to rank 1", {3}, lost, act=send(signal.SIGABRT, 1)),
        "segv_rank": Case("SIGSEGV to rank 1", {3}, lost, act=send(signal.SIGSEGV, 1)),
        "usr1_rank": Case("SIGUSR1 to rank 1", {3}, lost, act=send(signal.SIGUSR1, 1)),
        "pipe_rank": Case("SIGPIPE to rank 1, which Python ignores", {0}, "PASS", act=send(signal.SIGPIPE, 1)),
        "winch_rank": Case("SIGWINCH to rank 1, which nobody minds", {0}, "PASS", act=send(signal.SIGWINCH, 1)),
        "latest_circle": Case("runs/latest is a link to itself", {0}, "PASS", before=link_latest),
        "latest_folder": Case("runs/latest is a folder of somebody's", {2}, "is no link to the newest run: rename it", before=make_latest),
        "run_elsewhere": Case("the folder of the run is a link", {2}, "exists already in .*: choose another or remove it", before=link_out, settings={"LAB_RUN_ID": "named"}),
        "clock": Case("the wall clock jumps two days on, and four back", {0}, "PASS", act=jump),
        "page": Case(f"{SLOW_CLIENTS} slow clients of the live page, and paths that lead out", {0}, "PASS", act=attack_page),
    }  # fmt: skip


def tried(name: str) -> list[str]:
    """A row of the table: the case, its exit code, how long its end took, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="surroundings-") as folder:
        top = Path(folder)
        case = cases(top)[name]
        settings = dict(case.settings)
        if name == "page":
            settings |= {"LAB_LIVE": "1", "LAB_LIVE_PORT": str(free_port())}
        if name == "clock":
            (top / "clock").write_text("0")
            (top / "sitecustomize.py").write_text(CLOCK)
            settings |= {"CLOCK": str(top / "clock"), "PYTHONPATH": f"{top}:{TOP}"}
        (top / "runs").mkdir()
        if (
            case.prefix
            and case.prefix[0] == "unshare"
            and subprocess.run(["unshare", "-m", "true"], check=False).returncode
        ):
            return [name, case.what, "-", "-", "not tried: no mount namespace may be made"]
        try:
            if case.before is not None:
                case.before(top / "runs")
        except NotTried as error:
            return [name, case.what, "-", "-", f"not tried: {error}"]
        run = Started(top, settings, case.prefix)
        try:
            run.until_trained()
            acted_at = time.monotonic()
            fault = ""
            try:
                if case.act is not None and run.process.poll() is None:
                    case.act(run)
            except AssertionError as error:
                fault = str(error)
            code = run.end()
            took_s = time.monotonic() - acted_at
            return [name, case.what, str(code), f"{took_s:.1f}", fault or wrong(run, case, code)]
        finally:
            for process in run.processes():
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["umount", "-q", top / "runs"], stderr=subprocess.DEVNULL, check=False)


def wrong(run: Started, case: Case, code: int | None) -> str:
    """What is not as it has to be; empty where nothing is."""
    if code is None:
        return f"no end in {END_S:g} s"
    deadline = time.monotonic() + LEFT_S
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    last = run.said.strip().rpartition("\n")[2][:160]
    faults = [
        (code not in case.codes, f"exit code {code}: {last}"),
        ("Traceback" in run.said, "a traceback"),
        (not re.search(case.says, run.said), f"it does not say {case.says}: {last}"),
        (bool(run.processes()), f"{len(run.processes())} processes are left"),
    ]
    return "; ".join(text for holds, text in faults if holds)


def main(words: Sequence[str]) -> int:
    """Try the cases that are named, by default all; 0 if nothing was wrong."""
    known = cases(Path())
    unknown = [word for word in words if word not in known]
    if unknown:
        print(f"refused    {', '.join(unknown)}: the cases are {', '.join(known)}")
        return 2
    rows = []
    for name in words or known:
        rows.append(tried(name))
        print("\n".join(aligned(["case", "tried", "code", "end s", "wrong"], rows[-1:])), flush=True)
    print("\n".join(aligned(["case", "tried", "code", "end s", "wrong"], rows)))
    return int(any(row[-1] and not row[-1].startswith("not tried") for row in rows))
