"""What a call on a group over TCP returns: a `Work` that its own process has to move on.

One that was begun and not awaited goes on whenever the process waits for anything over TCP (`Transport.background`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workers.parallel.peers import Message, Pending
from workers.parallel.transport import Transport


def unseen() -> AbstractContextManager[None]:
    """What a group does by itself is no modes' business, as gloo's is none: the program called one thing."""
    if torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return nullcontext()


class Posted(dist.Work):
    """A send or a receive."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self._message = message

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        self._message.wait()
        return True

    def is_completed(self) -> bool:
        return self._message.done


class Running(dist.Work):
    """A collective, whose result stands in `results`."""

    def __init__(self, results: list[Tensor], transport: Transport) -> None:
        super().__init__()
        self._results, self._transport = results, transport
        self._pending: Pending | None = None

    def begin(self, steps: Iterator[Message]) -> None:
        """Send its first messages; the others follow as this process waits for something."""
        with unseen():
            self._pending = Pending(steps)
        if not self.advance():
            self._transport.background.append(self)

    def run(self, steps: Iterator[Message]) -> None:
        """All of it now, for who waits for it at once."""
        with unseen():
            for message in steps:
                message.wait()

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        if self._pending is not None:
            # Its messages are awaited one by one here, so nobody else may go on with it meanwhile.
            self._transport.background = [each for each in self._transport.background if each is not self]
            with unseen():
                self._pending.wait()
        return True

    def advance(self) -> bool:
        """Go on as far as messages have come; whether it is at its end."""
        with unseen():
            return self._pending is None or self._pending.advance()

    def is_completed(self) -> bool:
        return self.advance()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its result, ended first: who waits for a future (DDP's reducer) moves nothing."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future
