"""Ranks as threads of one process, each with its own transport, over the loopback."""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distlab.techniques.transport.process_group import TcpBackend
from distlab.techniques.transport.tcp import Channel

BOUND_S = 5.0


def on_threads(world_size: int, run: Callable[[Channel], Any], bound_s: float = BOUND_S) -> list[Any]:
    """Return the result of `run(channel)` on each rank, or the error that it raised there."""
    store, results = dist.HashStore(), [None] * world_size

    def be_rank(rank: int) -> None:
        backend = TcpBackend("127.0.0.1", b"the key")
        try:
            channel = backend.channel(store, range(world_size), rank, "all", bound_s)
            channel.transport.groups += 1
            results[rank] = run(channel)
            channel.transport.leave()
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]
            if backend.transport is not None:
                backend.transport.groups = 1
                backend.transport.leave()

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * bound_s)
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return results
