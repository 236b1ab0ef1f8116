"""All ranks as processes of this machine, for when no container or scheduler started them.

Importing torch takes a core 3 to 4 s: this process does so once, and each rank is forked from it (8 ranks on two cores
stood after 4 s where they took 17). What a rank prints is passed on line by line with the rank in front. Signals go to
every rank, a rank that does not end is killed, and none outlives the launcher.

A rank that dies is named at once, and the others end with it if they have not met it yet: the launcher hands each rank
one end of a socket and names it in the environment. A rank tells it that it has joined; until then it ends with 3 as
soon as it is told who died, even while torch is being imported. After that the watch speaks. A rank that refused its
settings or said why it broke has spoken for itself, and the others come to the same words by themselves while they
can: they heed the launcher only when they begin to wait for the one that is gone.
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

from distlab.lab.cluster.departure import EXIT_CODES, heeded
from distlab.lab.cluster.messages import MAX_TEXT
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import claim_run_id
from distlab.lab.report.standard_streams import printed
from distlab.lab.report.terminal import REWRITES, Screen

STOP_GRACE_S = 10.0  # from a signal to the kill: as long as `docker stop` gives
FAILED_GRACE_S = 30.0  # beside LAB_JOIN_TIMEOUT_S, for the others once a rank has ended badly
# On other systems their own libraries do not stand a fork: a rank is a new interpreter there, and imports torch itself.
CONTEXT: ForkContext | SpawnContext = (
    multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context("spawn")
)
STOPPED, SPOKE = (130, 143), (2, 3)  # exit codes of a rank that was stopped, and of one that has said why it ends
UNMET = "before all ranks had joined"
POLL_S = 0.05
VARIABLE = "DISTLAB_PARENT"  # the number of a rank's descriptor
JOINED, MAY_LEAVE = b"joined", b"may leave"
FIRST_PORT = 16384  # of those that a launcher chooses: below are the ports of well-known services


def launch(config: Config, be_rank: Callable[[], int]) -> int:
    """Run WORLD_SIZE local ranks to their end, each `be_rank` with its variables; returns the worst of their codes."""
    drawn = "" if config.key_file is not None else secrets.token_hex(16)
    port, key = free_port(), config.key.get_secret_value() if config.key else drawn
    ranks: list[LocalRank] = []
    stopped_at: list[float] = []
    stopped_by: list[int] = []

    screen = Screen(sys.stdout)
    talking = threading.Lock()

    def say(line: bytes) -> None:
        with talking:
            why = printed(screen.shown(line.decode(errors="backslashreplace")), end="")
        if why:  # nobody reads: the ranks go on, and the log of the first says so
            ranks[0].line.tell(Unheard(why))

    def forward(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)
        stopped_at.append(time.monotonic())
        for each in ranks:
            each.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in heeded()}
    try:
        for rank in range(config.world_size):
            given = variables(config, rank, port, key) | ({REWRITES: "1"} if screen.rewrites else {})
            ranks.append(LocalRank(rank, given, be_rank, say))
        for each in ranks:  # no rank is forked beside a thread, which may hold a lock
            each.printer.start()
        if stopped_at:  # while they were started: not all were there to hear it
            for each in ranks:
                each.send_signal(signal.SIGTERM)
        _wait(ranks, stopped_at, FAILED_GRACE_S + config.join_timeout_s, say)
        for each in ranks:
            each.printer.join(timeout=2.0)  # a process that a rank has left behind may hold its pipe
        if stopped_by and not any(each.line.joined() for each in ranks):  # after that each says it itself
            say(f"stopped    by {signal.Signals(stopped_by[0]).name} {UNMET}".encode())
        if standing := screen.cleared():
            printed(standing, end="")
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
    """The folder of the run that is started here, whose ranks find its name in the environment; gone after, if nothing
    was written to it."""
    if config.run_id is not None or config.resume == "auto":  # which is refused without a name
        yield config.runs_dir / str(config.run_id)
        return
    os.environ["LAB_RUN_ID"] = claim_run_id(config.runs_dir, config.mode_name)
    folder = config.runs_dir / os.environ["LAB_RUN_ID"]
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def heed_stops() -> None:
    """From now on a stop signal ends this process with a word and its exit code, where `launch` does not pass it on."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        with suppress(OSError):  # by the kernel alone: the signal may have come in the midst of a print
            os.write(1, f"stopped    by {signal.Signals(number).name}\n".encode())
        sys.exit(EXIT_CODES[signal.Signals(number)])

    for number in heeded():
        signal.signal(number, stop)


