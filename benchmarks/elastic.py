"""Ranks of `RUN_MODE=elastic` lost at seeded moments: how long until the next step stands, and does the run pass?

    python -m benchmarks.elastic [KILLS] [--seed SEED] [--each RUNS]

Each run is `python -m workers` with WORLD_SIZE real processes, `shrink` and `zero1` by turns. Once they train,
ranks are killed by SIGKILL one after another until one is left; any rank may be the next, rank 0 too. Every third time
it is two at once, every third time a second one while the others agree. Beside these come RUNS runs each with

    paused      a rank that stands still for 6 s, and has to end with 3 when it wakes
    cut         a rank whose links are cut, which has to stop and say so
    came back   a killed rank that is started again: from its first packet to its first step
    beside it   another one is killed at the moment at which it comes back, so that it does while the others agree

The time is from the last loss to the next step that stands, by the table that the run writes. Every run has to pass,
with 0 from every survivor: replayed by one process, each sample seen once.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.rounds import table

WORLD_SIZE = 4
LOST_AFTER_S = 2.0
RUN_TIMEOUT_S = 180.0
COMING_S = 60.0  # for a process that is started again to find its way
PAUSE_S = 6.0
DURING_S = 0.03  # from one kill to the next, while the others agree: they take 10 to 60 ms
KILLED = ("one", "two at once", "during recovery")
BOUNDS_S = dict.fromkeys(KILLED, 1.0) | {"paused": 4.0, "cut": 4.0, "came back": 2.0, "beside it": 1.0}
# A process takes seconds to start; of a gpt so many steps grow roundings beyond 1e-12.
LONG = {"LAB_MODEL": "mlp", "LAB_STEPS": "3000"}
KEY = "of the ranks of one benchmark"
SETTINGS = {
    "RUN_MODE": "elastic", "LAB_LOSSES": "0", "LAB_SEQ": "16", "LAB_STEPS": "300", "LAB_LOG": "full",
    "WORLD_SIZE": str(WORLD_SIZE), "LAB_KEY": KEY, "LAB_LOST_AFTER_S": str(LOST_AFTER_S),
}  # fmt: skip


class Blow(NamedTuple):
    """What was done to a run: which ranks, how, and when the last of them was hit, in Unix time."""

    kind: str
    ranks: tuple[int, ...]
    at: float


class Outcome(NamedTuple):
    """One run: its blows with the seconds until the next step stood, and what was wrong with it."""

    recovered: list[tuple[Blow, float]]
    fault: str


def drawn(draw: random.Random) -> list[tuple[str, list[int]]]:
    """The kills of one run, in their order, until one rank is left."""
    ranks, blows = list(range(WORLD_SIZE)), []
    draw.shuffle(ranks)
    while len(ranks) > 1:
        kind = draw.choice(KILLED) if len(ranks) > 2 else "one"
        num_hit = 1 if kind == "one" else 2
        blows.append((kind, ranks[:num_hit]))
        ranks = ranks[num_hit:]
    return blows


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks, in the order in which the launcher forked them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[1]) == launcher:
                found.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(found)]


class Run:
    """One run under way in a folder of its own."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.log = folder / "run", folder / "log"
        own = {"LAB_RUNS_DIR": str(folder), "LAB_RUN_ID": "run"}
        self.environ = os.environ | SETTINGS | own | settings
        self.launcher = self.started({})
        while "is killed by fault injection" not in self.log.read_text() and self.launcher.poll() is None:
            time.sleep(0.02)
        self.pids = ranks_of(self.launcher.pid)
        self.blows: list[Blow] = []
        self.again: subprocess.Popen[bytes] | None = None

    def started(self, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("a") as output:
            command = [sys.executable, "-m", "workers"]
            return subprocess.Popen(command, env=self.environ | variables, stdout=output, stderr=output)

    def strike(self, kind: str, ranks: list[int]) -> None:
        """Do it, and note when the last one was hit."""
        for number, rank in enumerate(ranks):
            if number and kind == "during recovery":
                time.sleep(DURING_S)
            os.kill(self.pids[rank], signal.SIGSTOP if kind == "paused" else signal.SIGKILL)
        self.blows.append(Blow(kind, tuple(ranks), time.time()))

    def start_again(self, rank: int) -> None:
        """Start a rank that was killed; returns once it has found its way."""
        port = json.loads((self.folder / "ranks.json").read_text())["run"]["port"]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.again = self.started({"RANK": str(rank), "LOCAL_RANK": str(rank), **where})
        deadline = time.monotonic() + COMING_S
        while "rejoins the run" not in self.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.005)

    def outcome(self) -> Outcome:
        """Wait for its end, and judge it."""
        for process in (self.launcher, self.again):
            try:
                if process is not None:
                    process.wait(RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                return Outcome([], f"no end in {RUN_TIMEOUT_S:g} s: {self.log.read_text()[-600:]}")
        return judged(self.folder, self.blows, self.log)


def one_run(kind: str, number: int, seed: int) -> Outcome:
    """A run of one kind with its blows at moments drawn from `seed` and `number`."""
    draw = random.Random(f"{seed} {number} {kind}")
    ranks = draw.sample(range(WORLD_SIZE), 2)
    settings = {"LAB_VARIANT": ("shrink", "zero1")[number % 2]}
    if kind == "came back":
        settings = LONG | {"LAB_VARIANT": ("join", "zero1")[number % 2]}
    if kind == "cut":
        settings["LAB_FAULTS"] = f"cut:rank{ranks[0]}@step{draw.randrange(40, 160)}"
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), **settings)
        if len(run.pids) < WORLD_SIZE:
            return Outcome([], f"it ended before it trained: {run.log.read_text()[-600:]}")
        if kind == "killed":
            for blow in drawn(draw):
                time.sleep(draw.uniform(0.3, 1.2))
                run.strike(*blow)
        if kind == "paused":
            time.sleep(draw.uniform(0.3, 1.2))
            run.strike(kind, ranks[:1])
            time.sleep(PAUSE_S)
            os.kill(run.pids[ranks[0]], signal.SIGCONT)
        if kind == "came back":
            time.sleep(draw.uniform(0.3, 1.2))
            run.strike("one", ranks[:1])
            run.start_again(ranks[0])
            if number % 2:  # at once, so that it is let in while the others agree
                run.strike("beside it", ranks[1:])
        return run.outcome()


