"""Run all ranks as processes of this machine, if no container or scheduler started them.

Importing torch takes a core 3 to 4 s: this process does so once and forks each rank (8 ranks on two cores started in 4
s instead of 17). Each line that a rank prints is passed on with the rank in front. Signals go to every rank, a rank
that does not end is killed, and none outlives the launcher.

The launcher names a rank that dies at once, and the others end with it if they have not joined yet: each rank has one
end of a socket, whose number is in the environment. A rank reports to the launcher that it has joined; until then it
ends with 3 as soon as it learns who died, even during the import of torch. After that the watch reports deaths. A rank
that refused its settings or printed its error needs no report, and the others reach the same sentence by themselves if
they can: they act on the message only when they begin to wait for the dead rank.
"""

import ctypes
import multiprocessing
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from distlab.lab.cluster.departure import EXIT_CODES, handled_signals
from distlab.lab.cluster.messages import MAX_TEXT
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import claim_run_id
from distlab.lab.report.standard_streams import printed
from distlab.lab.report.terminal import REWRITES, Screen

STOP_GRACE_S = 10.0  # from a signal to the kill, as in `docker stop`
FAILED_GRACE_S = 30.0  # added to LAB_JOIN_TIMEOUT_S, for the others once a rank has failed
# The libraries of other systems do not survive a fork: a rank is a new interpreter there, and imports torch itself.
CONTEXT: ForkContext | SpawnContext = (
    multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context("spawn")
)
STOPPED, EXPLAINED = (130, 143), (2, 3)  # exit codes of a stopped rank, and of one that has printed why it ends
BEFORE_JOINING = "before all ranks had joined"
POLL_S = 0.05
VARIABLE = "DISTLAB_PARENT"  # the number of a rank's descriptor
JOINED, MAY_LEAVE = b"joined", b"may leave"
FIRST_PORT = 16384  # of the launcher's choices: ports below are those of well-known services


def launch(config: Config, be_rank: Callable[[], int]) -> int:
    """Run WORLD_SIZE local ranks to their end, each as `be_rank` with its variables; returns the worst exit code."""
    drawn = "" if config.key_file is not None else secrets.token_hex(16)
    port, key = free_port(), config.key.get_secret_value() if config.key else drawn
    ranks: list[LocalRank] = []
    stopped_at: list[float] = []
    stopped_by: list[int] = []

    screen = Screen(sys.stdout)
    print_lock = threading.Lock()

    def print_line(line: bytes) -> None:
        with print_lock:
            why = printed(screen.shown(line.decode(errors="backslashreplace")), end="")
        if why:  # the output has no reader: the ranks continue, and rank 0's log reports it
            ranks[0].pipe.send(OutputLost(why))

    def forward(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)
        stopped_at.append(time.monotonic())
        for each in ranks:
            each.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in handled_signals()}
    try:
        for rank in range(config.world_size):
            environ = variables(config, rank, port, key) | ({REWRITES: "1"} if screen.rewrites else {})
            ranks.append(LocalRank(rank, environ, be_rank, print_line))
        for each in ranks:  # no rank is forked while a thread exists, which may have a lock
            each.printer.start()
        if stopped_at:  # during the start: not all ranks existed to receive it
            for each in ranks:
                each.send_signal(signal.SIGTERM)
        _wait(ranks, stopped_at, FAILED_GRACE_S + config.join_timeout_s, print_line)
        for each in ranks:
            each.printer.join(timeout=2.0)  # an orphan process of a rank may keep its pipe open
        if stopped_by and not any(each.pipe.joined() for each in ranks):  # afterwards each rank prints it itself
            print_line(f"stopped    by {signal.Signals(stopped_by[0]).name} {BEFORE_JOINING}".encode())
        if remaining := screen.cleared():
            printed(remaining, end="")
    finally:
        for each in ranks:
            each.process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    for each in ranks:
        each.process.join()
    return worst([each.process.exitcode or 0 for each in ranks])


@contextmanager
def named_run(config: Config) -> Iterator[Path]:
    """Create the folder of this run, whose name ranks find in the environment; remove it later if it is empty."""
    if config.run_id is not None or config.resume == "auto":  # the latter is refused without a name
        yield config.runs_dir / str(config.run_id)
        return
    os.environ["LAB_RUN_ID"] = claim_run_id(config.runs_dir, config.mode_name)
    folder = config.runs_dir / os.environ["LAB_RUN_ID"]
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def handle_stop_signals() -> None:
    """Let a stop signal end this process with a message and its exit code, unless `launch` passes it on."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        with suppress(OSError):  # with a system call: the signal may interrupt a print
            os.write(1, f"stopped    by {signal.Signals(number).name}\n".encode())
        sys.exit(EXIT_CODES[signal.Signals(number)])

    for number in handled_signals():
        signal.signal(number, stop)


class Died(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A launcher's message: which rank died, how, and whether it has printed why."""

    rank: int
    how: str
    sentence: str
    explained: bool


