"""A gloo group of some of the processes, made and left again in the same process: torch's global state has no part.

A collective waits in C++ until its peers send or hang up. What wakes it is the end of its sockets, so to `cut` a group
is to shut them down: the waiting thread raises, and so do the peers that wait for this one. `abort` of
ProcessGroupGloo does not (torch 2.13: the thread waits on).

Nor does the end of a socket always: a send of gloo's that is under way then may never be told, and `waitSend` waits out
its own bound (100 KB among 3 members: in 6 of 60 ends). So a thread of its own waits, and whoever wants the result
looks whether the group was cut.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.transport.store import KeyedStore

# To hang up: the sockets that a process has open, and the end of those that nobody else told it of.
#
# gloo and torch's store give no access to their sockets, so those of a group are told by when they were opened. A
# descriptor's number is given to another socket as soon as it is closed; its inode is that of one socket alone.


class Open(NamedTuple):
    descriptor: int
    inode: int


def sockets() -> set[Open]:
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


ASK_S = 0.3  # for a store's host to accept: torch's own client tries again and again where nobody listens
FORM_S = 10.0
LOOK_S = 0.02
Result = TypeVar("Result")
Addressed = tuple[int, Tensor]  # goes to the member of this number, or is filled with what comes from it


class Regroup:
    """Groups of one process, one at a time. `others` are the sockets that are no group's, whenever they were opened."""

    def __init__(
        self, ip: str, key: bytes, timeout_s: float, others: Callable[[], set[int]], purpose: str = "store"
    ) -> None:
        self.ip, self.timeout_s, self._key, self._others, self._purpose = ip, timeout_s, key, others, purpose
        self.called_bytes = 0.0  # of all collectives so far: what the best algorithm sends of them a member
        self.place = self._size = 0
        self._is_cut = False  # since the group began to be made
        self._stuck = False  # a wait in it has not come to a good end: gloo may wait on
        self._members: KeyedStore | None = None  # in which those of the group have met: C++ does not keep it
        self._gloo: Any = None  # a ProcessGroup, whose methods torch declares in part
        self._before: set[Open] | None = None  # the sockets that were open before the group; None where there is none

    def form(self, name: str, place: int, size: int, host: tuple[str, int], stands: Callable[[], bool]) -> None:
        """Be number `place` of `size` in a new group, over the store at `host`, an address and a port.

        Raises RuntimeError where it fails, soon after it no longer `stands` or was cut: a member that dies meanwhile
        would be waited for, and sockets are opened after one cut that only another ends.
        """
        self.leave()
        self.place, self._size = place, size
        self._is_cut, self._before = False, sockets()
        formed = threading.Event()
        watcher = threading.Thread(target=self._cut_unless, args=(stands, formed), daemon=True)
        watcher.start()
        try:
            self._gloo = self._formed(name, place, size, host)
        finally:
            formed.set()
            watcher.join()
        if self._is_cut or not stands():
            raise RuntimeError("a member went while the group was made, or called the others")

    def _cut_unless(self, stands: Callable[[], bool], formed: threading.Event) -> None:
        while not formed.wait(LOOK_S):
            if self._is_cut or not stands():
                self.cut()

    def _formed(self, name: str, place: int, size: int, host: tuple[str, int]) -> Any:
        try:
            socket.create_connection(host, ASK_S).close()
        except OSError:
            raise RuntimeError(f"nobody listens at the store of {host[0]}:{host[1]}") from None
        self._members = store = self._store(host)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.ip)]
        options._timeout = timedelta(seconds=FORM_S)
        prefixed = dist.PrefixStore(name, store)
        gloo = dist.ProcessGroupGloo(prefixed, place, size, options)
        gloo._set_default_timeout(timedelta(seconds=self.timeout_s))
        group = dist.ProcessGroup(prefixed, place, size)  # whose calls are operations of c10d, as of any group
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    def _store(self, host: tuple[str, int]) -> KeyedStore:
        """Connect to it.

        A host that dies after it was asked leaves no connection for a cut to end. A short bound would fail where this
        process has no core: 0.3 s did, in tests.
        """
        went = f"the store of {host[0]}:{host[1]} went while it was connected to"
        try:
            return self._unless_cut(lambda: KeyedStore(*host, self._key, FORM_S, self._purpose), went)
        except OSError as error:
            raise RuntimeError(f"{went}: {error}") from None

    def _unless_cut(self, wait_for: Callable[[], Result], words: str) -> Result:
        """What comes of it, in a thread that is left to itself where this group is cut meanwhile; raises RuntimeError
        then."""
        came: Future[Result] = Future()

        def come() -> None:
            try:
                came.set_result(wait_for())
            except Exception as error:  # or nobody would hear of it
                came.set_exception(error)

        threading.Thread(target=come, daemon=True).start()
        while not wait([came], LOOK_S).done:
            if self._is_cut:
                raise RuntimeError(words)
        return came.result()

    def cut(self) -> None:
        """From any thread: whoever waits in the group, or for it to stand, raises RuntimeError."""
        before, self._is_cut = self._before, True
        if before is not None:
            opened, others = sockets() - before, self._others()
            for each in opened:
                if each.descriptor not in others:
                    shut_down(each.descriptor)

    def leave(self) -> None:
        """Hang up; who still waits for this process raises RuntimeError."""
        self.cut()
        self._before = None
        held, self._gloo = [self._gloo, self._members], None
        self._members = None
        if self._stuck:  # its end waits for a thread of gloo's that waits
            threading.Thread(target=held.clear, daemon=True).start()
            self._stuck = False

    # --- collectives; all raise RuntimeError where a member is gone ---

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        def all_of_them() -> None:
            for work in works:
                work.wait()

        self._stuck = True
        self._unless_cut(all_of_them, "the group was cut, and gloo waits on")
        self._stuck = False

    def sum(self, tensor: Tensor) -> Tensor:
        """In place, the sum over all members."""
        self._wait_for([self._gloo.allreduce([tensor])])
        self.called_bytes += 2 * (self._size - 1) / self._size * tensor.nbytes
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """In place, that of the member number `root`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait_for([self._gloo.broadcast([tensor], options)])
        return tensor

    def all_gather(self, mine: Tensor) -> Tensor:
        """The tensors of all members [n], all of one length, one after the other: [N·n]."""
        whole = mine.new_empty(self._size * len(mine))
        self._wait_for([self._gloo.allgather([list(whole.split(len(mine)))], [mine])])
        self.called_bytes += (self._size - 1) * mine.nbytes
        return whole

    def exchange(self, sent: Iterable[Addressed], received: Iterable[Addressed]) -> None:
        """Send and fill all of these at once; between two members they are matched in their order."""
        sent = list(sent)
        calls = [(self._gloo.recv, *each) for each in received] + [(self._gloo.send, *each) for each in sent]
        self._wait_for([call([tensor], peer, 0) for call, peer, tensor in calls if tensor.numel()])
        self.called_bytes += sum(tensor.nbytes for _, tensor in sent)