class Died(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A launcher's word: who died, how, and whether that rank has said why itself."""

    rank: int
    how: str
    sentence: str
    spoke: bool


class Unheard(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A launcher's word: what the ranks say is printed no more, and why."""

    why: str


WORD = msgspec.json.Decoder(Died | Unheard)


class Child:
    """The launcher's end of one rank's socket."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._told: set[bytes] = set()

    def joined(self) -> bool:
        """Whether the rank has told that it has met the others."""
        return JOINED in self._heard()

    def may_leave(self) -> bool:
        """Whether it has told that it goes on without those that die."""
        return MAY_LEAVE in self._heard()

    def _heard(self) -> set[bytes]:
        with suppress(OSError):  # nothing more is there
            while word := self._socket.recv(64):
                self._told.add(word)
        return self._told

    def tell(self, word: Died | Unheard) -> None:
        """Say it to the rank, unless that has ended too."""
        with suppress(OSError):
            texts = {name: each for name in word.__struct_fields__ if isinstance(each := getattr(word, name), str)}
            plain = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
            self._socket.send(msgspec.json.encode(msgspec.structs.replace(word, **plain)))

    def close(self) -> None:
        self._socket.close()


class LocalRank:
    """One child, its line to the launcher, and the thread that prints what it says."""

    def __init__(
        self, rank: int, variables: dict[str, str], be_rank: Callable[[], int], say: Callable[[bytes], None]
    ) -> None:
        self.rank, self.line, self._say = rank, Child(), say
        self.last_words = ""
        self.buried = self.told = False
        self._said, theirs = CONTEXT.Pipe(duplex=False)
        util.register_after_fork(self, LocalRank._let_go)
        self.process = CONTEXT.Process(
            target=be_child, args=(be_rank, variables, self.line.theirs, theirs, os.getpid())
        )
        self.process.start()
        self.line.theirs.close()
        theirs.close()
        self.printer = threading.Thread(target=self._pass_on, daemon=True)

    def _let_go(self) -> None:
        """In a rank: the launcher's ends are not for it."""
        self._said.close()
        self.line.close()

    def _pass_on(self) -> None:
        with open(self._said.fileno(), "rb", closefd=False) as said:
            for output in said:
                words = output.rstrip(b"\r\n")
                self.last_words = words.decode(errors="replace")
                self._say(b"rank %d | %s" % (self.rank, words))

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def obituary(self) -> Died | None:
        """Who died and how, if nobody else says it."""
        code, joined = self.process.exitcode or 0, self.line.joined()
        if code < 0:
            how, spoke = f"was killed by {signal.Signals(-code).name}", False
        elif code in STOPPED or code == 0 or joined or self.told:  # then it ends for another
            return None
        else:
            how, spoke = f"ended with exit code {code}", code in SPOKE
        when = "" if joined else f" {UNMET}"
        self.printer.join(timeout=0.5)
        why = f": {self.last_words[:MAX_TEXT]}" if spoke and self.last_words else ""
        return Died(self.rank, how.removeprefix("was "), f"rank {self.rank} {how}{when}{why}", spoke)


def free_port() -> int:
    """A TCP port of this machine that nobody uses, and that nobody is given before it is used.

    Programs that ask for any port get one of the range in ip_local_port_range, connections too: of a port from there
    that was free here, rank 0 found a second later that it was taken (once in 6,100 tests).
    """
    given_from = 0
    with suppress(OSError):
        given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        asked = FIRST_PORT + secrets.randbelow(given_from - FIRST_PORT) if given_from > FIRST_PORT else 0
        with suppress(OSError), socket.create_server(("127.0.0.1", asked)) as server:
            return int(server.getsockname()[1])


def variables(config: Config, rank: int, port: int, key: str) -> dict[str, str]:
    """What tells a process that it is this rank; without a `key` it finds one by LAB_KEY_FILE."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **({"LAB_KEY": key} if key else {}),
    }  # fmt: skip


def be_child(
    be_rank: Callable[[], int], given: dict[str, str], line: socket.socket, said: Connection, parent: int
) -> None:
    """In the child: a session, streams and variables of its own, then the rank; ends with its exit code."""
    os.setsid()  # a terminal's Ctrl-C comes through `forward`, once
    die_with(parent)  # elsewhere a rank ends at the next line that it prints
    for number in heeded():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    streams(said)
    os.environ.update(given | {VARIABLE: str(line.detach())})
    sys.exit(be_rank())


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of process `parent`, which started this one; nothing elsewhere than on
    Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(137)


def streams(said: Connection) -> None:
    """Nothing on the standard input; what is printed goes to `said`, a line at a time."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(said.fileno(), number)
    said.close()
    encoding = sys.stdout.encoding
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding, closefd=False)


def _wait(ranks: list[LocalRank], stopped_at: list[float], failed_grace_s: float, say: Callable[[bytes], None]) -> None:
    """Until every rank has ended; those that outlive a signal or a failed rank for too long are killed."""
    failed_at = None
    while any(each.process.exitcode is None for each in ranks):
        now = time.monotonic()
        if failed_at is None and any(each.process.exitcode for each in ranks):
            failed_at = now
        if not stopped_at:
            _bury(ranks, say)
        late = stopped_at and now - stopped_at[0] > STOP_GRACE_S
        stuck = failed_at is not None and now - failed_at > failed_grace_s
        if late or (stuck and not any(each.line.may_leave() for each in ranks)):
            for each in ranks:
                each.process.kill()
        time.sleep(POLL_S)


def _bury(ranks: list[LocalRank], say: Callable[[bytes], None]) -> None:
    for dead in ranks:
        if dead.buried or dead.process.exitcode is None:
            continue
        dead.buried = True
        obituary = dead.obituary()
        if obituary is not None:
            say(obituary.sentence.encode())
            for other in ranks:
                if other.process.exitcode is None:
                    other.line.tell(obituary)
                    other.told = True


def worst(return_codes: list[int]) -> int:
    """The worst of the ranks' codes: 2, 1, 3, a signal's 128+n, 143, 0."""
    codes = {143 if code == -signal.SIGHUP else 128 - code if code < 0 else code for code in return_codes}
    for code in (2, 1, 3):
        if code in codes:
            return code
    signalled = codes - {143, 0}
    return max(signalled) if signalled else 143 if 143 in codes else 0


def needed(world_size: int) -> int:
    """How many files each process of a run of so many local ranks may open.

    A launcher has 7 + 4N at most, a rank 68 at N=4 and 94 at N=8 (moe, whose grid has a group an axis): this is above
    each by 20 at least.
    """
    return 56 + 8 * world_size


def refuse_too_few(world_size: int) -> None:
    """Raise ConfigError where this process, and so each that it starts, may open fewer."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed(world_size):
        raise ConfigError(
            [
                f"a process may open {allowed} files here, and {world_size} local ranks need"
                f" {needed(world_size)} each: set `ulimit -n {needed(world_size)}` or more"
            ]
        )


class LauncherPipe:
    """A rank's end; where no launcher has started it, nothing is ever heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = self._joined = False
        self._tell_death: Callable[[int, str], None] = lambda rank, how: None  # noqa: ARG005
        self._word: Died | None = None
        self._unheard = ""
        self._on_unheard: Callable[[str], None] | None = None
        self._socket: socket.socket | None = None
        number = os.environ.pop(VARIABLE, "")
        if number:
            with suppress(OSError, ValueError):  # a variable that somebody else has set
                self._socket = socket.socket(fileno=int(number))
        if self._socket is not None:
            threading.Thread(target=self._listen, args=(self._socket,), name="parent", daemon=True).start()

    def tell_unheard(self, tell: Callable[[str], None]) -> None:
        """Call `tell` once the launcher cannot print any more, with the reason; at once where it is so already."""
        with self._lock:
            self._on_unheard = tell
            if self._unheard:
                tell(self._unheard)

    def begin_to_wait(self) -> None:
        """From now on this rank waits for all others."""
        with self._lock:
            self._waits = True
            self._heed()

    def joined(self, tell_death: Callable[[int, str], None] = lambda rank, how: None) -> None:  # noqa: ARG005
        """All ranks have met: from now on rank 0's server names those that die, and `tell_death` hears how."""
        with self._lock:
            self._joined, self._tell_death = True, tell_death
        self._tell(JOINED)

    def may_leave(self) -> None:
        """From now on ranks that die end nobody else: the others need as long as they need."""
        self._tell(MAY_LEAVE)

    def _tell(self, word: bytes) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(word)

    def _listen(self, from_parent: socket.socket) -> None:
        with suppress(OSError):
            while data := from_parent.recv(65536):
                with suppress(ValueError), self._lock:  # it is no word: the descriptor may be another's
                    word = WORD.decode(data)
                    if isinstance(word, Unheard):
                        self._hear_unheard(word.why)
                    elif self._joined:
                        self._tell_death(word.rank, word.how)
                    else:
                        self._word = self._word or word  # what comes later comes of it
                        self._heed()

    def _hear_unheard(self, why: str) -> None:
        first, self._unheard = not self._unheard, why
        if first and self._on_unheard is not None:
            with suppress(Exception):  # a full disk takes no line of it either
                self._on_unheard(why)

    def _heed(self) -> None:
        """End, if there is a reason to."""
        if self._word is None or self._joined or (self._word.spoke and not self._waits):
            return
        printed(f"broken     {self._word.sentence}")
        os._exit(3)
