"""What ranks tell each other beside the tensors: small JSON values over the store, bounded and by name.

The lab's own barriers and exchanges go over the store and not over gloo, so that they count in no ledger. Every wait
has a bound, and who did not come is named.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOK_S = 1.0  # how often a wait looks whether the rank has left


class Exchange:
    """Barriers and JSON values between the ranks of a run. Calls must come in the same order on every rank.

    Nobody waits for a rank in `gone`: its value is None where it has not given one before it left.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        waiting: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),  # noqa: ARG005
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._waiting = waiting  # tells the watch what is waited for
        self.host = 0  # the rank that keeps the store, and collects for all
        self.gone: set[int] = set()  # ranks that have left a run which goes on without them; the watch adds to it
        self._turn = 0

    def move(self, store: dist.Store, host: int) -> None:
        """From now on use `store`, which rank `host` keeps, and collect there; all who are left call it together."""
        self.store, self.host = store, host
        self._turn = 0

    def everyone(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank; raises TimeoutError naming a rank that gave none.

        Rank 0 collects them for all: 2·N questions to the store, where N a rank are N². Among 64 threads of one machine
        that took 347 ms and takes 21, among 3 ranks 1.0 and 0.8.
        """
        turn = self._next(name)
        self._give(turn, value)
        if self.rank == self.host:
            values = self._take_all(turn, name)
            self.store.set(f"{turn}/all", json.dumps(values))
            return values
        with self._waiting(name):
            return self._take_collected(turn, name)

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """The values of all ranks on the host, which is rank 0 where it lives; None elsewhere."""
        turn = self._next(name)
        self._give(turn, value)
        if self.rank == self.host:
            return self._take_all(turn, name)
        # It waits for nobody: but ranks must change place together, or the watch calls one of them slow.
        with self._waiting(name):
            return None

    def share(self, name: str, value: Any = None) -> Any:
        """The host's value, on every rank."""
        turn = self._next(name)
        if self.rank == self.host:
            self._give(turn, value)
        with self._waiting(name):
            return self._take(turn, name, self.host)

    def barrier(self, name: str) -> None:
        """Return once every rank has come here."""
        self.everyone(name, None)

    def _next(self, name: str) -> str:
        self._turn += 1
        return f"exchange/{self._turn}/{name}"

    def _give(self, turn: str, value: Any) -> None:
        self.store.set(f"{turn}/{self.rank}", json.dumps(value))

    def _take_all(self, turn: str, name: str) -> list[Any]:
        with self._waiting(name):
            return [self._take(turn, name, rank) for rank in range(self.world_size)]

    def _take_collected(self, turn: str, name: str) -> list[Any]:
        """What rank 0 has collected; where that does not come in time, the first rank is named that gave nothing."""
        try:
            return list(self._wait_for(f"{turn}/all", self.timeout_s))
        except TimeoutError as error:
            late = next((rank for rank in range(self.world_size) if not self._has_given(turn, rank)), self.host)
            raise self._in_vain(name, late) from error

    def _has_given(self, turn: str, rank: int) -> bool:
        try:
            return rank in self.gone or self.store.check([f"{turn}/{rank}"])
        except RuntimeError:  # the store is gone, and its host with it
            return rank != self.host

    def _take(self, turn: str, name: str, rank: int) -> Any:
        """A rank's value; None where it has left without one."""
        try:
            return self._wait_for(f"{turn}/{rank}", self.timeout_s, lambda: rank in self.gone)
        except TimeoutError as error:
            raise self._in_vain(name, rank) from error

    def _in_vain(self, name: str, rank: int) -> TimeoutError:
        return TimeoutError(f"timed out waiting for rank {rank} at {name!r} after {self.timeout_s:g} s")

    def _wait_for(self, key: str, at_most_s: float, left: Callable[[], bool] = lambda: False) -> Any:
        """Wait in slices, and look between them whether who gives it has `left`; raises TimeoutError."""
        deadline = time.monotonic() + at_most_s
        while True:
            began = time.monotonic()
            slice_s = max(0.001, min(LOOK_S, deadline - began))
            try:
                self.store.wait([key], timedelta(seconds=slice_s))
                return json.loads(self.store.get(key))
            except RuntimeError as error:
                if left():
                    return None
                now = time.monotonic()
                # Stores have errors of their own for a wait that is over; one that comes before is of the store itself.
                if now >= deadline or now - began < slice_s / 2:
                    raise TimeoutError from error