class OutputLost(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A launcher's message: the ranks' output is not printed any more, and why."""

    why: str


DECODER = msgspec.json.Decoder(Died | OutputLost)


class RankPipe:
    """The launcher's end of one rank's socket."""

    def __init__(self) -> None:
        self._socket, self.rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._received: set[bytes] = set()

    def joined(self) -> bool:
        """Return whether the rank has reported that it has joined."""
        return JOINED in self._receive()

    def may_leave(self) -> bool:
        """Return whether it has reported that it continues without ranks that die."""
        return MAY_LEAVE in self._receive()

    def _receive(self) -> set[bytes]:
        with suppress(OSError):  # the other end is closed
            while message := self._socket.recv(64):
                self._received.add(message)
        return self._received

    def send(self, message: Died | OutputLost) -> None:
        """Send a message to the rank, unless it has ended too."""
        with suppress(OSError):
            fields = msgspec.structs.asdict(message).items()
            texts = {name: each.encode(errors="replace").decode() for name, each in fields if isinstance(each, str)}
            self._socket.send(msgspec.json.encode(msgspec.structs.replace(message, **texts)))

    def close(self) -> None:
        self._socket.close()


class LocalRank:
    """One child, its socket to the launcher, and the thread that prints its output."""

    def __init__(
        self, rank: int, variables: dict[str, str], be_rank: Callable[[], int], print_line: Callable[[bytes], None]
    ) -> None:
        self.rank, self.pipe, self._print_line = rank, RankPipe(), print_line
        self.last_line = ""
        self.end_recorded = self.informed = False
        self._output, rank_end = CONTEXT.Pipe(duplex=False)
        util.register_after_fork(self, LocalRank._close_in_rank)
        self.process = CONTEXT.Process(
            target=be_child, args=(be_rank, variables, self.pipe.rank_end, rank_end, os.getpid())
        )
        self.process.start()
        self.pipe.rank_end.close()
        rank_end.close()
        self.printer = threading.Thread(target=self._print_output, daemon=True)

    def _close_in_rank(self) -> None:
        """Close the launcher's ends in a rank."""
        self._output.close()
        self.pipe.close()

    def _print_output(self) -> None:
        with open(self._output.fileno(), "rb", closefd=False) as output:
            for line in output:
                text = line.rstrip(b"\r\n")
                self.last_line = text.decode(errors="replace")
                self._print_line(b"rank %d | %s" % (self.rank, text))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def exit_message(self) -> Died | None:
        """Return who died and how, if no other process reports it."""
        code, joined = self.process.exitcode or 0, self.pipe.joined()
        if code < 0:
            how, explained = f"was killed by {signal.Signals(-code).name}", False
        elif code in STOPPED or code == 0 or joined or self.informed:  # then it ends because of another
            return None
        else:
            how, explained = f"ended with exit code {code}", code in EXPLAINED
        when = "" if joined else f" {BEFORE_JOINING}"
        self.printer.join(timeout=0.5)
        why = f": {self.last_line[:MAX_TEXT]}" if explained and self.last_line else ""
        return Died(self.rank, how.removeprefix("was "), f"rank {self.rank} {how}{when}{why}", explained)


def free_port() -> int:
    """Return a TCP port of this machine that is free, and that the kernel assigns to no other program.

    Programs that ask for any port get one from ip_local_port_range, connections too: a free port of that range was
    taken a second later, when rank 0 opened it (once in 6,100 tests).
    """
    ephemeral_from = 0
    with suppress(OSError):
        ephemeral_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = FIRST_PORT + secrets.randbelow(ephemeral_from - FIRST_PORT) if ephemeral_from > FIRST_PORT else 0
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])


def variables(config: Config, rank: int, port: int, key: str) -> dict[str, str]:
    """Return the variables that make a process this rank; without a `key` it finds one by LAB_KEY_FILE."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **({"LAB_KEY": key} if key else {}),
    }  # fmt: skip


def be_child(
    be_rank: Callable[[], int], environ: dict[str, str], pipe: socket.socket, output: Connection, parent: int
) -> None:
    """Run the rank in the child, with its own session, streams and variables; ends with its exit code."""
    os.setsid()  # Ctrl-C comes through `forward` only, once
    die_with(parent)  # elsewhere a rank ends at its next print
    for number in handled_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    redirect_output(output)
    os.environ.update(environ | {VARIABLE: str(pipe.detach())})
    sys.exit(be_rank())


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when process `parent`, which started this one, dies; does nothing except on Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(137)


def redirect_output(output: Connection) -> None:
    """Close the standard input, and send all output to `output`, one line at a time."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    encoding = sys.stdout.encoding
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding, closefd=False)


