"""Watches of many ranks of this machine, forked from one process: `python -m tests.cluster.many_watches 64 41`.

After a while the second number's rank is killed; each other one prints its verdict, and this process their exit codes.
"""

import multiprocessing
import socket
import sys
import time
from multiprocessing.synchronize import Barrier

from distlab.cluster.address import udp_socket
from distlab.cluster.heartbeat import Verdict
from distlab.cluster.shutdown import Succession
from distlab.cluster.watchdog import Watchdog
from distlab.config import Config
from tests.cluster.one_watch import met, say

QUIET_S = 6.0  # twice as long as a silence that counts


def watch(rank: int, own: socket.socket, ports: list[int], met_all: Barrier) -> None:
    """One rank: it watches until a verdict ends it."""
    config = Config.read({"RANK": str(rank), "WORLD_SIZE": str(len(ports)), "MASTER_ADDR": "127.0.0.1"})

    def on_verdict(verdict: Verdict, succession: Succession) -> None:
        del succession
        say(f"rank {rank} heard {verdict.sentence}")

    cluster = met(config, own, ports)
    met_all.wait()  # as ranks do: all are let in at once
    Watchdog(cluster, config, say, on_verdict).start()
    time.sleep(120)


def main(world_size: int, killed: int) -> int:
    sockets = [udp_socket(socket.AF_INET, "127.0.0.1") for _ in range(world_size)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    met_all = multiprocessing.Barrier(world_size + 1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=watch, args=(rank, own, ports, met_all)) for rank, own in enumerate(sockets)]
    for rank in ranks:
        rank.start()
    met_all.wait()
    time.sleep(QUIET_S)
    say(f"lost while all were there: {[rank.exitcode for rank in ranks if rank.exitcode is not None]}")
    ranks[killed].kill()
    for rank in ranks:
        rank.join()
    say(f"exit codes {sorted({rank.exitcode or 0 for rank in ranks if rank is not ranks[killed]})}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
