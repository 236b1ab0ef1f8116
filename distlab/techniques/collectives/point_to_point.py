"""Messages between the ranks of a group, from which every hand-written collective is built.

gloo does not buffer sends: a send ends when its receive was posted and filled, so two ranks that both send first wait
for ever, even for 4 bytes. Two rules avoid this in every algorithm here: a round's receives are posted before its
sends, and no rank waits for a send whose receive its peer posts later.

A collective is a generator that yields each message when it needs it (`Steps`). Run to its end it is a blocking call;
run to its first yield its messages are under way while the caller computes (`Pending`). No thread is needed, since gloo
transfers the bytes itself.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.transport.tcp import Channel

# Scratch memory, reused from call to call.


class Scratch:
    """Keeps unused buffers for the next call."""

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, Tensor]] = []  # bytes, and the tensor last viewed on them

    @contextmanager
    def borrow(self, numel: int, like: Tensor) -> Iterator[Tensor]:
        """Yield `numel` uninitialised elements like `like` (device and dtype), until the block ends."""
        buffer, tensor = self._same(numel, like) or self._fitting(numel, like)
        try:
            yield tensor
        finally:
            self._free.append((buffer, tensor))

    def _same(self, numel: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a buffer with the same view as before: a new view takes 4 us, a tenth of a small call."""
        for index, (_, tensor) in enumerate(self._free):
            if tensor.numel() == numel and tensor.dtype == like.dtype and tensor.device == like.device:
                return self._free.pop(index)
        return None

    def _fitting(self, numel: int, like: Tensor) -> tuple[Tensor, Tensor]:
        nbytes = numel * like.element_size()
        fitting = [each for each in self._free if each[0].numel() >= nbytes and each[0].device == like.device]
        if fitting:
            smallest = min(fitting, key=lambda each: each[0].numel())
            self._free = [free for free in self._free if free is not smallest]
            buffer = smallest[0]
        else:
            # Drop a buffer that is too small for this call, so that growing sizes do not pile up.
            self._free = self._free[1:]
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return buffer, buffer[:nbytes].view(like.dtype)

    def poison(self) -> None:
        """Overwrite free buffers with bytes that are NaN in every floating type, to expose reads of uninitialised
        memory."""
        for buffer, _ in self._free:
            buffer.fill_(255)

    def release(self) -> None:
        """Free all buffers."""
        self._free = []


class Message(Protocol):
    """A tensor that is being sent or received."""

    @property
    def done(self) -> bool:
        """Return whether it is over, where that is known without waiting."""

    def wait(self) -> None:
        """Return once the tensor is received, or may be changed again; raises RuntimeError with the peer's rank."""


RECEIVE, SEND = "receive from", "send to"
TAGS_PER_CALL = 256  # for a call that runs concurrently with others


@dataclass(slots=True)
class GroupMessage:
    """A message of a process group. A world of one, and an empty chunk, send nothing: `work` is None then."""

    work: dist.Work | None
    action: str  # such as "receive from", for errors
    peer: str

    @property
    def done(self) -> bool:
        """Return whether there is nothing to wait for; gloo's messages are known to be over only after a wait."""
        return self.work is None

    def wait(self) -> None:
        # gloo counts completions: a second wait on the same work would never return.
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.action} {self.peer} failed: {error}") from error


NOTHING = GroupMessage(None, "", "")  # an empty tensor, which is not sent
Steps = Generator[Message, None, None]
Addressed = Iterable[tuple[int, Tensor]]  # (rank in the group, tensor)
Begin = Callable[[list[Tensor], int, int], Message]  # ([tensor], peer, tag)


class Pending:
    """A running collective. Ranks must start, and finish, their collectives in the same order."""

    def __init__(self, steps: Iterator[Message]) -> None:
        self._steps = steps
        self._awaited = next(steps, None)

    def advance(self) -> bool:
        """Continue as far as messages have arrived, if the carrier knows; return whether it is finished."""
        while self._awaited is not None and self._awaited.done:
            self._awaited = next(self._steps, None)
        return self._awaited is None

    def wait(self) -> None:
        """Finish; the result is then in its tensor. Further calls return at once."""
        if self._awaited is not None:
            self._awaited.wait()
            for message in self._steps:
                message.wait()
            self._awaited = None


