"""Let a restarted rank rejoin a run that continued without it.

The run's folder has the addresses of its ranks: `ranks.json` names the run and the ports at which its ranks serve, or
would serve without rank 0. A process that finds a living run of its own settings, in which its predecessor has ended,
connects there and does not wait for a new run at rank 0's port. Each process locks its rank, and the kernel releases
the lock at its end: so a second process of a living rank finds no run.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from distlab.lab.cluster import ClusterError
from distlab.lab.cluster.address import listening_socket, outward_ip, resolve, source_ip
from distlab.lab.cluster.admission import claim_of, shared_settings
from distlab.lab.cluster.join import RETRY_S, Cluster, Joining, Uplink, dial, key_of
from distlab.lab.cluster.messages import Join, Refused, Sealed
from distlab.lab.config import Config
from distlab.lab.report.reading import from_json, read_regular, write_atomically
from distlab.lab.report.run_folder import is_running
from distlab.techniques.transport.handshake import Who

FILE = "ranks.json"
MOST_BYTES = 1 << 22  # limit for the file: 1024 members have 60 kB
ANSWER_S = 5.0


class LeftRun(NamedTuple):
    """A run that continues, as described by its file."""

    folder: Path
    run: dict[str, Any]
    served_at: list[list[Any]]  # addresses and ports at which it may be served


def identity(config: Config, run_id: str, token: str) -> dict[str, Any]:
    """Return the settings that a rejoining rank must share with the run, and the run that it rejoins."""
    where = {"mode": config.mode_name, "world_size": config.world_size, "port": config.master_port}
    return {
        "run_id": run_id,
        "token": token,
        "settings": shared_settings(config),
        "address": config.master_addr,
    } | where


def publish(cluster: Cluster, config: Config, folder: Path) -> None:
    """Let ranks of this run rejoin from now on, and mark this one as alive in it."""
    lock_rank(folder, cluster.rank)
    next_ports = [[member.ip, member.next_port] for _, member in sorted(cluster.members.items())]
    content = {"run": identity(config, cluster.run_id, cluster.token), "at": [list(cluster.server_at), *next_ports]}
    with suppress(OSError):  # a disk that is full: no rank can rejoin
        write_atomically(folder / FILE, [json.dumps(content)])


def find_left_run(config: Config) -> LeftRun | None:
    """Return the run that this rank belongs to and has left; None if there is none, and a new one begins."""
    assert config.rank is not None, "a rank has RANK"
    for file in sorted(config.runs_dir.glob(f"*/{FILE}"), key=lambda file: -file.stat().st_mtime):
        if file.parent.is_symlink() or not is_running(file.parent):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = from_json(read_regular(file, MOST_BYTES))
            run = content["run"]
            same_run = identity(config, run["run_id"], run["token"]) == run
            if same_run and lock_rank(file.parent, config.rank):
                return LeftRun(file.parent, run, content["at"])
    return None


def lock_rank(folder: Path, rank: int) -> bool:
    """Lock this rank until the process ends; returns False if another process has the lock."""
    lock = os.open(folder / f".rank{rank}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # a file system without locks
        pass
    return True


def rejoin(left: LeftRun, config: Config, version: str, say: Callable[[str], None]) -> Cluster:
    """Return the cluster as its server describes it, with this process in place of the old one; raises ClusterError."""
    assert config.master_addr is not None, "a rank has MASTER_ADDR"
    address = resolve(config.master_addr, config.join_timeout_s, say)
    own = address._replace(ip=source_ip(address.family, address.ip) or address.ip)
    listening = listening_socket(own)
    claim = claim_of(config, version, outward_ip(address.family), None, listening)
    joining = Joining(config, claim, key_of(config).secret, say, time.monotonic(), listening)
    say(f"back       rank {claim.rank} rejoins the run {left.run['run_id']}")
    while time.monotonic() < joining.deadline:
        for ip, port in left.served_at:
            with suppress(OSError):
                uplink = dial(ip, int(port), joining.key, Who(claim.rank, joining.life), ANSWER_S)
                uplink.send(Join(claim, left.run["token"]))
                answer = first_answer(uplink)
                if isinstance(answer, Sealed):
                    return joining.cluster(uplink, answer, address._replace(ip=ip), int(port), None)
                if isinstance(answer, Refused):
                    raise ClusterError(f"rank {claim.rank} cannot rejoin: {answer.sentence}")
        time.sleep(RETRY_S)
    raise ClusterError(f"rank {claim.rank} cannot rejoin: no rank of {left.run['run_id']} answers {joining.time_limit}")


def first_answer(uplink: Uplink) -> Sealed | Refused | None:
    """Return the server's answer to a returning rank, if it answers."""
    deadline = time.monotonic() + ANSWER_S
    while not uplink.ended and time.monotonic() < deadline:
        messages = uplink.messages(ANSWER_S)
        while messages:
            message = messages.pop(0)
            if isinstance(message, Sealed):
                uplink.unread = messages
            if isinstance(message, Sealed | Refused):
                return message
    return None