def _wait(
    ranks: list[LocalRank], stopped_at: list[float], failed_grace_s: float, print_line: Callable[[bytes], None]
) -> None:
    """Wait until every rank has ended; kill those that outlive a signal or a failed rank for too long."""
    failed_at = None
    while any(each.process.exitcode is None for each in ranks):
        now = time.monotonic()
        if failed_at is None and any(each.process.exitcode for each in ranks):
            failed_at = now
        if not stopped_at:
            _record_ends(ranks, print_line)
        late = stopped_at and now - stopped_at[0] > STOP_GRACE_S
        stuck = failed_at is not None and now - failed_at > failed_grace_s
        if late or (stuck and not any(each.pipe.may_leave() for each in ranks)):
            for each in ranks:
                each.process.kill()
        time.sleep(POLL_S)


def _record_ends(ranks: list[LocalRank], print_line: Callable[[bytes], None]) -> None:
    for dead in ranks:
        if dead.end_recorded or dead.process.exitcode is None:
            continue
        dead.end_recorded = True
        exit_message = dead.exit_message()
        if exit_message is not None:
            print_line(exit_message.sentence.encode())
            for other in ranks:
                if other.process.exitcode is None:
                    other.pipe.send(exit_message)
                    other.informed = True


def worst(return_codes: list[int]) -> int:
    """Return the worst of the ranks' codes: 2, 1, 3, a signal's 128+n, 143, 0."""
    codes = {143 if code == -signal.SIGHUP else 128 - code if code < 0 else code for code in return_codes}
    for code in (2, 1, 3):
        if code in codes:
            return code
    signalled = codes - {143, 0}
    return max(signalled) if signalled else 143 if 143 in codes else 0


def needed_files(world_size: int) -> int:
    """Return how many files each process of a run with this many local ranks may open.

    A launcher has 7 + 4N at most, a rank 68 at N=4 and 94 at N=8 (moe, whose grid has a group per axis): the result
    exceeds each by at least 20.
    """
    return 56 + 8 * world_size


def check_open_file_limit(world_size: int) -> None:
    """Raise ConfigError if this process, and so each child, may open too few files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed_files(world_size):
        raise ConfigError(
            [
                f"a process may open {allowed} files here, and {world_size} local ranks need"
                f" {needed_files(world_size)} each: set `ulimit -n {needed_files(world_size)}` or more"
            ]
        )


class LauncherPipe:
    """A rank's end of the socket; without a launcher nothing ever arrives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_waiting = self._joined = False
        self._record_death: Callable[[int, str], None] = lambda rank, how: None  # noqa: ARG005
        self._death: Died | None = None
        self._lost_output = ""
        self._on_output_lost: Callable[[str], None] | None = None
        self._socket: socket.socket | None = None
        number = os.environ.pop(VARIABLE, "")
        if number:
            with suppress(OSError, ValueError):  # a variable from another program
                self._socket = socket.socket(fileno=int(number))
        if self._socket is not None:
            threading.Thread(target=self._listen, args=(self._socket,), name="parent", daemon=True).start()

    def on_output_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the launcher cannot print any more; at once if that is so already."""
        with self._lock:
            self._on_output_lost = callback
            if self._lost_output:
                callback(self._lost_output)

    def start_waiting(self) -> None:
        """Record that this rank waits for all others from now on."""
        with self._lock:
            self._is_waiting = True
            self._end_if_due()

    def joined(self, record_death: Callable[[int, str], None] = lambda rank, how: None) -> None:  # noqa: ARG005
        """Leave dead ranks to rank 0's server, because all have joined now; `record_death` gets how they ended."""
        with self._lock:
            self._joined, self._record_death = True, record_death
        self._send(JOINED)

    def may_leave(self) -> None:
        """Record that a dead rank ends no other from now on: the others need as long as they need."""
        self._send(MAY_LEAVE)

    def _send(self, message: bytes) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(message)

    def _listen(self, from_parent: socket.socket) -> None:
        with suppress(OSError):
            while data := from_parent.recv(65536):
                with suppress(ValueError), self._lock:  # invalid data: the descriptor may belong to another program
                    message = DECODER.decode(data)
                    if isinstance(message, OutputLost):
                        self._handle_lost_output(message.why)
                    elif self._joined:
                        self._record_death(message.rank, message.how)
                    else:
                        self._death = self._death or message  # later ones are consequences of the first
                        self._end_if_due()

    def _handle_lost_output(self, why: str) -> None:
        first, self._lost_output = not self._lost_output, why
        if first and self._on_output_lost is not None:
            with suppress(Exception):  # a full disk may refuse even one line
                self._on_output_lost(why)

    def _end_if_due(self) -> None:
        """End this rank, if there is a reason."""
        if self._death is None or self._joined or (self._death.explained and not self._is_waiting):
            return
        printed(f"broken     {self._death.sentence}")
        os._exit(3)
