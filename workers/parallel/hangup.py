"""To hang up: the sockets that a process has open, and the end of those that nobody else told it of.

gloo and torch's store give no access to their sockets, so those of a group are told by when they were opened. A
descriptor's number is given to another socket as soon as it is closed; its inode is that of one socket alone.
"""

import os
import socket
import stat
from contextlib import suppress
from typing import NamedTuple


class Open(NamedTuple):
    """One socket of this process."""

    descriptor: int
    inode: int


def sockets() -> set[Open]:
    """All that are open."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing itself
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.add(Open(descriptor, status.st_ino))
    return found


def shut_down(descriptor: int) -> None:
    """End a connection for both sides; a socket that listens is left alone, since gloo aborts the process over it."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
