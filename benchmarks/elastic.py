"""Ranks of `RUN_MODE=elastic` killed at seeded moments: how long until the next step stands, and does the run pass?

    python -m benchmarks.elastic [KILLS] [--seed SEED] [--pauses PAUSES]

Each run is `python -m workers` with LAB_VARIANT=shrink and WORLD_SIZE real processes. Once they train, ranks are killed
by SIGKILL one after another until one is left; any rank may be the next, rank 0 too. Every third time it is two at
once, every third time a second one while the others agree. The time is from the last kill to the next step that stands,
by the table that the run writes. A paused rank is left by the others once they have not heard it for LAB_LOST_AFTER_S;
it wakes later, and has to end with 3. Every run has to pass, with 0 from every survivor: replayed by one process, each
sample seen once.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.rounds import table

WORLD_SIZE, STEPS = 4, 300
LOST_AFTER_S = 2.0
RUN_TIMEOUT_S = 180.0
DURING_S = 0.03  # from one kill to the next, while the others agree: they take 10 to 60 ms
BOUNDS_S = {"one": 1.0, "two at once": 1.0, "during recovery": 1.0, "paused": 4.0}
SETTINGS = {
    "RUN_MODE": "elastic", "LAB_VARIANT": "shrink", "LAB_LOSSES": "0", "LAB_STEPS": str(STEPS), "LAB_SEQ": "16",
    "WORLD_SIZE": str(WORLD_SIZE), "LAB_LOST_AFTER_S": str(LOST_AFTER_S),
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


def drawn(draw: random.Random, pause: bool) -> list[tuple[str, list[int]]]:
    """The blows of one run, in their order: until one rank is left, or one pause."""
    ranks = list(range(WORLD_SIZE))
    draw.shuffle(ranks)
    if pause:
        return [("paused", ranks[:1])]
    blows = []
    while len(ranks) > 1:
        kind = draw.choice(("one", "two at once", "during recovery")) if len(ranks) > 2 else "one"
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


def strike(kind: str, pids: list[int]) -> float:
    """Do it; returns when the last one was hit."""
    for number, pid in enumerate(pids):
        if number and kind == "during recovery":
            time.sleep(DURING_S)
        os.kill(pid, signal.SIGSTOP if kind == "paused" else signal.SIGKILL)
    return time.time()


def one_run(number: int, seed: int, pause: bool) -> Outcome:
    """A run with its blows at moments drawn from `seed` and `number`."""
    draw = random.Random(f"{seed} {number} {pause}")
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | SETTINGS | {"LAB_RUNS_DIR": folder, "LAB_RUN_ID": "run"}
        log = Path(folder, "log")
        with log.open("w") as output:
            launcher = subprocess.Popen([sys.executable, "-m", "workers"], env=environ, stdout=output, stderr=output)
        while "dies on purpose" not in log.read_text() and launcher.poll() is None:
            time.sleep(0.02)
        pids, blows = ranks_of(launcher.pid), []
        for kind, ranks in drawn(draw, pause):
            time.sleep(draw.uniform(0.3, 1.2))
            blows.append(Blow(kind, tuple(ranks), strike(kind, [pids[rank] for rank in ranks])))
        if pause:
            time.sleep(6)
            os.kill(pids[blows[0].ranks[0]], signal.SIGCONT)
        try:
            launcher.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            return Outcome([], f"no end in {RUN_TIMEOUT_S:g} s: {log.read_text()[-600:]}")
        return judged(Path(folder, "run"), blows, log)


def judged(folder: Path, blows: list[Blow], log: Path) -> Outcome:
    """The times to the next step, and the fault of a run that did not pass."""
    try:
        run = json.loads((folder / "run.json").read_text())
    except OSError:
        return Outcome([], f"no run.json: {log.read_text()[-600:]}")
    steps = sorted(row[-1] for row in rows_of(folder) if row[-1])
    after = {blow: min((at - blow.at for at in steps if at >= blow.at), default=float("inf")) for blow in blows}
    lost = {entry["rank"] for entry in run["lost"]}
    hit = {rank for blow in blows for rank in blow.ranks}
    fault = "" if run["verdict"] == "pass" and lost == hit else f"{run['verdict']}, lost {lost} where {hit} were hit"
    return Outcome(list(after.items()), fault and f"{fault}: {log.read_text()[-600:]}")


def rows_of(folder: Path) -> list[list[Any]]:
    """The changes of members, from the records of the rank that wrote the report."""
    lines = [json.loads(line) for path in folder.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    tables = [line for line in lines if line["record"] == "table" and line["title"].startswith("What each change")]
    return [row for each in tables for row in each["rows"]]


def main(words: list[str]) -> int:
    """Print the table; 0 if every run passed and every step came in time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("--pauses", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    after: dict[str, list[float]] = {kind: [] for kind in BOUNDS_S}
    killed, faults, number = 0, list[str](), 0
    while killed < given.kills or number < given.pauses:
        for pause in [False] * (killed < given.kills) + [True] * (number < given.pauses):
            outcome = one_run(number, given.seed, pause)
            faults += [outcome.fault] if outcome.fault else []
            killed += sum(len(blow.ranks) for blow, _ in outcome.recovered if not pause)
            killed += WORLD_SIZE - 1 if not outcome.recovered and not pause else 0
            for blow, seconds in outcome.recovered:
                after[blow.kind].append(seconds)
            times = ", ".join(f"{blow.kind} {seconds:.2f} s" for blow, seconds in outcome.recovered)
            print(f"run {number}: {outcome.fault or 'pass'}: {times}", file=sys.stderr, flush=True)
        number += 1
    rows = [
        [kind, len(times), f"{median(times):.2f} s", f"{max(times):.2f} s", f"{BOUNDS_S[kind]:g} s"]
        for kind, times in after.items() if times
    ]  # fmt: skip
    print(table(["", "times", "next step after, median", "longest", "bound"], rows))
    print(f"{killed} ranks killed; {len(faults)} runs that did not pass")
    late = any(max(times) > BOUNDS_S[kind] for kind, times in after.items() if times)
    return int(late or bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
