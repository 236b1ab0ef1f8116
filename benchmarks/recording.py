"""What it costs a script to be watched: a step of DDP and of fully_shard under `distlab check`, over the same without.

    python -m benchmarks.recording [ROUNDS]

Two clusters of ranks run the same script (stepped.py), one of them watched, and take turns by blocks of steps: while
one computes the other stands at a socket. So both meet the same machine, second by second; doctors work all the time.
"""

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.rounds import table
from distlab.cluster.launch import free_port

SCRIPT = Path(__file__).parent / "stepped.py"
TARGET = 1.05
ROUNDS, STEPS = 40, 10
TIMEOUT_S = 120.0


def main(rounds: int = ROUNDS) -> None:
    """Print a row for each kind and number of ranks."""
    rows = []
    for kind in ("ddp", "fully_shard"):
        for world_size in (2, 4):
            plain, watched = measured(kind, world_size, rounds)
            walls = [two[0] / one[0] for one, two in zip(plain, watched, strict=True)]
            work = sum(two[1] for two in watched) / sum(one[1] for one in plain)
            step_ms = 1000 * statistics.median(one[0] for one in plain)
            ratio = statistics.median(two[0] for two in watched) / statistics.median(one[0] for one in plain)
            low, _, high = statistics.quantiles(walls, n=4)
            rows.append(
                [
                    kind,
                    world_size,
                    f"{step_ms:.1f}",
                    f"{ratio:.3f}",
                    f"{low:.2f}-{high:.2f}",
                    f"{work:.3f}",
                    f"{TARGET}",
                ]
            )
    print(table(["a step of", "ranks", "ms", "watched over plain", "of rounds", "CPU of the ranks", "at most"], rows))


def measured(kind: str, world_size: int, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Seconds a step of the slowest rank, and CPU seconds of all, by round: plain and watched."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        plain = stack.enter_context(cluster(kind, world_size, ""))
        watched = stack.enter_context(cluster(kind, world_size, folder))
        for each in (plain, watched):  # the first steps are not counted
            block(each, STEPS)
        pairs = []
        for turn in range(rounds):
            order = (plain, watched) if turn % 2 else (watched, plain)
            took = [block(each, STEPS) for each in order]
            pairs.append(tuple(took if turn % 2 else reversed(took)))
        for line in (*plain, *watched):
            line.sendall(struct.pack("=i", 0))
    return [one for one, _ in pairs], [two for _, two in pairs]


def block(lines: list[socket.socket], steps: int) -> tuple[float, float]:
    """One block of steps on all ranks of a cluster."""
    for line in lines:
        line.sendall(struct.pack("=i", steps))
    told = [struct.unpack("=dd", line.recv(16, socket.MSG_WAITALL)) for line in lines]
    return max(wall for wall, _ in told) / steps, sum(cpu for _, cpu in told) / steps


@contextmanager
def cluster(kind: str, world_size: int, folder: str) -> Iterator[list[socket.socket]]:
    """Ranks of the script, watched where there is a folder for that; a line to each."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")} | {
        "OMP_NUM_THREADS": "1"
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        words = [str(SCRIPT), kind, str(server.getsockname()[1])]
        if folder:
            own = {"WORLD_SIZE": str(world_size), "LAB_RUNS_DIR": folder}
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", "distlab.cli.check", *words], env=clean | own, stdout=subprocess.DEVNULL
                )
            ]
        else:
            place = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": str(world_size),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            ranks = [
                subprocess.Popen([sys.executable, *words], env=clean | place | {"RANK": str(rank)})
                for rank in range(world_size)
            ]
        lines = []
        try:
            for _ in range(world_size):
                line, _ = server.accept()
                line.settimeout(TIMEOUT_S)
                line.recv(4, socket.MSG_WAITALL)
                lines.append(line)
            yield lines
            for rank in ranks:
                rank.wait(TIMEOUT_S)
        finally:
            for rank in ranks:
                rank.kill()
            for line in lines:
                line.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
