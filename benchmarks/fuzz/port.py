"""10,000 datagrams and 300 connections that no rank may believe, thrown at a run's ports while its ranks join, run and
end.

Twice the same run of three ranks: quiet, then under fire. Nothing may differ but the counter: verdict, exit codes,
checks and losses to the bit.
"""

import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.fuzz._tap import HERE, Tap
from benchmarks.fuzz._wrong import Wrong
from distlab.cluster.authenticated_messages import key_of
from distlab.cluster.launch import free_port
from distlab.config import Config
from distlab.report.reading import read_run
from distlab.report.records import Losses, select
from tests.transport.strangers import FORGED

SEED, DATAGRAMS, CONNECTIONS = 1, 10_000, 300
WHILE_JOINING = 6_000  # are sent before the last rank starts
PER_S, BATCH = 1000, 10
BOUND_S = 140.0  # a run; 15 s each where cores are free, most of it the import of torch
SETTINGS = {
    "RUN_MODE": "dp", "WORLD_SIZE": "3", "LAB_VARIANT": "flat", "LAB_MODEL": "mlp", "LAB_DEPTH": "1",
    "LAB_RUN_ID": "fuzzed", "LAB_STEPS": "40",
}  # fmt: skip


class Run:
    """Three ranks as processes; ranks 1 and 2 ask at `tap`'s port where there is one."""

    def __init__(self, runs: Path, key: str, port: int) -> None:
        self.runs, self.key, self.port = runs, key, port
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, master_port: int) -> None:
        """Start the next rank."""
        rank = len(self.ranks)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAB_", "MASTER_", "RANK"))}
        place = {"RANK": str(rank), "MASTER_ADDR": HERE, "MASTER_PORT": str(master_port), "LAB_KEY": self.key}
        log = (self.runs / f"rank{rank}.out").open("wb")
        self.ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "workers"],
                env=clean | SETTINGS | place | {"LAB_RUNS_DIR": str(self.runs), "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdout=log, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def outcome(self) -> dict[str, Any]:
        """What must not differ, and the counter."""
        path = self.runs / "fuzzed" / "run.json"
        run = json.loads(path.read_text()) if path.exists() else {}
        return {
            "verdict": run.get("verdict"),
            "exit codes": [rank.poll() for rank in self.ranks],
            "checks": [(each["variant"], each["name"], each["max_abs_diff"]) for each in run.get("checks", [])],
            "losses": [entry.values for _, entry in select(read_run(path.parent), Losses)] if run else [],
            "lost": run.get("lost"),
            "dropped": run.get("dropped"),
        }

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def quiet(runs: Path, key: str, deadline: float) -> dict[str, Any]:
    """The outcome of the run that nobody disturbs."""
    run = Run(runs, key, free_port())
    try:
        for _ in range(3):
            run.start(run.port)
        while run.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        return run.outcome()
    finally:
        run.end()


def under_fire(runs: Path, key: str, deadline: float, sent: Counter[tuple[str, str]]) -> dict[str, Any]:
    """The outcome of the run at whose ports all is thrown; `sent` counts it by kind and by where it went."""
    run = Run(runs, key, free_port())
    run_key = key_of(Config.read({"LAB_KEY": key})).secret
    with ExitStack() as kept, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        kept.callback(run.end)
        udp.bind((HERE, 0))
        tap = Tap(run.port, udp.getsockname())
        wrong = Wrong(SEED, run_key, tap)
        run.start(run.port)
        run.start(tap.port)
        while not tap.heard and time.monotonic() < deadline:
            time.sleep(0.05)
        callers = threading.Thread(target=call, args=(run, tap, sent, kept, deadline), daemon=True)
        callers.start()
        kinds = list(wrong.kinds)
        total = 0
        while run.alive and time.monotonic() < deadline:
            for _ in range(BATCH):
                kind = kinds[total % len(kinds)]
                to_board = total // len(kinds) % 2 == 0
                port = run.port if to_board else targets(tap)[total % len(targets(tap))]
                with suppress(OSError):  # a rank that has ended
                    udp.sendto(wrong.kinds[kind](), (HERE, port))
                sent[kind, "MASTER_PORT" if to_board else "heartbeats"] += 1
                total += 1
            if total >= WHILE_JOINING and len(run.ranks) < 3:
                run.start(tap.port)
            time.sleep(BATCH / PER_S)
        callers.join(2.0)
        return run.outcome()


def targets(tap: Tap) -> list[int]:
    """The heartbeat ports that are known so far."""
    return tap.ports()


def call(run: Run, tap: Tap, sent: Counter[tuple[str, str]], kept: ExitStack, deadline: float) -> None:
    """Connections: to MASTER_PORT, and once the board has told it to the store's; some say garbage, some what could
    pass for a rank's words, some a byte now and then, some nothing."""
    slow: list[socket.socket] = []
    forged = list(FORGED.values())
    for number, kind in zip(range(CONNECTIONS), itertools.cycle(KINDS), strict=False):
        while number >= CONNECTIONS // 2 and tap.sealed is None and run.alive and time.monotonic() < deadline:
            time.sleep(0.05)  # half of them are for a run whose store is known
        if not run.alive or time.monotonic() > deadline:
            return
        store = tap.sealed["store_port"] if tap.sealed is not None and number // len(KINDS) % 2 else None
        with suppress(OSError):
            connection = kept.enter_context(socket.create_connection((HERE, store or run.port), 1.0))
            connection.setblocking(False)
            sent[kind, "the store's port" if store else "MASTER_PORT"] += 1
            if kind == "connections with garbage":
                connection.send(os.urandom(600))
            if kind == "connections with what is forged":
                connection.send(forged[number // len(KINDS) % len(forged)])
            slow += [connection] * (kind == "connections that send a byte now and then")
        for one in slow[-20:]:
            with suppress(OSError):
                one.send(b"\x01")
        time.sleep(0.05)


KINDS = (
    "connections with garbage", "connections with what is forged", "connections that send a byte now and then",
    "connections that say nothing",
)  # fmt: skip


def brief(value: Any) -> str:
    """A value, or of a long one how much it is."""
    return str(value) if len(str(value)) < 60 else f"{len(value)} of {len(str(value))} letters"


def main(words: Sequence[str] = ()) -> int:
    """Print the table; 0 if nothing but the counter differs."""
    del words
    key = secrets.token_hex(16)
    sent: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        plain = quiet(Path(first), key, time.monotonic() + BOUND_S)
        fired = under_fire(Path(second), key, time.monotonic() + BOUND_S, sent)
        if os.environ.get("SHOW_LOGS"):
            print("\n".join(path.read_text(errors="replace") for path in sorted(Path(second).glob("rank*.out"))))
    places = ("MASTER_PORT", "heartbeats", "the store's port")
    print(f"| what was sent | {' | '.join(places)} |\n|---|{'---|' * len(places)}")
    for kind in dict.fromkeys(kind for kind, _ in sent):
        print(f"| {kind} | {' | '.join(str(sent[kind, place]) for place in places)} |")
    print("\n| what followed | quiet | under fire |\n|---|---|---|")
    same = ("verdict", "exit codes", "lost", "checks", "losses")
    for name in same:
        shown = [brief(found[name]) for found in (plain, fired)]
        print(f"| {name} | {shown[0]} | {shown[1]} |")
    for name, found in (("quiet", plain), ("under fire", fired)):
        print(f"\ndropped, {name}: {json.dumps(found['dropped'])}")
    datagrams = sum(count for (kind, _), count in sent.items() if "connections" not in kind)
    print(f"\n{datagrams} datagrams, {sum(sent.values()) - datagrams} connections, seed {SEED}")
    held = all(plain[name] == fired[name] for name in same) and plain["verdict"] == "pass" and datagrams >= DATAGRAMS
    print("nothing differs but the counter" if held else "FAILED: something differs, or too little was sent")
    return 0 if held else 1
