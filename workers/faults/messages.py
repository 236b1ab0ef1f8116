"""One bit of a message flips, behind the checksum of TCP: in a card's or a switch's memory.

Of a collective it is a bit of what this rank receives from others, of a send one of what it sends: what others hold, or
this rank itself, stays as it is. A kernel stands before each of c10d's operations, as where they are recorded
(workers/measure/messages.py); all steps make the same calls, so a step before tells how many there are.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.faults.bits import Flip, flip
from workers.measure.shapes import BELOW, HERE, SHAPES, Shape

SEND, GATHER = "send", "all_gather"
WITH_NUMBERS = (SEND, GATHER, "all_reduce", "reduce_scatter", "all_to_all")
Change = Callable[[str, Tensor], None]  # (operation, the numbers of it), in place


class Messages:
    """Counts this rank's messages from now on; `change` gets the one of that number, from 1. `close` ends it."""

    def __init__(self, number: int = 0, change: Change | None = None) -> None:
        self.number, self.change = number, change
        self.count = 0
        self._library = torch.library.Library("c10d", "IMPL")
        for name, shape in SHAPES.items():
            if shape.op in WITH_NUMBERS:
                pass_on = getattr(torch.ops.c10d, name).default.redispatch
                self._library.impl(name, self._kernel(shape, pass_on), HERE.name, with_keyset=True)

    def close(self) -> None:
        """Pass all messages on unseen again."""
        self._library._destroy()

    def _kernel(self, shape: Shape, pass_on: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any) -> Any:
            held = [each for each in tensors(args[0]) if has_numbers(each)]
            self.count += bool(held)
            if not held or self.change is None or self.count != self.number:
                return pass_on(keys & BELOW, *args)
            if shape.op == SEND:
                sent = [each.clone() for each in held]
                self.change(shape.op, sent[0])
                return pass_on(keys & BELOW, sent, *args[1:])
            result = pass_on(keys & BELOW, *args)
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            group = dist.ProcessGroup.unbox(args[shape.group])
            self.change(shape.op, received(shape.op, held, group.rank(), group.size()))
            return result

        return kernel


def flipping(kind: str, draw: random.Random, told: Callable[[str, Flip], None]) -> Change:
    """Flip one bit of a message, and say which."""
    return lambda op, numbers: told(op, flip(numbers, kind, draw))


def received(op: str, held: list[Tensor], rank: int, size: int) -> Tensor:
    """Of a collective's result what came from another rank: of all_gather a part that is not this rank's own."""
    if op != GATHER:
        return held[0]
    parts = held if len(held) > 1 else list(held[0].view(-1).chunk(size))
    return parts[(rank + 1) % len(parts)]


def has_numbers(tensor: Tensor) -> bool:
    """Floats, or bytes into which they were packed; counts and places are none."""
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of an operation's argument, which is one, or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
