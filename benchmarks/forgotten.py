"""How often gloo forgets a send that is under way when its connection ends: `python -m benchmarks.forgotten [ROUNDS]`.

Three members sum 100 KB again and again, until one hangs up at a random moment and the others a moment later, as the
survivors of `elastic` do. A sum that has neither come nor failed PATIENCE_S after that is forgotten: gloo waits out its
own bound for it.
"""

import random
import sys
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.rounds import on_ranks
from distlab.elastic.process_group import Regroup, sockets
from distlab.transport.handshake import listen
from distlab.transport.store_server import StoreServer

KEY = b"a benchmark"
RANKS, NUMEL, PATIENCE_S, BOUND_S = 3, 12_600, 2.0, 300.0


class Counting(Regroup):
    """Counts what gloo still waits for when all have long hung up."""

    forgotten = 0

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        try:
            super()._wait_for(works)
        except RuntimeError:
            deadline = time.monotonic() + PATIENCE_S
            while not (done := all(work.is_completed() for work in works)) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.forgotten += not done
            raise


def measure(world: dist.ProcessGroup, rounds: int) -> int:
    """The forgotten sums of this member."""
    store = StoreServer(listen("127.0.0.1"), KEY) if world.rank() == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, 0, group=world)
    own = {each.descriptor for each in sockets()}
    group = Counting("127.0.0.1", KEY, BOUND_S, lambda: own)
    for number in range(rounds):
        group.form(str(number), world.rank(), RANKS, ("127.0.0.1", port[0]), lambda: True)
        dist.barrier(world)
        draw = random.Random(number)
        delays_s = [draw.uniform(0.01, 0.03)] + [draw.uniform(0.03, 0.033)] * (RANKS - 1)
        hanging_up = threading.Timer(delays_s[(world.rank() + number) % RANKS], group.cut)
        hanging_up.start()
        try:
            while True:
                group.sum(torch.ones(NUMEL, dtype=torch.float64))
        except RuntimeError:
            hanging_up.join()
            group.leave()
        dist.barrier(world)
    return group.forgotten


def main(rounds: int = 60) -> None:
    """Print how many of all waits were forgotten."""
    forgotten = on_ranks(RANKS, counted, rounds)
    print(f"{forgotten} of {rounds} times gloo forgot a send of one of {RANKS} members, {8 * NUMEL / 1e3:.0f} KB")


def counted(world: dist.ProcessGroup, rounds: int) -> int:
    """All members' forgotten sums together."""
    total = torch.tensor([measure(world, rounds)])
    dist.all_reduce(total, group=world)
    return int(total.item())


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
