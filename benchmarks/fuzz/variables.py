"""Every variable with hostile values: each is taken, or refused with a sentence, exit code 2, no traceback, no file.

    python -m benchmarks.fuzz variables [--seed 1] [--runs 10]

All modes' variables are judged in this process, as a rank judges its settings before it joins (Config.read, then
distlab/rank/preflight.py); a value that takes longer than the bound counts as slow. Then some, by the seed, are given
to real starts: to the launcher, and to a process with RANK set, whose exit code has to be what was judged.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from distlab.config import Config, ConfigError, settings
from distlab.config.settings import aliases, declared
from distlab.rank.mode_loader import load
from distlab.rank.preflight import refuse
from distlab.report.table import aligned

BOUND_S = 15
PLAIN = [
    "", " ", "x" * 300, "x" * 6000, "a\nb", "a\tb", "a\x01b", "\x7f", "\u202etxt", "\u00a0", "-1", "0", "1", "-0", "+5",
    "0x10", "1_000", " 5 ", "1e3", "4.0", "\u0661\u0662", "\u00b2", str(10**9), str(10**18), str(10**30), "9" * 5000,
    "1e308", "1e-308", "-1e308", "nan", "inf", "-inf", "true", "null", "[]", "{}", "'", '"', "$(x)", "`x`", "%s", "{0}",
    ",", ",,x,", "-", "--help", "~", ".", "..", "../..", "/", "*", "2:0.5", "2:" + "9" * 400, "5ms", "9" * 400 + "mbit",
    "/dev/zero", "/dev/urandom", "/dev/null", "/dev/full", "/proc", "/proc/self/mem", "/proc/kmsg", "/sys", "/dev",
    "/root/" + "x" * 255, "x/" * 3000, "localhost", "0.0.0.0", "x" * 64 + ".example",
]  # fmt: skip
RANDOM = 8  # strings of random bytes
TINY = {
    "LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_WIDTH": "8", "LAB_STEPS": "2", "LAB_VARIANT": "flat", "WORLD_SIZE": "2",
}  # fmt: skip
# What a start is not tried with: values with which it would only wait, or start other ranks than the two.
NOT_STARTED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_JOIN_TIMEOUT_S", "RUN_MODE", "LAB_STEPS",
    "LAB_BACKEND", "LAB_DEVICE",
}  # fmt: skip


@dataclass
class Row:
    """What became of the values of one kind of variable."""

    tried: int = 0
    refused: int = 0
    taken: int = 0
    worst_s: float = 0.0
    tracebacks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # slow, more than a sentence, or one that no terminal shows

    def cells(self, kind: str) -> list[str]:
        counts = [self.tried, self.refused, self.taken, f"{self.worst_s:.2f}", len(self.tracebacks), len(self.wrong)]
        return [kind, *map(str, counts)]


class Slow(BaseException):
    """The bound has passed; no `except Exception` of the lab's takes it."""


def main(words: Sequence[str]) -> int:
    """Print the table; 0 if nothing was slow, raised or answered otherwise than judged."""
    asked = parser().parse_args(words)
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # a path without "/" is made here, if it is made at all
        rows, judged = judge_all(draw, made_files(Path(name)), Path(name) / "runs")
        starts = started(draw, judged, asked.runs, Path(name))
    print("\n".join(aligned(["kind", "values", "refused", "taken", "worst s", "tracebacks", "wrong"], [
        *(row.cells(kind) for kind, row in rows.items()), starts.cells("started for real"),
    ])))  # fmt: skip
    faults = [text for row in [*rows.values(), starts] for text in row.tracebacks + row.wrong]
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.fuzz variables", description=__doc__.splitlines()[0])
    made.add_argument("--seed", type=int, default=1, help="of random values and of what is started")
    made.add_argument("--runs", type=int, default=10, help="how many are started for real")
    return made


