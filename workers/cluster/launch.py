"""All ranks as processes of this machine, for when no container or scheduler started them.

Each rank is `python -m workers` with RANK set; what it prints is passed on line by line with the rank in front. Signals
go to every rank, a rank that does not end is killed, and none outlives the launcher.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import IO

from workers.config import Config

STOP_GRACE_S = 10.0  # from a signal to the kill: as long as `docker stop` gives
FAILED_GRACE_S = 30.0  # beside LAB_JOIN_TIMEOUT_S, for the others once a rank has ended badly
PR_SET_PDEATHSIG = 1
POLL_S = 0.05


def launch(config: Config) -> int:
    """Run WORLD_SIZE local ranks to their end; returns the worst of their exit codes."""
    port, key = free_port(), config.key.get_secret_value() if config.key else secrets.token_hex(16)
    children: list[subprocess.Popen[bytes]] = []
    stopped_at: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        stopped_at.append(time.monotonic())
        for child in children:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(config.world_size):
            if not stopped_at:
                children.append(start_rank(config, rank, port, key))
        printers = [
            threading.Thread(target=pass_on, args=(rank, child.stdout), daemon=True)
            for rank, child in enumerate(children)
        ]
        for printer in printers:
            printer.start()
        _wait(children, stopped_at, FAILED_GRACE_S + config.join_timeout_s)
        for printer in printers:
            printer.join(timeout=2.0)  # a process that a rank has left behind may hold its pipe
    finally:
        for child in children:
            child.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return worst([child.wait() for child in children])


def free_port() -> int:
    """A port of this machine that nobody uses now, neither by TCP nor by UDP."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            port = int(server.getsockname()[1])
            with suppress(OSError):
                udp.bind(("127.0.0.1", port))
                return port


def start_rank(config: Config, rank: int, port: int, key: str) -> "subprocess.Popen[bytes]":
    """One rank as a child process that dies with this one."""
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LAB_KEY": key, "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    # torch's C++ parts print a backtrace with each warning, as when a peer closes its end; its profiler greets at level
    # 5.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
    return subprocess.Popen(
        [sys.executable, "-m", "workers"],
        env=quiet | dict(os.environ) | variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # a terminal's Ctrl-C comes through `forward`, once
        preexec_fn=_die_with_parent(),
    )  # fmt: skip


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs first: ask the kernel for SIGKILL at its parent's death. None where there is no such call.

    There a rank ends at the next line that it cannot print any more.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(137)

    return ask


def pass_on(rank: int, output: IO[bytes] | None) -> None:
    """Print a rank's lines with `rank r | ` in front, each in one write, so that no two are mixed."""
    assert output is not None
    for line in output:
        with suppress(BrokenPipeError, ValueError):  # nobody reads: the rank goes on
            sys.stdout.buffer.write(b"rank %d | %s\n" % (rank, line.rstrip(b"\r\n")))
            sys.stdout.buffer.flush()


def _wait(children: list["subprocess.Popen[bytes]"], stopped_at: list[float], failed_grace_s: float) -> None:
    """Until every child has ended; those that outlive a signal or a failed rank for too long are killed."""
    failed_at = None
    while any(child.poll() is None for child in children):
        now = time.monotonic()
        if failed_at is None and any(child.poll() for child in children):
            failed_at = now
        late = stopped_at and now - stopped_at[0] > STOP_GRACE_S
        if late or (failed_at is not None and now - failed_at > failed_grace_s):
            for child in children:
                child.kill()
        time.sleep(POLL_S)


def worst(return_codes: list[int]) -> int:
    """The worst of the ranks' codes: 2, 1, 3, a signal's 128+n, 143, 0."""
    codes = {128 - code if code < 0 else code for code in return_codes}
    for code in (2, 1, 3):
        if code in codes:
            return code
    signalled = codes - {143, 0}
    return max(signalled) if signalled else 143 if 143 in codes else 0