def judged(folder: Path, blows: list[Blow], log: Path) -> Outcome:
    """The times to the next step, and the fault of a run that did not pass."""
    try:
        run = json.loads((folder / "run.json").read_text())
    except OSError:
        return Outcome([], f"no run.json: {log.read_text()[-600:]}")
    written = [json.loads(line) for path in folder.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    cuts = [Blow("cut", (each["rank"],), each["at"]) for each in written if each["record"] == "injected"]
    # Rows count from the run's first step on.
    first_at = min((each["first_step_at"] or 0.0 for each in written if each["record"] == "end"), default=0.0)
    steps = sorted(first_at + row[-1] for row in rows_of(written) if row[-1] != "")
    after = {
        blow: min((at - blow.at for at in steps if at >= blow.at), default=float("inf")) for blow in [*blows, *cuts]
    }
    lost = {entry["rank"] for entry in run["lost"]}
    hit = {rank for blow in after for rank in blow.ranks}
    recovered = list(after.items())
    # Lines are wrapped, each behind its rank.
    for words in re.findall(
        r"([\d.]+) s after its first packet", " ".join(re.sub(r"\nrank \d+ \|", " ", log.read_text()).split())
    ):
        recovered.append((Blow("came back", (), 0.0), float(words)))
    fault = "" if run["verdict"] == "pass" and lost == hit else f"{run['verdict']}, lost {lost} where {hit} were hit"
    return Outcome(recovered, fault and f"{fault}: {log.read_text()[-600:]}")


def rows_of(written: list[dict[str, Any]]) -> list[list[Any]]:
    """The changes of members, from the records of the rank that wrote the report."""
    tables = [each for each in written if each["record"] == "table" and each["title"].startswith("What each change")]
    return [row for each in tables for row in each["rows"]]


def main(words: list[str]) -> int:
    """Print the table; 0 if every run passed and every step came in time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument(
        "--each", type=int, default=4, help="runs with a pause, with a cut, and with one that comes back"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    outcomes: list[Outcome] = []
    kinds = [kind for _ in range(given.each) for kind in ("paused", "cut", "came back")]
    while kinds or num_killed(outcomes) < given.kills:
        kind = "killed" if num_killed(outcomes) < given.kills and (len(outcomes) % 4 or not kinds) else kinds.pop(0)
        began = time.monotonic()
        outcomes.append(one_run(kind, len(outcomes), given.seed))
        times = ", ".join(f"{blow.kind} {seconds:.2f} s" for blow, seconds in outcomes[-1].recovered)
        fault = outcomes[-1].fault or "pass"
        print(f"run {len(outcomes)} ({kind}, {time.monotonic() - began:.0f} s): {fault}: {times}", file=sys.stderr)
    return print_outcomes(outcomes)


def num_killed(outcomes: list[Outcome]) -> int:
    """How many ranks were killed; a run without an outcome counts as one, so that there is an end."""
    kills = (len(blow.ranks) for each in outcomes for blow, _ in each.recovered if blow.kind in (*KILLED, "beside it"))
    return sum(kills) + sum(not each.recovered for each in outcomes)


def print_outcomes(outcomes: list[Outcome]) -> int:
    """Print the table; 1 where a run did not pass or a step came late."""
    after: dict[str, list[float]] = {kind: [] for kind in BOUNDS_S}
    for blow, seconds in [each for outcome in outcomes for each in outcome.recovered]:
        after[blow.kind].append(seconds)
    late = {kind: sum(seconds > BOUNDS_S[kind] for seconds in times) for kind, times in after.items()}
    rows = [
        [kind, len(times), f"{median(times):.2f} s", f"{max(times):.2f} s", f"{BOUNDS_S[kind]:g} s", late[kind]]
        for kind, times in after.items() if times
    ]  # fmt: skip
    print(table(["", "times", "next step after, median", "longest", "bound", "over it"], rows))
    faults = sum(bool(each.fault) for each in outcomes)
    print(f"{num_killed(outcomes)} ranks killed in {len(outcomes)} runs; {faults} runs that did not pass")
    return int(bool(sum(late.values())) or bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
