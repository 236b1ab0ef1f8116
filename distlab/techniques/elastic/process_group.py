"""A gloo group of some of the processes, created and left repeatedly in one process, without torch's global state.

A collective waits in C++ until its peers send or disconnect. Only the end of its sockets wakes it, so `cut` shuts them
down: the waiting thread raises, and so do peers that wait for this one. ProcessGroupGloo's `abort` does not do that
(torch 2.13: the thread keeps waiting).

Even the end of a socket is not always noticed: a send of gloo that is under way may never be notified, and `waitSend`
waits for its full timeout (100 KB among 3 members: in 6 of 60 cuts). So a separate thread waits, and the caller polls
whether the group was cut.
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

# Disconnecting: the sockets that a process has open, and how to end them.
#
# gloo and torch's store do not expose their sockets, so a group's sockets are those opened while it was created. A
# closed descriptor's number is reused for other sockets; an inode identifies one socket.


class OpenSocket(NamedTuple):
    descriptor: int
    inode: int


def sockets() -> set[OpenSocket]:
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.add(OpenSocket(descriptor, status.st_ino))
    return found


def shut_down(descriptor: int) -> None:
    """End a connection for both sides; listening sockets are left alone, since gloo aborts the process over them."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)


CONNECT_S = 0.3  # for a store's host to accept: torch's own client retries for a long time
FORM_S = 10.0
POLL_S = 0.02
Result = TypeVar("Result")
Addressed = tuple[int, Tensor]  # sent to, or received from, the member of this number


class Regroup:
    """Groups of one process, one at a time. `others` are sockets that belong to no group, whenever they were opened."""

    def __init__(
        self, ip: str, key: bytes, timeout_s: float, others: Callable[[], set[int]], purpose: str = "store"
    ) -> None:
        self.ip, self.timeout_s, self._key, self._others, self._purpose = ip, timeout_s, key, others, purpose
        self.called_bytes = 0.0  # of all collectives so far, per member, if the best algorithm ran them
        self.place = self._size = 0
        self._is_cut = False  # since the group's creation began
        self._stuck = False  # a wait in it has failed: gloo may still wait
        self._members: KeyedStore | None = None  # of the current group; C++ does not keep it alive
        self._gloo: Any = None  # a ProcessGroup, whose methods torch declares in part
        self._before: set[OpenSocket] | None = None  # sockets open before the group was created; None without a group

    def form(self, name: str, place: int, size: int, host: tuple[str, int], is_intact: Callable[[], bool]) -> None:
        """Become member `place` of `size` in a new group, over the store at `host`, an address and a port.

        Raises RuntimeError on failure, soon after `is_intact()` turns false or after a cut: otherwise it would wait for
        a member that dies meanwhile, and sockets opened after one cut need another.
        """
        self.leave()
        self.place, self._size = place, size
        self._is_cut, self._before = False, sockets()
        formed = threading.Event()
        watcher = threading.Thread(target=self._cut_unless, args=(is_intact, formed), daemon=True)
        watcher.start()
        try:
            self._gloo = self._create_group(name, place, size, host)
        finally:
            formed.set()
            watcher.join()
        if self._is_cut or not is_intact():
            raise RuntimeError("a member left while the group was created, or cut it")

    def _cut_unless(self, is_intact: Callable[[], bool], formed: threading.Event) -> None:
        while not formed.wait(POLL_S):
            if self._is_cut or not is_intact():
                self.cut()

    def _create_group(self, name: str, place: int, size: int, host: tuple[str, int]) -> Any:
        try:
            socket.create_connection(host, CONNECT_S).close()
        except OSError:
            raise RuntimeError(f"no store listens at {host[0]}:{host[1]}") from None
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
        """Connect to the store.

        If the host dies after the request, there is no connection that a cut could end. A short timeout would fail
        where this process gets no core: 0.3 s did, in tests.
        """
        lost = f"the store at {host[0]}:{host[1]} was lost while the group was created"
        try:
            return self._unless_cut(lambda: KeyedStore(*host, self._key, FORM_S, self._purpose), lost)
        except OSError as error:
            raise RuntimeError(f"{lost}: {error}") from None

    def _unless_cut(self, wait_for: Callable[[], Result], message: str) -> Result:
        """Return the result of `wait_for`, run in a thread; if this group is cut meanwhile, abandon the thread and
        raise RuntimeError."""
        result: Future[Result] = Future()

        def run() -> None:
            try:
                result.set_result(wait_for())
            except Exception as error:  # passed to the caller
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([result], POLL_S).done:
            if self._is_cut:
                raise RuntimeError(message)
        return result.result()

    def cut(self) -> None:
        """Cut the group, from any thread: a thread that waits in it, or for its creation, raises RuntimeError."""
        before, self._is_cut = self._before, True
        if before is not None:
            opened, others = sockets() - before, self._others()
            for each in opened:
                if each.descriptor not in others:
                    shut_down(each.descriptor)

    def leave(self) -> None:
        """Disconnect; members that still wait for this process raise RuntimeError."""
        self.cut()
        self._before = None
        kept, self._gloo = [self._gloo, self._members], None
        self._members = None
        if self._stuck:  # its destructor waits for a thread of gloo that waits
            threading.Thread(target=kept.clear, daemon=True).start()
            self._stuck = False

    # --- collectives; all raise RuntimeError if a member was lost ---

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        def all_of_them() -> None:
            for work in works:
                work.wait()

        self._stuck = True
        self._unless_cut(all_of_them, "the group was cut while gloo waited")
        self._stuck = False

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all members, in place."""
        self._wait_for([self._gloo.allreduce([tensor])])
        self.called_bytes += 2 * (self._size - 1) / self._size * tensor.nbytes
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Copy the tensor of member number `root`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait_for([self._gloo.broadcast([tensor], options)])
        return tensor

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all members [n], all of one length, concatenated: [N·n]."""
        whole = mine.new_empty(self._size * len(mine))
        self._wait_for([self._gloo.allgather([list(whole.split(len(mine)))], [mine])])
        self.called_bytes += (self._size - 1) * mine.nbytes
        return whole

    def exchange(self, sent: Iterable[Addressed], received: Iterable[Addressed]) -> None:
        """Send and receive all of these at once; messages between two members match in their order."""
        sent = list(sent)
        calls = [(self._gloo.recv, *each) for each in received] + [(self._gloo.send, *each) for each in sent]
        self._wait_for([call([tensor], peer, 0) for call, peer, tensor in calls if tensor.numel()])
        self.called_bytes += sum(tensor.nbytes for _, tensor in sent)
