"""A stranger without the key sends forged messages to every port of a run, which it finds in the kernel's tables. The
verdict, the losses and the exit code must not change.

A run opens MASTER_PORT; with LAB_BACKEND=tcp also a port per rank, and in elastic a port per rank that could become the
server. The ports of gloo are found too.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from distlab.lab.cluster.launch import free_port
from tests.lab.cluster.cluster_of_processes import Rank
from tests.techniques.transport.strangers import FORGED, answer_to, attack_as_tcp_store
from tests.warm_ranks import Ranks

TOP = Path(__file__).parents[1]
BOUND_S = 110.0
SETTINGS = {
    "WORLD_SIZE": "3", "LAB_MODEL": "mlp", "LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_SEQ": "8", "LAB_RUN_ID": "attacked",
    "LAB_VARIANT": "flat",
}  # fmt: skip


class Port(NamedTuple):
    """A port on which a process of the run listens."""

    ip: str
    number: int


def children(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += children(child)
    return found


def ports_of(pid: int) -> set[Port]:
    """Return the ports on which the processes of a run listen, from the kernel's tables."""
    inodes = set()
    for process in children(pid):
        with suppress(OSError):
            for each in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{process}/fd/{each}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table, listens in (("tcp", "0A"), ("tcp6", "0A")):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == listens and words[9] in inodes:
                ip, _, number = words[1].partition(":")
                known = "127.0.0.1" if ip == "0100007F" else ip
                found.add(Port(known, int(number, 16)))
    return found


class Stranger:
    """Sends all forged messages to every port of a run, repeatedly, as soon as it finds them."""

    def __init__(self, pid: int) -> None:
        self.found: set[Port] = set()
        self.written: list[str] = []  # the operations that torch's client could do
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._attack, daemon=True)
        self._thread.start()

    def _attack(self) -> None:
        begun: set[Port] = set()
        while not self._over.is_set():
            self.found |= ports_of(self._pid)
            for port in self.found - begun:
                # In threads, because a run may end before torch's client does.
                for act in (self._send_forged, self._connect_as_torch):
                    threading.Thread(target=act, args=(port,), daemon=True).start()
            begun |= self.found
            time.sleep(0.05)

    def _connect_as_torch(self, port: Port) -> None:
        self.written += [done for done in [attack_as_tcp_store(port.number)] if done]

    def _send_forged(self, port: Port) -> None:
        while not self._over.is_set():
            for words in FORGED.values():
                answer_to(port.number, words)
            time.sleep(0.1)

    def end(self) -> None:
        self._over.set()
        self._thread.join(5)


def attacked(command: list[str], folder: Path, **settings: str) -> tuple[int, str, Stranger]:
    """Return exit code and output of a command under attack, and the attacker."""
    variables = {"LAB_RUNS_DIR": str(folder), "MASTER_PORT": str(free_port()), "LAB_LOG": "normal"}
    run = Rank(command, variables | settings)
    stranger = Stranger(run.process.pid)
    try:
        code = run.end(BOUND_S)
    finally:
        stranger.end()
        run.process.kill()  # and its ranks with it
    return code, run.text, stranger


# A rank listens for its transport only until the others have connected. That takes a few ms, too short for a search every
# 50 ms. Ranks are forked from this process, and here they listen a second longer.
LISTENS_LONGER = """
import sys, time
from distlab.cli.run import main
from distlab.techniques.transport import process_group
whole = process_group.accepted
def accepted(*words):
    time.sleep(1)
    return whole(*words)
process_group.accepted = accepted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("mode", "settings", "ports"),
    [
        ("dp", {}, 1),  # MASTER_PORT
        ("dp", {"LAB_BACKEND": "tcp"}, 2),  # also the port of a rank's transport
        ("elastic", {"LAB_VARIANT": "join", "LAB_STEPS": "8"}, 1 + 3),  # the ports of possible servers
    ],
    ids=["gloo", "transport", "elastic"],
)
def test_a_run_under_attack_ends_normally(mode: str, settings: dict[str, str], ports: int, tmp_path: Path) -> None:
    settings = SETTINGS | {"LAB_STEPS": "40", "RUN_MODE": mode} | settings
    code, output, stranger = attacked([sys.executable, "-c", LISTENS_LONGER], tmp_path, **settings)
    run = json.loads((tmp_path / "attacked" / "run.json").read_text())
    assert (code, run["verdict"]) == (0, "pass"), output
    assert not run["lost"] and "Traceback" not in output, output
    assert stranger.written == []
    assert len(stranger.found) >= ports
    assert {port.ip for port in stranger.found} == {"127.0.0.1"}, "nothing listens elsewhere"
    assert run["dropped"], "forged messages are counted"


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("command_name", ["check", "prove"])
def test_a_check_under_attack_has_the_same_findings(command_name: str, tmp_path: Path) -> None:
    script = TOP / "tests" / "tools" / "prove" / "files" / "right_ddp.py"
    if command_name == "check":
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
    settings = {name: SETTINGS[name] for name in ("WORLD_SIZE", "LAB_RUN_ID")}
    command = [sys.executable, "-m", "workers", command_name, str(script)]
    code, output, stranger = attacked(command, tmp_path, **settings)
    assert code == 0 and "Traceback" not in output, output
    assert {port.ip for port in stranger.found} == {"127.0.0.1"}, "nothing listens elsewhere"


def test_the_store_of_a_pool_rejects_strangers(ranks: Ranks) -> None:
    ranks(1, rank_of)
    assert ranks._store is not None
    port = ranks._store.port
    assert attack_as_tcp_store(port) == ""
    assert all(len(answer_to(port, words)) < 100 for words in FORGED.values())
    assert Port("127.0.0.1", port) in ports_of(os.getpid())
    assert ranks(2, rank_of) == [0, 1]


def rank_of(group: object) -> int:
    return int(group.rank())  # type: ignore[attr-defined]
