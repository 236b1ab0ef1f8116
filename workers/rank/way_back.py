"""The way back into a run for a rank that is started again, where the others have gone on without it.

Who is there and where lies in the run's folder, so that no rank is needed for it: `ranks.json` names the run, its
members' addresses, and those of what a mode has opened for itself. The secrets are not in it: they follow from the key
of the run (key.py), which a rank is given anew. Whoever finds a run of its own settings that is alive, and in which
its own former life is over, goes there and does not wait for a new run at rank 0's door.

Each process holds a lock of its rank, which the kernel takes back when it ends: so a second process of a rank that
lives finds no way.
"""

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workers.cluster.address import source_ip
from workers.cluster.board import Claim, Member
from workers.config import Config
from workers.report.claim import is_held
from workers.report.lines import write_atomically

FILE = "ranks.json"
Book = dict[int, list[Any]]


@dataclass
class WayBack:
    """What one rank knows of who is there. Safe to use from any thread."""

    folder: Path
    rank: int
    run: dict[str, Any]  # what does not change: its id, its token, its settings
    members: dict[int, Member]
    book: Book = field(default_factory=dict)  # by rank what the mode has opened; empty until `leave`
    come_back: bool = False  # whether this process has
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def leave(self, book: Mapping[int, list[Any]]) -> None:
        """From now on ranks of this run may come back, and this one is alive in it."""
        self.book = dict(book)
        locked(self.folder, self.rank)
        self._write()

    def take_in(self, member: Member, opened: list[Any]) -> None:
        """A rank is there again, at these addresses."""
        with self._lock:
            self.members = self.members | {member.rank: member}
            self.book = self.book | {member.rank: opened}
        self._write()

    def _write(self) -> None:
        members = [asdict(member) for member in self.members.values()]
        words = {"run": self.run, "members": members, "book": list(self.book.items())}
        with self._lock, suppress(OSError):  # a disk that is full: nobody comes back
            write_atomically(self.folder / FILE, [json.dumps(words)])


def described(config: Config, run_id: str, token: str) -> dict[str, Any]:
    """What a rank that comes back has to have alike, and which run it comes back to."""
    where = {"mode": config.mode_name, "world_size": config.world_size, "port": config.master_port}
    settings = Claim.of(config, "", "").settings
    return {"run_id": run_id, "token": token, "settings": settings, "address": config.master_addr} | where


def find(config: Config) -> WayBack | None:
    """The run that this rank belongs to and has left; None where there is none, and a new one begins."""
    assert config.rank is not None, "a rank has RANK"
    for file in sorted(config.runs_dir.glob(f"*/{FILE}"), key=lambda file: -file.stat().st_mtime):
        if file.parent.is_symlink() or not is_held(file.parent):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            words = json.loads(file.read_text())
            run = words["run"]
            alike = described(config, run["run_id"], run["token"]) == run
            if alike and locked(file.parent, config.rank):
                members = {each["rank"]: Member(**each) for each in words["members"]}
                book = {int(rank): opened for rank, opened in words["book"]}
                return WayBack(file.parent, config.rank, run, members, book, come_back=True)
    return None


def locked(folder: Path, rank: int) -> bool:
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


def own_ip(way: WayBack, family: int) -> str:
    """This rank's address on the way to the others."""
    others = [member.ip for rank, member in way.members.items() if rank != way.rank]
    return next(filter(None, (source_ip(family, ip) for ip in others)), way.members[way.rank].ip)
