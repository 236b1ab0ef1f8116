"""Links that break or get slow, of this rank's own sockets and by the kernel, with no privilege.

A socket has a filter (socket(7), SO_ATTACH_FILTER) that decides which packets arrive: one that drops all of them cuts
it off, in TCP with every acknowledgement, so that the other end sends again and again into nothing. And it has a pace
(SO_MAX_PACING_RATE), above which it sends no data. Since Linux 6.15 a filter of TCP takes NET_ADMIN; without it a cut
drops heartbeats alone, and if it is for good the rank's connections send nothing. Delays, and rates of a whole
container, are compose/net.yaml's.

    in     this rank hears nobody: all its sockets drop what comes
    out    nobody hears it: the others drop its heartbeats, and its connections send next to nothing
    both   it hears nobody, and the others drop its heartbeats; of its tensors leaves what needs no acknowledgement
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47
NOTHING_S, UNBOUND = 1, 0xFFFFFFFF  # bytes a second
# Instructions of a packet filter (linux/bpf_common.h): operation, steps if true, steps if false, number.
LOAD_HALF, LOAD_WORD, IF_EQUAL, RETURN = 0x28, 0x20, 0x15, 0x06
NETWORK_HEADER, SOURCE_IP = 0xFFF00000, 12  # SKF_NET_OFF, and where an IPv4 header has its source
KEEP, DROP = 0xFFFFFFFF, 0
ALL = [(RETURN, 0, 0, DROP)]

Instructions = list[tuple[int, int, int, int]]
Address = tuple[str, int]


def hear_nobody() -> bool:
    """Drop all that comes to this process from other ranks, until `hear_again`; False where this kernel lets it drop
    datagrams alone."""
    refused = []

    def drop(each: socket.socket) -> None:
        try:
            attach(each, ALL)
        except PermissionError:
            refused.append(each.type)

    _each(drop)
    return not refused


def hear_again() -> None:
    """Take the filters away; TCP sends again what was dropped."""
    _each(_detach)


def deafen_to(post: socket.socket, sources: Collection[Address]) -> None:
    """Drop the heartbeats that come from any of `sources`, and from nobody else."""
    if sources:
        attach(post, from_any_of(sources))
    else:
        _detach(post)


def send_nothing() -> None:
    """Let this process's connections send a byte a second; for good, since a packet that waits so long waits on."""
    set_pace(NOTHING_S)


def set_pace(bytes_s: int) -> None:
    """The most that each connection of this process sends in a second."""
    _each(lambda each: each.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", min(bytes_s, UNBOUND))))


def from_any_of(sources: Iterable[Address]) -> Instructions:
    """A filter of UDP that drops what these addresses sent."""
    return [*(step for source in sources for step in from_address(*source)), (RETURN, 0, 0, KEEP)]


def from_address(ip: str, port: int) -> Instructions:
    """Drop what one address sent, by its port, and where that is IPv4 by its IP too; else go on behind it."""
    address = ipaddress.ip_address(ip)
    if address.version == 6:
        return [(LOAD_HALF, 0, 0, 0), (IF_EQUAL, 0, 1, port), (RETURN, 0, 0, DROP)]
    same_ip = [(LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_IP), (IF_EQUAL, 0, 1, int(address))]
    return [(LOAD_HALF, 0, 0, 0), (IF_EQUAL, 0, 3, port), *same_ip, (RETURN, 0, 0, DROP)]


def attach(each: socket.socket, instructions: Instructions) -> None:
    """Give a socket a filter in the place of the one that it has; raises OSError where the system has none."""
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    held = ctypes.create_string_buffer(program)
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(instructions), ctypes.addressof(held)))


def _detach(each: socket.socket) -> None:
    with suppress(FileNotFoundError, PermissionError):  # one that came later has none, nor has one that got none
        each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _each(act: Callable[[socket.socket], None]) -> None:
    """Do it to all sockets of this process by which it reaches another rank."""
    for each in _own():
        act(each)


def _own() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _again(int(name)) as found:  # a file, or the listing itself, closed by now
            if found.family in (socket.AF_INET, socket.AF_INET6):
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
