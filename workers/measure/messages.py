"""Messages: every collective, send and receive of a step, with its ranks, its bytes, and when it began and ended.

A kernel of ours stands at BackendSelect while it is recorded, and only then, since it takes some 10 microseconds a
call: it sees what DDP's reducer, fully_shard and DTensor send as well as what is sent by hand. When a call has ended
nobody tells: it is looked for with the next call and at each mark of a phase (`look`), so an end is drawn late by up
to the time between two of these, and never early. Whether a send or receive of gloo is over is known once it was
waited for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from workers.measure.calls import OPERATIONS, RESULT, given_bytes, nbytes_of, sent_bytes
from workers.measure.shapes import BELOW, HERE, SHAPES, Shape

LEAST_RANKS = 2  # a group of one sends nothing


class Message(NamedTuple):
    """One call on this rank, in seconds of `time.perf_counter`."""

    op: str
    ranks: tuple[int, ...]  # of a send or receive from whom to whom, else all of the group; global ranks
    sent_bytes: float  # what this rank sends by the best algorithm (calls.py); of a receive nothing
    nbytes: int  # of the tensors
    tag: int  # of a send or receive
    start_s: float
    end_s: float


class Messages:
    """`with Messages().recorded() as messages: step()`, then `messages.found`."""

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._open: list[tuple[int, dist.Work]] = []

    @contextmanager
    def recorded(self) -> Iterator["Messages"]:
        """Hear of all calls inside the block; what is still open at its end ends there."""
        library = torch.library.Library("c10d", "IMPL")
        for name, shape in SHAPES.items():
            pass_on = getattr(torch.ops.c10d, name).default.redispatch
            library.impl(name, self._noted(name, shape, pass_on), HERE.name, with_keyset=True)
        try:
            yield self
        finally:
            library._destroy()
            self.look()
            self._open.clear()

    def look(self) -> None:
        """Note the end of all calls that are over by now."""
        now, still = time.perf_counter(), []
        for index, work in self._open:
            self.found[index] = self.found[index]._replace(end_s=now)
            if not work.is_completed():
                still.append((index, work))
        self._open = still

    def _noted(self, name: str, shape: Shape, pass_on: Callable[..., Any]) -> Callable[..., Any]:
        def noted(keys: Any, *args: Any) -> Any:
            self.look()
            message = message_of(name, shape, args)
            result = pass_on(keys & BELOW, *args)
            if message is not None:
                work = result[-1] if isinstance(result, tuple) else result
                # A group that is written in Python only tells of its calls here, and says which it does now.
                told = getattr(dist.ProcessGroup.unbox(args[shape.group]), "told", None)
                self._open.append((len(self.found), told or dist.Work.unbox(work)))
                self.found.append(message)
            return result

        return noted


def message_of(name: str, shape: Shape, args: tuple[Any, ...]) -> Message | None:
    """What a call is; None of a barrier, and in a group of one."""
    group = dist.ProcessGroup.unbox(args[shape.group])
    if "barrier" in name or group.size() < LEAST_RANKS:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    own, nbytes, now = ranks[group.rank()], nbytes_of(args[shape.compared]), time.perf_counter()
    if shape.op in ("send", "recv"):
        peer = ranks[args[shape.peer]] if shape.peer >= 0 else -1
        pair = (own, peer) if shape.op == "send" else (peer, own)
        return Message(shape.op, pair, float(nbytes if shape.op == "send" else 0), nbytes, args[-1], now, now)
    _, position = OPERATIONS.get(f"c10d::{name}", ("", RESULT))
    whole = nbytes_of(args[position]) if position != RESULT else nbytes
    sent = sent_bytes(shape.op, whole, group.size())
    if shape.op == "gather":  # the argument is this rank's part; all send theirs but the root
        sent = float(whole if args[3] != group.rank() else 0)
    elif shape.op == "all_to_all":
        sent = given_bytes(f"c10d::{name}", args, group)
    return Message(shape.op, ranks, sent, whole, 0, now, now)
