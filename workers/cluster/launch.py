"""All ranks as processes of this machine, for when no container or scheduler started them.

Each rank is `python -m workers` with RANK set; what it prints is passed on line by line with the rank in front. Signals
go to every rank, a rank that does not end is killed, and none outlives the launcher. A rank that dies is named at once,
and the others end with it if they have not met it yet (parent.py).
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

from workers.cluster.parent import VARIABLE, Child
from workers.config import Config

STOP_GRACE_S = 10.0  # from a signal to the kill: as long as `docker stop` gives
FAILED_GRACE_S = 30.0  # beside LAB_JOIN_TIMEOUT_S, for the others once a rank has ended badly
PR_SET_PDEATHSIG = 1
STOPPED, SPOKE = (130, 143), (2, 3)  # exit codes of a rank that was stopped, and of one that has said why it ends
UNMET = "before all ranks had joined"
POLL_S = 0.05


def launch(config: Config) -> int:
    """Run WORLD_SIZE local ranks to their end; returns the worst of their exit codes."""
    port, key = free_port(), config.key.get_secret_value() if config.key else secrets.token_hex(16)
    ranks: list[LocalRank] = []
    stopped_at: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        stopped_at.append(time.monotonic())
        for each in ranks:
            with suppress(ProcessLookupError):
                each.process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(config.world_size):
            if not stopped_at:
                ranks.append(LocalRank(rank, *start_rank(config, rank, port, key)))
        _wait(ranks, stopped_at, FAILED_GRACE_S + config.join_timeout_s)
        for each in ranks:
            each.printer.join(timeout=2.0)  # a process that a rank has left behind may hold its pipe
    finally:
        for each in ranks:
            each.process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return worst([each.process.wait() for each in ranks])


class LocalRank:
    """One child, its line to the launcher, and the thread that prints what it says."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", line: Child) -> None:
        self.rank, self.process, self.line = rank, process, line
        self.last_words = ""
        self.buried = self.told = False
        self.printer = threading.Thread(target=self._pass_on, daemon=True)
        self.printer.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for output in self.process.stdout:
            words = output.rstrip(b"\r\n")
            self.last_words = words.decode(errors="replace")
            say(b"rank %d | %s" % (self.rank, words))

    def obituary(self) -> tuple[str, bool] | None:
        """Who died and how, if nobody else says it, and whether the rank has said why itself."""
        code, joined = self.process.returncode, self.line.joined()
        if code < 0:
            how, spoke = f"was killed by {signal.Signals(-code).name}", False
        elif code in STOPPED or code == 0 or joined or self.told:  # then it ends for another
            return None
        else:
            how, spoke = f"ended with exit code {code}", code in SPOKE
        when = "" if joined else f" {UNMET}"
        self.printer.join(timeout=0.5)
        return f"rank {self.rank} {how}{when}" + (f": {self.last_words}" if spoke and self.last_words else ""), spoke


def say(line: bytes) -> None:
    """Print a line in one write, so that no two are mixed."""
    with suppress(BrokenPipeError, ValueError):  # nobody reads: the ranks go on
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def free_port() -> int:
    """A port of this machine that nobody uses now, neither by TCP nor by UDP."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            port = int(server.getsockname()[1])
            with suppress(OSError):
                udp.bind(("127.0.0.1", port))
                return port


def start_rank(config: Config, rank: int, port: int, key: str) -> tuple["subprocess.Popen[bytes]", Child]:
    """One rank as a child process that dies with this one, and the line to it."""
    line = Child()
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LAB_KEY": key, "PYTHONUNBUFFERED": "1",
        VARIABLE: str(line.theirs.fileno()),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "workers"],
        env=dict(os.environ) | variables, pass_fds=[line.theirs.fileno()],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # a terminal's Ctrl-C comes through `forward`, once
        preexec_fn=_die_with_parent(),
    )  # fmt: skip
    line.theirs.close()
    return process, line


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


def _wait(ranks: list[LocalRank], stopped_at: list[float], failed_grace_s: float) -> None:
    """Until every rank has ended; those that outlive a signal or a failed rank for too long are killed."""
    failed_at = None
    while any(each.process.poll() is None for each in ranks):
        now = time.monotonic()
        if failed_at is None and any(each.process.poll() for each in ranks):
            failed_at = now
        if not stopped_at:
            _bury(ranks)
        late = stopped_at and now - stopped_at[0] > STOP_GRACE_S
        if late or (failed_at is not None and now - failed_at > failed_grace_s):
            for each in ranks:
                each.process.kill()
        time.sleep(POLL_S)


def _bury(ranks: list[LocalRank]) -> None:
    """Say who has died, and tell those that wait for them."""
    for dead in ranks:
        if dead.buried or dead.process.poll() is None:
            continue
        dead.buried = True
        obituary = dead.obituary()
        if obituary is not None:
            say(obituary[0].encode())
            for other in ranks:
                if other.process.poll() is None:
                    other.line.tell(*obituary)
                    other.told = True


def worst(return_codes: list[int]) -> int:
    """The worst of the ranks' codes: 2, 1, 3, a signal's 128+n, 143, 0."""
    codes = {128 - code if code < 0 else code for code in return_codes}
    for code in (2, 1, 3):
        if code in codes:
            return code
    signalled = codes - {143, 0}
    return max(signalled) if signalled else 143 if 143 in codes else 0
