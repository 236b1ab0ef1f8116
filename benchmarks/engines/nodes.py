"""Machines made of this one: network namespaces on a bridge, each with a host name and an /etc/hosts of its own.

    with Nodes(3, folder) as nodes:
        agent = nodes.start(1, ["torchrun", ...], log=folder / "node1.out")
        nodes.kill(1)  # every process there at once, as when the power goes

They share the disk, as a cluster's nodes do. Needs root, iproute2 and util-linux; this machine's own network is left as
it is.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

TOP = Path(__file__).parents[2]
NEEDED = ("ip", "nsenter", "unshare")
# In the new namespaces: the host's name, its /etc/hosts, then the command itself.
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
ENDED_S = 20.0


class Nodes:
    """`count` nodes, `node0` on; every process is ended with the block."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._prefix = f"rl{os.getpid()}n"
        self._hosts = folder / "hosts"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        addresses = [f"10.77.0.{10 + node}" for node in range(self.count)]
        lines = [f"{address} node{node}" for node, address in enumerate(addresses)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        bridge = self._prefix + "sw"
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "link", "set", "br0", "up")
        for node, address in enumerate(addresses):
            own, port = self.namespace(node), f"p{node}"
            ip("netns", "add", own)
            ip("-n", own, "link", "set", "lo", "up")
            ip("link", "add", "eth0", "netns", own, "type", "veth", "peer", "name", port, "netns", bridge)
            ip("-n", bridge, "link", "set", port, "master", "br0", "up")
            ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", own, "link", "set", "eth0", "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in range(self.count):
            self.kill(node)
        for process in self._started:
            process.kill()
            process.wait()
        for name in [self.namespace(node) for node in range(self.count)] + [self._prefix + "sw"]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def namespace(self, node: int) -> str:
        """The name of a node's network namespace."""
        return f"{self._prefix}{node}"

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """What runs `words` on a node."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(node)}"]
        unshare = ["unshare", "--uts", "--mount", "--propagation", "private"]
        return [*enter, *unshare, "sh", "-c", ENTER, "sh", f"node{node}", str(self._hosts), *words]

    def start(
        self, node: int, words: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a node, in the lab's folder; what it prints goes to the end of `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(node, words), cwd=TOP, env=dict(os.environ) | dict(variables or {}),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, node: int, *words: str, variables: Mapping[str, str] | None = None, timeout_s: float = 60) -> str:
        """What a command on a node prints; raises where it fails or takes too long."""
        return subprocess.run(
            self.command(node, words), cwd=TOP, env=dict(os.environ) | dict(variables or {}),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True,
        ).stdout  # fmt: skip

    def ranks(self, node: int) -> list[int]:
        """The processes on a node that are ranks: those that an engine started as `python -m workers`."""
        found = []
        for pid in self.pids(node):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if words[-3:] == [b"-m", b"workers", b""] and (b"RANK=" in environ or b"PROCID=" in environ):
                    found.append(pid)
        return found

    def rank_number(self, node: int, variable: str) -> int | None:
        """The number of the rank that runs on a node, as its engine's variable says; None where none does."""
        for pid in self.ranks(node):
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(f"{variable}=".encode()):
                    return int(word.partition(b"=")[2])
        return None

    def pids(self, node: int) -> list[int]:
        """All processes on a node."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace(node)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]

    def kill(self, node: int) -> None:
        """End every process on a node at once."""
        deadline = time.monotonic() + ENDED_S
        while (pids := self.pids(node)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing() -> str:
    """Why there can be no nodes here, in a sentence; empty where there can."""
    if os.geteuid() != 0:
        return "machines of namespaces need root: run it as root, or in a virtual machine"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: iproute2, util-linux)" if absent else ""


def install(program: str, *packages: str) -> None:
    """Debian's packages, where the program is not there yet."""
    if shutil.which(program) is None:
        for words in (("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", *packages)):
            environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", *words], stdout=subprocess.DEVNULL, check=True, env=environ)