class Peers:
    """The other ranks of `group`, by their rank in it, and reusable scratch memory.

    Their messages go over the group's own send and receive, or over a `channel` of plain TCP.
    """

    def __init__(self, group: dist.ProcessGroup, channel: Channel | None = None) -> None:
        self.group, self.channel = group, channel
        self._receive: Begin = channel.recv if channel else partial(self._message_of_group, RECEIVE)
        self._send: Begin = channel.send if channel else partial(self._message_of_group, SEND)
        self.rank = group.rank()
        self.world_size = group.size()
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
        self.batched = dist.get_backend(group) == "nccl"
        self.memory = Scratch()
        self._tags: Iterator[int] = cycle(range(1, 2**20))

    def new_tag(self) -> int:
        """Return a tag for the next collective, the same on all ranks, so that concurrent ones do not mix."""
        return next(self._tags)

    def for_call(self, number: int) -> "Peers":
        """Return the same peers for one of several concurrent calls, with its own tags and scratch memory, so that the
        calls may run in any order."""
        return self._copy_with(_tags=count(-number * TAGS_PER_CALL), memory=Scratch())

    def _copy_with(self, **changed: object) -> "Peers":
        copy = object.__new__(type(self))
        copy.__dict__ = self.__dict__ | changed
        return copy

    def after(self, distance: int) -> int:
        """Return the rank `distance` further around the ring; negative: before."""
        return (self.rank + distance) % self.world_size

    def post(self, tag: int, receives: Addressed = (), sends: Addressed = ()) -> tuple[list[Message], list[Message]]:
        """Start one round's messages, receives first; empty tensors are not sent. Return (receives, sends) in order."""
        if self.batched:
            return self._post_batch(list(receives), list(sends))
        receive, send = self._receive, self._send
        received = [receive([tensor], peer, tag) if tensor.numel() else NOTHING for peer, tensor in receives]
        return received, [send([tensor], peer, tag) if tensor.numel() else NOTHING for peer, tensor in sends]

    def send(self, tag: int, peer: int, tensor: Tensor) -> Message:
        """Start to send one tensor to a rank."""
        return self.post(tag, sends=[(peer, tensor)])[1][0]

    def receive(self, tag: int, peer: int, tensor: Tensor) -> Message:
        """Start to receive one tensor from a rank, into `tensor`."""
        return self.post(tag, receives=[(peer, tensor)])[0][0]

    def _message_of_group(self, action: str, tensors: list[Tensor], peer: int, tag: int) -> Message:
        begin = self.group.recv if action == RECEIVE else self.group.send
        return GroupMessage(begin(tensors, peer, tag), action, self._names[peer])

    def _post_batch(
        self, receives: list[tuple[int, Tensor]], sends: list[tuple[int, Tensor]]
    ) -> tuple[list[Message], list[Message]]:
        """Post a round in one launch: NCCL runs messages in stream order, and two ranks could wait for each other."""
        planned = [(RECEIVE, *entry) for entry in receives] + [(SEND, *entry) for entry in sends]
        operations = [
            dist.P2POp(dist.irecv if action == RECEIVE else dist.isend, tensor, group=self.group, group_peer=peer)
            for action, peer, tensor in planned
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        padded = [*works, *[None] * (len(planned) - len(works))]
        messages: list[Message] = [
            GroupMessage(work, action, self._names[peer])
            for work, (action, peer, _) in zip(padded, planned, strict=True)
        ]
        return messages[: len(receives)], messages[len(receives) :]

    def scratch(self, numel: int, like: Tensor) -> AbstractContextManager[Tensor]:
        """Return `numel` uninitialised elements, on the device and of the dtype of `like`, until the block ends."""
        return self.memory.borrow(numel, like)


def copy_own(tensor: Tensor, place: Tensor) -> None:
    """Copy a rank's own part to its place in the result, unless it is there already."""
    if place.data_ptr() != tensor.data_ptr():
        place.copy_(tensor)


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Return flat views of the contiguous `tensor`, cut along dim 0 as evenly as possible: the first are a row longer,
    and some may be empty."""
    chunks = tensor.tensor_split(parts)
    return list(chunks) if tensor.dim() == 1 else [chunk.view(-1) for chunk in chunks]


def sendable(tensor: Tensor, peers: Peers) -> Tensor:
    """Return `tensor` in a form that can be sent: contiguous, and for gloo on the host."""
    return tensor.contiguous() if peers.batched else tensor.cpu().contiguous()
