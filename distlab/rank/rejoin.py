"""What lets a rank that is started again rejoin a run which went on without it.

Who is there and where lies in the run's folder, so that no rank is needed for it: `ranks.json` names the run, its
members' addresses, and where each listens for its mode. The secrets are not in it: they follow from the key of the run
(distlab/cluster/authenticated_messages.py), which a rank is given anew. Whoever finds a run of its own settings that is
alive, and in which the process that it was before has ended, goes there and does not wait for a new run at rank 0's
port.

Each process holds a lock of its rank, which the kernel takes back when it ends: so a second process of a rank that
lives finds no run.
"""

import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from distlab.cluster.address import source_ip, udp_socket
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier, key_of
from distlab.cluster.control_plane import Exchange
from distlab.cluster.message_signer import MessageSigner
from distlab.cluster.rendezvous import Cluster
from distlab.cluster.rendezvous_server import Claim, Member
from distlab.cluster.watchdog import Watchdog
from distlab.config import Config
from distlab.contract import Mode
from distlab.report.reading import from_json, read_regular, write_atomically
from distlab.report.records import Left
from distlab.report.run_folder import Journal, is_held

FILE = "ranks.json"
MOST_BYTES = 1 << 22  # of it: 1024 members have 200 kB
ALONE_S = 60.0
UNNOTICED = "it was restarted before its loss was noticed; the remaining ranks continued"


@dataclass
class Addresses:
    """What one rank knows of who is there. Safe to use from any thread."""

    folder: Path
    rank: int
    run: dict[str, Any]  # what does not change: its id, its token, its settings
    members: dict[int, Member]
    opened: dict[int, list[Any]] = field(default_factory=dict)  # by rank where it listens for its mode
    rejoined: bool = False  # whether this process is a rank that was started again
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, opened: Mapping[int, list[Any]]) -> None:
        """From now on ranks of this run may rejoin, and this one is alive in it."""
        self.opened = dict(opened)
        lock_rank(self.folder, self.rank)
        self._write()

    def readmit(self, member: Member, opened: list[Any]) -> None:
        """A rank is there again, at these addresses."""
        with self._lock:
            self.members = self.members | {member.rank: member}
            self.opened = self.opened | {member.rank: opened}
        self._write()

    def _write(self) -> None:
        members = [asdict(member) for member in self.members.values()]
        content = {"run": self.run, "members": members, "opened": list(self.opened.items())}
        with self._lock, suppress(OSError):  # a disk that is full: nobody rejoins
            write_atomically(self.folder / FILE, [json.dumps(content)])


def identity(config: Config, run_id: str, token: str) -> dict[str, Any]:
    """What a rank that rejoins has to have alike, and which run it rejoins."""
    where = {"mode": config.mode_name, "world_size": config.world_size, "port": config.master_port}
    settings = Claim.of(config, "", "").settings
    return {"run_id": run_id, "token": token, "settings": settings, "address": config.master_addr} | where


def find_left_run(config: Config) -> Addresses | None:
    """The run that this rank belongs to and has left; None where there is none, and a new one begins."""
    assert config.rank is not None, "a rank has RANK"
    for file in sorted(config.runs_dir.glob(f"*/{FILE}"), key=lambda file: -file.stat().st_mtime):
        if file.parent.is_symlink() or not is_held(file.parent):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = from_json(read_regular(file, MOST_BYTES))
            run = content["run"]
            alike = identity(config, run["run_id"], run["token"]) == run
            if alike and lock_rank(file.parent, config.rank):
                members = {each["rank"]: Member(**each) for each in content["members"]}
                opened = {int(rank): addresses for rank, addresses in content["opened"]}
                return Addresses(file.parent, config.rank, run, members, opened, rejoined=True)
    return None


def lock_rank(folder: Path, rank: int) -> bool:
    """Hold the lock of this rank until the process ends; False where another process has it."""
    lock = os.open(folder / f".rank{rank}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # a file system without locks
        pass
    return True


def find_cluster(config: Config, addresses: Addresses, say: Callable[[str], None]) -> Cluster:
    """The cluster as the file has it, with this process in the place of the one that it was before.

    Its store is its own until the mode hands it that of all who are left.
    """
    before = addresses.members[addresses.rank]
    family = socket.AF_INET6 if ":" in before.ip else socket.AF_INET
    ip = own_ip(addresses, family)
    udp = udp_socket(family, ip)
    member = Member(addresses.rank, socket.gethostname(), ip, udp.getsockname()[1], before.pid)
    addresses.members = addresses.members | {addresses.rank: member}
    key, dropped = key_of(config).secret, Dropped(say)
    seal, token = MessageSigner(key), bytes.fromhex(addresses.run["token"])
    opener = MessageVerifier(key, seal.sender, dropped)
    opener.know_run(token)
    run_id = addresses.run["run_id"]
    say(f"back       rank {addresses.rank} finds its way back into {run_id}")
    return Cluster(
        addresses.rank, config.world_size, dist.HashStore(), 0, addresses.members, udp, run_id, token, seal, opener,
        dropped,
    )  # fmt: skip


def own_ip(addresses: Addresses, family: int) -> str:
    others = [member.ip for rank, member in addresses.members.items() if rank != addresses.rank]
    return next(filter(None, (source_ip(family, ip) for ip in others)), addresses.members[addresses.rank].ip)


def init_group_alone(mode: Mode) -> Mode:
    """Open a default group of this process alone, until the mode hands it that of all who are left; returns the mode on
    a mesh of one rank."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=ALONE_S)
    )  # fmt: skip
    return replace(mode, axes=lambda config: {"dp": 1})  # noqa: ARG005


def readmit(
    watch: Watchdog, exchange: Exchange, journal: Journal, addresses: Addresses, said: dict[str, Any], opened: list[Any]
) -> None:
    """A rank that had left is here again, as another process that `said` where it is: it is watched and waited for like
    any other. One that is back before its silence was noticed has left all the same."""
    member = Member(**said)
    lives = [each for each in journal.records if isinstance(each, Left) and each.rank == member.rank]
    peer = watch.hearing.peers.get(member.rank)  # of the process before, until the watch takes this one in
    if lives and not lives[-1].back:
        journal.write(msgspec.structs.replace(lives[-1], back=True))
    elif peer is not None:
        journal.write(Left(member.rank, peer.seen.step, UNNOTICED, back=True))
    watch.take_in(member)
    exchange.gone.discard(member.rank)
    addresses.readmit(member, opened)
