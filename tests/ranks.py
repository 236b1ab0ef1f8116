"""Real gloo ranks for tests: a pool of processes that stay alive between tests.

Importing torch costs a rank 1 to 4 s on two cores, a function call on a waiting rank costs a millisecond. So the ranks
are forked from one process that has imported it, once, with one process group for each world size up to `MAX`, and a
test sends them a function to run:

    def double(group, value): ...            # at module level, so that it can be pickled by name
    assert ranks(3, double, 21) == [42, 42, 42]

A rank that raises, dies or does not answer in time fails the test by name, and the next test gets a fresh pool.
"""

import datetime
import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable
from typing import Any

from workers.cluster.launch import free_port

MAX = 8
START_TIMEOUT_S = 90.0
COLLECTIVE_TIMEOUT_S = 40.0


side_groups: dict[int, Any] = {}  # on a rank: a second group for each world size, as Lab.side_group


def store_port() -> int:
    """On a rank: the port of the store of all ranks, whose traffic is nobody's."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    return store.port


class RankFailed(AssertionError):
    """A rank of the pool raised, died or hung; the message holds its traceback."""


class Ranks:
    """The pool. `ranks(world_size, function, *args)` returns the results of `function(group, *args)`, by rank."""

    def __init__(self) -> None:
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[Any] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run `function` on ranks 0 to world_size - 1 at once; raises RankFailed after at most `timeout_s`."""
        if not self.processes:
            self.start()
        for pipe in self.pipes[:world_size]:
            pipe.send((world_size, function, args))
        return self.collect(world_size, timeout_s)

    def collect(self, world_size: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world_size:
            waiting = [rank for rank in range(world_size) if rank not in results]
            ready = multiprocessing.connection.wait([self.pipes[rank] for rank in waiting], deadline - time.monotonic())
            if not ready:
                self.stop()
                raise RankFailed(f"no answer from ranks {waiting} in {timeout_s:g} s")
            for rank in waiting:
                if self.pipes[rank] in ready:
                    results[rank] = self.receive(rank)
        return [results[rank] for rank in range(world_size)]

    def receive(self, rank: int) -> Any:
        try:
            succeeded, value = self.pipes[rank].recv()
        except EOFError:
            succeeded, value = False, "its process ended"
        if not succeeded:
            self.stop()
            raise RankFailed(f"rank {rank}: {value}")
        return value

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        port = free_port()
        for rank in range(MAX):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.collect(MAX, START_TIMEOUT_S)

    def stop(self) -> None:
        """End all ranks; the next call starts new ones."""
        for process in self.processes:
            process.terminate()  # those that are not stuck in C++ still write their coverage
        deadline = time.monotonic() + 3
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def close(self) -> None:
        """Let the ranks end by themselves, so that their coverage is written."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.stop()


def serve(rank: int, port: int, pipe: multiprocessing.connection.Connection) -> None:
    """One rank: join, then run what arrives until None does."""
    import gc

    import torch.distributed as dist

    # A store in a file is looked at every 10 ms: the 200 steps of a line in 5 variants waited for it a third of their
    # time.
    bound = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    # The loopback address by name of its own device: a machine's host name need not resolve.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = bound
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=MAX, timeout=bound, pg_options=options
    )
    groups, side = (
        {size: dist.new_group(list(range(size)), timeout=bound, pg_options=options) for size in range(1, MAX + 1)}
        for _ in range(2)
    )
    side_groups.update(side)
    pipe.send((True, None))
    while (job := pipe.recv()) is not None:
        world_size, function, args = job
        gc.collect()
        gc.freeze()  # as a rank does: a meter that looks at all objects need not look at 350,000 of modules
        try:
            pipe.send((True, function(groups[world_size], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
