"""The fixture `ranks` of the lab's tests: call functions on warm ranks, in a millisecond per call, and return the results.

    def double(group, value): ...            # at module level, so that it can be pickled by name
    assert ranks(3, double, 21) == [42, 42, 42]

Unlike `distlab.ranks` it is for tests with many calls and for measurements: process groups are made once per number of
ranks, and calls are not recorded, because that would keep tensors alive and take time. If a rank raises, dies or does
not answer, the test fails with its name and the position of each rank; the next call gets new ranks.
"""

import datetime
import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from distlab.techniques.transport.store import KeyedStore
from distlab.tools.ranks.pool import WarmRanks, format_stack
from distlab.tools.ranks.rank import Executor, Start, set_up_process

MAX = 8  # ranks
COLLECTIVE_S = 40.0
# On a rank: a second group for each number of ranks, for communication next to that of the first.
side_groups: dict[int, Any] = {}


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


def align_group_names(group: dist.ProcessGroup) -> int:
    """Let the ranks of `group` give new groups the same names from now on; returns the number of groups so far.

    torch names a group by the number of groups that its process has made, and ranks without earlier calls have made
    fewer: with different names the ranks would wait for each other forever.
    """
    world = dist.distributed_c10d._world
    made = torch.tensor(world.group_count)
    dist.all_reduce(made, dist.ReduceOp.MAX, group=group)
    world.group_count = most = int(made)
    return most


@contextmanager
def own_groups(group: dist.ProcessGroup) -> Iterator[None]:
    """Give the groups that a call makes the same names on all its ranks, and destroy them at its end."""
    world = dist.distributed_c10d._world
    most = align_group_names(group)
    before = set(world.pg_map)
    yield
    if world.group_count > most:
        dist.barrier(group)  # no rank may close a group that another still uses
        for each in [each for each in world.pg_map if each not in before]:
            dist.destroy_process_group(each)


def serve(start: Start, files: Sequence[Any], control: Connection) -> None:
    """Be one rank: join, then run each received job until None arrives."""
    set_up_process(start, files)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bound = datetime.timedelta(seconds=COLLECTIVE_S)
    # Use the loopback address, because a machine's host name need not resolve.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = bound
    store = KeyedStore("127.0.0.1", start.port, start.key, COLLECTIVE_S)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=MAX, timeout=bound, pg_options=options)
    groups: dict[int, Any] = {}
    control.send(None)
    while (job := control.recv()) is not None:
        if isinstance(job, int):
            align_group_names(dist.distributed_c10d._get_default_group())
            groups[job], side_groups[job] = (
                dist.new_group(list(range(job)), timeout=bound, pg_options=options) for _ in range(2)
            )
            continue
        world_size, function, args = job
        gc.collect()
        gc.freeze()  # as a rank does: meters then skip the 350,000 objects of modules
        try:
            with own_groups(groups[world_size]):
                value = function(groups[world_size], *args)
            control.send((True, value))
        except BaseException:
            control.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks(WarmRanks):
    """`ranks(world_size, function, *args)` returns the results of `function(group, *args)`, by rank."""

    target = staticmethod(serve)

    def __init__(self, root: str, preload: Sequence[str]) -> None:
        super().__init__(Executor, root, preload=preload)
        self._sizes: frozenset[int] = frozenset()  # for which the ranks have groups

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run `function` on ranks 0 to world_size - 1 at once; raises RankFailed after at most `timeout_s`."""
        if not self._ranks:
            self.ensure(MAX)
            self._sizes = frozenset()
        if world_size not in self._sizes:  # making all 16 groups at the start would take 3 s more on two cores
            self._sizes |= {world_size}
            for rank in self._ranks:
                rank.control.send(world_size)
        for rank in self._ranks[:world_size]:
            rank.control.send((world_size, function, args))
        return self._collect(world_size, timeout_s)

    def _collect(self, world_size: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world_size:
            waiting = {self._ranks[rank].control: rank for rank in range(world_size) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                places = "\n".join(f"rank {rank} is at {self._place(rank)}" for rank in sorted(waiting.values()))
                self.stop()
                raise RankFailed(f"no answer from ranks {sorted(waiting.values())} in {timeout_s:g} s\n{places}")
            for each in ready:
                assert isinstance(each, Connection)
                results[waiting[each]] = self._received(waiting[each])
        return [results[rank] for rank in range(world_size)]

    def _received(self, rank: int) -> Any:
        try:
            succeeded, value = self._ranks[rank].control.recv()
        except EOFError:
            succeeded, value = False, "its process ended"
        if not succeeded:
            printed = self._ranks[rank].printed()
            self.stop()
            raise RankFailed(f"rank {rank}: {value}" + (f"\nit printed:\n{printed}" if printed else ""))
        return value

    def _place(self, rank: int) -> str:
        stacks = self._ranks[rank].channel.stacks()
        return format_stack(max(stacks.values(), key=len, default=[]))

    def stop(self) -> None:
        for rank in self._ranks:
            rank.channel.process.terminate()  # ranks that are not stuck in C++ still write their coverage
        deadline = time.monotonic() + 3
        for rank in self._ranks:
            rank.channel.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        self.close_store()  # new ranks need an empty one

    def close(self) -> None:
        """Let the ranks end by themselves, so that they write their coverage."""
        for rank in self._ranks:
            rank.control.send(None)
        for rank in self._ranks:
            rank.channel.process.join(20)
        super().close()
