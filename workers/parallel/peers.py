"""Messages between the ranks of one group: what every hand-written collective is made of.

gloo has no eager buffer: a send ends when its receive has been posted and filled, so two ranks that both send first
wait for ever, at 4 bytes already. Two rules keep every algorithm here free of that: the receives of a round are posted
before its sends, and nobody waits for a send whose receive its peer posts later.

A collective is written as a generator that yields each message at the point where it needs it (`Steps`). Driven to its
end it is a blocking call; driven to its first yield its messages are under way while the caller computes (`Pending`).
No thread is needed, gloo moves the bytes on its own.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Message:
    """One tensor under way to or from a peer. A world of one, and an empty chunk, send nothing: `work` is None then."""

    work: dist.Work | None
    what: str  # "receive from rank 2": an error names whom it waited for

    def wait(self) -> None:
        """Return once the tensor is received, or may be changed again; raises RuntimeError naming the peer."""
        # gloo counts completions: a second wait on the same work would never return.
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what} failed: {error}") from error


Steps = Generator[Message, None, None]
Addressed = Iterable[tuple[int, Tensor]]  # (rank in the group, tensor)


class Pending:
    """A collective under way. Ranks must start, and finish, their collectives in the same order."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._awaited = next(steps, None)

    def wait(self) -> None:
        """Finish; returns once the result stands in its tensor. Further calls return at once."""
        while self._awaited is not None:
            self._awaited.wait()
            self._awaited = next(self._steps, None)


class Peers:
    """The other ranks of `group`, by their rank in it, and scratch memory that is used again from call to call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
        self.batched = dist.get_backend(group) == "nccl"
        self._free: list[Tensor] = []
        self._tag = 0

    def new_tag(self) -> int:
        """A tag for the next collective, the same on all ranks, so that two under way do not mix."""
        self._tag = self._tag % 2**20 + 1
        return self._tag

    def after(self, distance: int) -> int:
        """The rank `distance` further around the ring; negative: before."""
        return (self.rank + distance) % self.world_size

    def post(self, tag: int, receives: Addressed = (), sends: Addressed = ()) -> tuple[list[Message], list[Message]]:
        """Begin one round's messages, receives first; empty tensors are not sent. Returns (receives, sends) in
        order."""
        wanted = [(True, peer, tensor) for peer, tensor in receives] + [(False, peer, tensor) for peer, tensor in sends]
        works = self._post_batch(wanted) if self.batched else [self._post(tag, *entry) for entry in wanted]
        verbs = ["receive from" if receiving else "send to" for receiving, _, _ in wanted]
        messages = [
            Message(work, f"{verb} {self._names[entry[1]]}")
            for work, verb, entry in zip(works, verbs, wanted, strict=True)
        ]
        num_receives = sum(receiving for receiving, _, _ in wanted)
        return messages[:num_receives], messages[num_receives:]

    def _post(self, tag: int, receiving: bool, peer: int, tensor: Tensor) -> dist.Work | None:
        if tensor.numel() == 0:
            return None
        return self.group.recv([tensor], peer, tag) if receiving else self.group.send([tensor], peer, tag)

    def _post_batch(self, wanted: Sequence[tuple[bool, int, Tensor]]) -> Sequence[dist.Work | None]:
        """NCCL runs messages in stream order: those of a round must be one launch, or two ranks wait for each other."""
        operations = [
            dist.P2POp(dist.irecv if receiving else dist.isend, tensor, group=self.group, group_peer=peer)
            for receiving, peer, tensor in wanted
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [*works, *[None] * (len(wanted) - len(works))]

    @contextmanager
    def scratch(self, numel: int, like: Tensor) -> Iterator[Tensor]:
        """`numel` elements of unknown content, on the device and of the dtype of `like`, until the block ends."""
        nbytes = numel * like.element_size()
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes and buffer.device == like.device]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            # One that is too small for this call goes, so that growing sizes do not pile up.
            self._free = self._free[1:]
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        try:
            yield buffer[:nbytes].view(like.dtype)
        finally:
            self._free.append(buffer)

    def spoil(self) -> None:
        """Overwrite the scratch memory that no call uses now with bytes that are NaN in every floating type: its
        content is unknown, and who reads it before it is written is seen."""
        for buffer in self._free:
            buffer.fill_(255)

    def release(self) -> None:
        """Let go of the scratch memory that no call uses now."""
        self._free = []


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Flat views of the contiguous `tensor`, cut along dim 0 as even as it goes: the first a row longer, some may be
    empty."""
    return [chunk.view(-1) for chunk in tensor.tensor_split(parts)]