def made_files(folder: Path) -> list[str]:
    """Paths that are not what they seem."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.py")
    return [str(folder / name) for name in ("pipe", "socket", "loop", "gone", "empty", "folder", "pipe.py")]


def variables() -> Iterator[tuple[str, str, str]]:
    """Mode, variable and its kind: those of all modes with dp, and each mode's own."""
    for mode in settings.modes():
        own = declared(mode)
        for model in (Config, own) if mode == "dp" else (own,):
            for alias, name in aliases(model).items():
                yield mode, alias, kind_of(model.model_fields[name].annotation)


def kind_of(annotation: object) -> str:
    """What a variable holds, in a word for the table."""
    kinds = {annotation, *typing.get_args(annotation)}
    for kind, word in ((bool, "switches"), (int, "whole numbers"), (float, "numbers"), (Path, "paths")):
        if kind in kinds:
            return word
    return "words"


def judge_all(draw: random.Random, paths: list[str], runs: Path) -> tuple[dict[str, Row], list[tuple[str, str, bool]]]:
    """A row a kind, and of dp's variables each value with whether it is taken."""
    noise = [
        bytes(draw.choice(range(1, 256)) for _ in range(draw.randint(1, 40))).decode(errors="surrogateescape")
        for _ in range(RANDOM)
    ]
    rows: dict[str, Row] = {}
    judged = []
    for mode, name, kind in variables():
        row = rows.setdefault(kind, Row())
        for value in [*PLAIN, *paths, *noise]:
            rank = {"RANK": "0", "MASTER_ADDR": "127.0.0.1"} if name in ("RANK", "MASTER_ADDR", "LOCAL_RANK") else {}
            environ = {"RUN_MODE": mode, "LAB_RUNS_DIR": str(runs)} | rank | {name: value}
            taken = judge(row, environ, f"{name}={value[:40]!r} in {mode}")
            if mode == "dp":
                judged.append((name, value, taken))
    return rows, judged


def judge(row: Row, environ: dict[str, str], what: str) -> bool:
    """Take it or refuse it, as a rank does before it joins; whether it was taken."""
    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(BOUND_S)
    begun, row.tried, taken = time.monotonic(), row.tried + 1, False
    try:
        config = Config.read(environ)
        refuse(config, load(config.run_mode))
        row.taken, taken = row.taken + 1, True
    except ConfigError as error:
        row.refused += 1
        if any(len(fault) > 600 or not fault.isprintable() for fault in error.faults) or not error.faults:
            row.wrong.append(f"{what}: {error.faults}")
    except Slow:
        row.wrong.append(f"{what}: no answer in {BOUND_S} s")
    except Exception as error:  # whatever it is, it is what this looks for
        row.tracebacks.append(f"{what}: {type(error).__name__}: {str(error)[:100]}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        row.worst_s = max(row.worst_s, time.monotonic() - begun)
    return taken


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise Slow(number, frame)


def started(draw: random.Random, judged: list[tuple[str, str, bool]], count: int, folder: Path) -> Row:
    """Some that were taken and some that were refused, started by the launcher or, if refused, as rank 0 too."""
    row = Row()
    possible = [each for each in judged if each[0] not in NOT_STARTED]
    for number in range(count):
        name, value, taken = draw.choice([each for each in possible if each[2] == bool(number % 3 == 0)])
        rank = {"RANK": "0", "MASTER_ADDR": "127.0.0.1"} if number % 2 and not taken else {}
        row.tried += 1
        begun = time.monotonic()
        environ = os.environ | {"PYTHONPATH": str(settings.EXPERIMENTS.parent), "LAB_RUNS_DIR": str(folder / "runs")}
        done = subprocess.run(
            [sys.executable, "-m", "workers"], env=environ | TINY | rank | {name: value}, timeout=300, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        row.refused, row.taken = row.refused + (done.returncode == 2), row.taken + (done.returncode == 0)
        if not taken:  # a whole run takes as long as it takes
            row.worst_s = max(row.worst_s, time.monotonic() - begun)
        what = f"{name}={value[:40]!r} as {'rank 0' if rank else 'launcher'}"
        if "Traceback" in done.stdout:
            row.tracebacks.append(f"{what}: {done.stdout.splitlines()[-1]}")
        elif done.returncode != (0 if taken else 2):
            row.wrong.append(f"{what}: exit code {done.returncode}: {done.stdout[-300:]}")
    return row
