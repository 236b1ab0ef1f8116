"""Small processes beside a rank, of the standard library alone: one beats for it, one says its last words.

The watch is a thread, and a thread needs the interpreter's lock: a call into C++ that keeps it, or a collector's pause,
holds the heartbeats back, and after LAB_LOST_AFTER_S the others would give up a rank that computes. So each beat goes
to the heartbeat helper too; when none has come for `LATE_S` it repeats the last one with a higher count, at the same
period. It imports neither torch nor the lab (9 MB), ends with its rank (the kernel closes their socket), and says
nothing for a rank that does not run: one that was stopped (SIGSTOP), one that has ended, one silent for STANDS_IN_S. If
it goes, nothing is lost: the rank beats itself as long as it can.

    python -m distlab.cluster.heartbeat_helper                          the last words of a rank that the kernel killed
    python -m distlab.cluster.heartbeat_helper PARENT MODULE WORDS...   `python -m MODULE WORDS`, which ends with PARENT
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from distlab.cluster.message_signer import MessageSigner

Address = TypeVar("Address")
PACKET_BYTES = 65536
PERIOD_S = 0.25
AT_A_TIME = 16  # others that hear one beat
LATE_S = 1.5 * PERIOD_S
STANDS_IN_S = 60.0  # a rank whose lock is kept for longer hangs: it is named as lost, and not waited for
TOP = Path(__file__).parents[2]
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from distlab.cluster.heartbeat_helper import main;"
    " main(*map(int, sys.argv[2:]))"
)


class HeartbeatHelper:
    """The rank's end: starts the process, and hands it every beat. On a system without /proc there is none."""

    def __init__(self, udp: socket.socket, key: bytes, token: bytes) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        if not Path("/proc/self/stat").exists():  # who cannot see that a rank was stopped must not speak for it
            return
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._here.setblocking(False)
        handed = [there.fileno(), udp.fileno()]
        # Without site and the user's variables: 15 ms instead of 60, and nothing but what the standard library has.
        command = [sys.executable, "-S", "-E", "-s", "-c", PROGRAM, str(TOP), str(os.getpid()), *map(str, handed)]
        with there, suppress(OSError):  # a machine that starts no more processes still runs this rank
            self.process = subprocess.Popen(
                command, pass_fds=handed, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._hand([key.hex(), token.hex()])  # not in its command, which anybody reads

    def note(self, beat: dict[str, Any], addresses: list[tuple[str, int]]) -> None:
        """What is to be repeated, to whom, while the rank cannot."""
        self._hand([beat, addresses])

    def _hand(self, what: list[Any]) -> None:
        if self.process is not None:
            with suppress(OSError):  # it is gone, or stopped with a full buffer
                self._here.send(json.dumps(what).encode())

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self._here.close()
            try:
                self.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def main(parent: int, there: int, udp: int) -> None:
    """The process itself. A signal for all processes of a terminal or a container is for the rank to answer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=there) as notes, socket.socket(fileno=udp) as post:
        start_heartbeat_helper(parent, notes, post)


def start_heartbeat_helper(parent: int, notes: socket.socket, post: socket.socket) -> None:
    """Beat for process `parent` whenever it is late, until its end of `notes` is closed."""
    key, token = (bytes.fromhex(each) for each in json.loads(notes.recv(PACKET_BYTES) or '["", ""]'))
    seal = MessageSigner(key)
    last: tuple[dict[str, Any], list[list[Any]]] | None = None
    noted_at = now = time.monotonic()
    turn = 0
    while os.getppid() == parent or parent == os.getpid():  # a thread of the rank's own, in a test
        if select.select([notes], [], [], max(0.0, now + PERIOD_S - time.monotonic()))[0]:
            packet = notes.recv(PACKET_BYTES)
            if not packet:
                return
            last, noted_at = json.loads(packet), time.monotonic()
            now = noted_at + LATE_S - PERIOD_S
            continue
        now = time.monotonic()
        if last is not None and now - noted_at < STANDS_IN_S and runs(parent):
            datagram = seal.seal(again(last[0], now - noted_at, now), token)
            for ip, port in turn_of(last[1], turn):
                with suppress(OSError):
                    post.sendto(datagram, (ip, port))
            turn += 1


def again(beat: dict[str, Any], later_s: float, now: float) -> dict[str, Any]:
    """The same beat `later_s` after it was made: counted on, by the clock that the rank itself counts by."""
    counts = [*beat["counts"]]
    counts[beat["rank"]] = count_at(now)
    return beat | {"counts": counts, "in_phase_s": round(beat["in_phase_s"] + later_s, 2)}


def turns_of(others: int) -> int:
    """In how many turns a rank beats to so many others: 16 at a time, else 1,024 ranks would hear 4,092 beats a second.

    What one knows the next ones tell on, so news go round all the same (`hops_of`).
    """
    return max(1, -(-others // AT_A_TIME))


def hops_of(others: int) -> int:
    """Over how many beats a piece of news reaches so many others."""
    hops, reached = 1, AT_A_TIME
    while reached < others:
        hops, reached = hops + 1, reached * AT_A_TIME
    return hops


def turn_of(addresses: Sequence[Address], turn: int) -> Sequence[Address]:
    """Those to whom this turn's beat goes."""
    turns = turns_of(len(addresses))
    return addresses[turn % turns :: turns]


def count_at(now: float) -> int:
    """The number of a beat that is sent `now`, in monotonic seconds: a rank and its stand-in never count backwards."""
    return int(now * 1000)


def runs(process: int) -> bool:
    """Whether a process is there and was not stopped."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"T", b"t", b"Z", b"X")


# The kernel kills the largest process of a container whose memory is full, and gives it no time to speak; its last
# heartbeat may be older than the growth that killed it. So the watch leaves the words, sealed, and the others'
# addresses in a file, and the shell that started the rank (workers/entrypoint.sh) reads the kernel's count of such
# kills when the rank is gone, and runs this module.

# The entry point makes it, empty, where it stays behind; a rank without one leaves nothing.
LAST_WORDS = Path("/tmp/distlab-last-words")


def leave_last_words(
    rank: int, words: list[bytes], family: int, addresses: list[tuple[str, int]], place: Path = LAST_WORDS
) -> None:
    """Write down what to tell and whom, for this user alone, if somebody will be there to read it."""
    if place.exists():
        written = place.with_suffix(".new")
        will = {"rank": rank, "words": [word.hex() for word in words], "family": family, "addresses": addresses}
        written.touch(mode=0o600)
        written.write_text(json.dumps(will))
        os.replace(written, place)


def say_last_words(place: Path = LAST_WORDS) -> str:
    """Tell the other ranks, if this one had come to know them; returns the sentence for its own log."""
    try:
        will: dict[str, Any] = json.loads(place.read_text())
    except (OSError, ValueError):  # it had not met the others yet
        return "this rank was killed by the OOM killer before it met the others"
    with socket.socket(will["family"], socket.SOCK_DGRAM) as udp:  # which hears nothing
        for word in will["words"]:
            for ip, port in will["addresses"]:
                with suppress(OSError):
                    udp.sendto(bytes.fromhex(word), (ip, port))
    return f"rank {will['rank']} was killed by the OOM killer: its container's limit is LAB_MEMORY"


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of process `parent`, which started this one; nothing elsewhere than on
    Linux."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(137)


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(say_last_words(), flush=True)
    else:  # a report that a rank of a broken cluster has drawn: it would outlive the rank, which ends by `os._exit`
        die_with(int(sys.argv[1]))
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
