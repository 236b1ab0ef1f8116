"""Faults that a rank injects into itself, each by a mechanism that takes no privilege: LAB_FAULTS says which and when
(distlab/lab/config/fault_spec.py), distlab/lab/rank/fault_injection.py calls them and compares what happens with what
should.

The kernel kills, stops or slows the process; it drops what arrives at its sockets, or lets out little; or the disk is
full.
"""

import ctypes
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A disk that is full: Linux's /dev/full, on which every write fails as on a disk without room. It takes the place of
# this rank's log and records, so no other process meets it.

FULL = Path("/dev/full")


def fill(descriptors: list[int]) -> None:
    """From now on each write to these open files meets a disk that is full; raises OSError on a system without
    /dev/full."""
    full = os.open(FULL, os.O_WRONLY | os.O_APPEND)
    try:
        for each in descriptors:
            os.dup2(full, each)
    finally:
        os.close(full)


# Links that break or get slow, of this rank's own sockets and by the kernel, with no privilege.
#
# A socket has a filter (socket(7), SO_ATTACH_FILTER) that decides which packets arrive: one that drops all of them
# cuts it off, in TCP with every acknowledgement, so that the other end sends again and again into nothing. And it has
# a pace (SO_MAX_PACING_RATE), above which it sends no data. Since Linux 6.15 a filter of TCP takes NET_ADMIN; without
# it a cut drops heartbeats alone, and if it is for good the rank's connections send nothing. Delays, and rates of a
# whole container, are compose/net.yaml's.
#
#     in     this rank hears nobody: all its sockets drop what comes
#     out    nobody hears it: it sends no heartbeats, and its connections send next to nothing
#     both   it hears nobody, and sends no heartbeats; of its tensors leaves what needs no acknowledgement

SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47
NOTHING_S, UNBOUND = 1, 0xFFFFFFFF  # bytes a second
# Instructions of a packet filter (linux/bpf_common.h): operation, steps if true, steps if false, number.
RETURN, DROP = 0x06, 0
ALL = [(RETURN, 0, 0, DROP)]

Instructions = list[tuple[int, int, int, int]]


def hear_nobody(but: socket.socket | None = None) -> bool:
    """Drop all that comes to this process from other ranks, `but` on one connection, until `hear_again`; False where
    this kernel does not let it."""
    refused = []

    def drop(each: socket.socket) -> None:
        if but is not None and each.getsockname() == but.getsockname():
            return
        try:
            attach(each, ALL)
        except PermissionError:
            refused.append(each.type)

    _each(drop)
    return not refused


def hear_again() -> None:
    """Take the filters away; TCP sends again what was dropped."""
    _each(_detach)


def send_nothing() -> None:
    """Let this process's connections send a byte a second; for good, since a packet that waits so long waits on."""
    set_pace(NOTHING_S)


def set_pace(bytes_s: int) -> None:
    """The most that each connection of this process sends in a second."""
    _each(lambda each: each.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", min(bytes_s, UNBOUND))))


def attach(each: socket.socket, instructions: Instructions) -> None:
    """Give a socket a filter in the place of the one that it has; raises OSError where the system has none."""
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    held = ctypes.create_string_buffer(program)
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(instructions), ctypes.addressof(held)))


def _detach(each: socket.socket) -> None:
    with suppress(FileNotFoundError, PermissionError):  # one that came later has none, nor has one that got none
        each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _each(act: Callable[[socket.socket], None]) -> None:
    """Do it to all connections of this process to another one."""
    for each in _own():
        act(each)


def _own() -> Iterator[socket.socket]:
    near = {each.getsockname()[:2] for each in _connections()}
    for each in _connections():
        if each.getpeername()[:2] not in near:  # else both ends are here: rank 0's line to its own server
            yield each


def _connections() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _again(int(name)) as found:  # a file, or the listing itself, closed by now
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                yield found


@contextmanager
def _again(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, through another one, which is closed again; raises OSError where it is none."""
    again = os.dup(descriptor)
    try:
        found = socket.socket(fileno=again)
    except OSError:
        os.close(again)
        raise
    with found:
        yield found


# A rank's process is killed, stands still for a while, or gets less of its core: all by the kernel.
#
# The rank is stopped by SIGSTOP, which no thread of it sees. A process that stands still cannot wake itself: a small
# shell beside it does, and sleeps until then.

TURN_S = 0.1  # in which a slow rank runs for its share, and stands still for the rest: no heartbeat is late by it
WAKE = 'sleep "$1"; kill -CONT "$0"'
SLOW = 'while kill -STOP "$0" 2>/dev/null && sleep "$1" && kill -CONT "$0"; do sleep "$2"; done'


def kill() -> None:
    """End this process as the kernel does where memory is short: at once, and nothing of it says a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def pause(duration_s: float) -> None:
    """Stand still, all threads of this process."""
    _beside(WAKE, duration_s)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down(share: float) -> None:
    """From now on run for `share` of the time: what a neighbour does that takes the rest of the core."""
    _beside(SLOW, TURN_S * (1 - share), TURN_S * share)


def _beside(script: str, *seconds: float) -> None:
    subprocess.Popen(
        ["sh", "-c", script, str(os.getpid()), *(f"{each:.3f}" for each in seconds)], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
