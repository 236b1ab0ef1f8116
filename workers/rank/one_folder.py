"""One folder of runs: whether every rank sees the one of rank 0. Machines need not share a disk; checkpoints need one.

Rank 0 leaves a file in the run's folder and each rank looks for it by name, which no rank has asked for before: so a
network file system has to ask its server. Where machines share nothing all works but checkpoints: records reach rank 0
over the store, and each machine keeps the logs of its own ranks.
"""

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.cluster.exchange import Exchange
from workers.config import Config, ConfigError
from workers.report import claim


class Apart(NamedTuple):
    """The host of every rank, and what rank 0 says of those whose logs stay elsewhere."""

    hosts: list[str]
    told: str


def apart(exchange: Exchange, folder: Path, token: str, config: Config) -> Apart | None:
    """What comes of machines that share no disk; None where all ranks see one folder.

    Raises ConfigError on every rank where the run saves or resumes and some rank does not see rank 0's folder.
    """
    hosts, unseen = seen_by(exchange, folder, token)
    if not unseen:
        return None
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in unseen)
    saves = [
        f"{name}={value}"
        for name, value in (("LAB_CHECKPOINT_EVERY", config.checkpoint_every), ("LAB_RESUME", config.resume))
        if value is not None
    ]
    if saves:
        take_back(folder)
        raise ConfigError(
            [
                f"LAB_RUNS_DIR={str(config.runs_dir)!r} is not one folder: {who} cannot see rank 0's, and"
                f" {' and '.join(saves)} needs one on a disk that all machines share"
            ]
        )
    return Apart(hosts, f"not shared by {who}: logs of these ranks stay there, their records come to rank 0")


def take_back(folder: Path) -> None:
    """Remove a folder that holds no more than the claim of this run; one that goes on holds the attempts before."""
    with suppress(OSError):  # another rank of this machine was faster
        if [path.name for path in folder.iterdir()] == [claim.FILE]:
            (folder / claim.FILE).unlink()
            folder.rmdir()


def seen_by(exchange: Exchange, folder: Path, token: str) -> tuple[list[str], list[int]]:
    """The host of every rank, and the ranks that do not see rank 0's folder."""
    mark = folder / f".seen-{token[:16]}"
    if exchange.rank == 0:
        mark.touch()
    exchange.barrier("the folder of runs")
    found = exchange.everyone("who sees it", [socket.gethostname(), mark.exists()])
    if exchange.rank == 0:
        mark.unlink(missing_ok=True)
    return [host for host, _ in found], [rank for rank, (_, sees) in enumerate(found) if not sees]
