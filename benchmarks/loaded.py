"""Runs beside twenty busy loops, two at a time: nobody is given up who computes, and who is killed is named within 5 s.

    python -m benchmarks.loaded [RUNS] [--kills|--stops] [--quiet]

A run is WORLD_SIZE real processes on the real path: the start, the store, gloo, heartbeats to and from
rank 0's server, steps of all_reduce, the agreement on a verdict. What it leaves out is a lesson and its report.
Importing torch takes a core for a second, so ranks are forked from this process, which has imported it and has used no
thread of its own. With --kills one rank is killed in the middle of each run, with --stops it is stopped: the time is
from then to the sentence on each survivor.
"""

import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rounds import table
from distlab.lab.cluster.departure import Succession
from distlab.lab.cluster.join import init_process_group, join
from distlab.lab.cluster.launch import free_port
from distlab.lab.cluster.messages import Verdict
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config
from distlab.lab.report.run_folder import Outcome

RUNS, AT_ONCE, BUSY, WORLD_SIZE = 200, 2, 20, 4
STEPS, STEP_S = 40, 0.02
NAMED_WITHIN_S = {"SIGKILL": 5.0, "SIGSTOP": 7.5}
RUN_TIMEOUT_S = 120.0
BUSY_LOOP = [sys.executable, "-S", "-c", "while True: pass"]


def rank_of_run(config: Config, folder: Path, results: Connection) -> None:
    """One rank, from the rendezvous to its end; tells (what, when) as it goes."""

    def tell(what: str, value: Any = None) -> None:
        results.send((what, value, time.monotonic()))

    def on_verdict(verdict: Verdict, succession: Succession) -> None:
        tell("verdict", [lost.rank for lost in verdict.lost])
        outcome = Outcome(folder, "loaded")
        if not succession.declared_dead and succession.is_my_turn(outcome.claimed):
            outcome.write({"verdict": "lost"})

    cluster = join(config, "loaded", lambda _text: None)
    watch = Watchdog(cluster, config, lambda _text: None, on_verdict)
    watch.start()
    try:
        init_process_group(cluster, config)
        for step in range(STEPS):
            watch.main.at(step, "compute")
            compute()
            watch.main.at(step, "all_reduce")
            total = torch.ones(4)
            dist.all_reduce(total)
            tell("step", step)
        watch.agree(lambda: None)
    except Exception as error:
        watch.fail(error)
    watch.finish()
    tell("passed", watch.longest_gap_s)
    os._exit(0)


def compute() -> None:
    """Keep the interpreter's lock for STEP_S of a core, as a rank's own Python does between two collectives."""
    until = time.thread_time() + STEP_S
    while time.thread_time() < until:
        pass


def one_run(number: int, *, by: str) -> dict[str, Any]:
    """What became of one run: the exit codes, whom survivors named, and how long after the signal each of them did."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(Path(folder), number, by)


def run_in(folder: Path, number: int, by: str) -> dict[str, Any]:
    draw = random.Random(number)
    victim, kill_at = draw.randrange(WORLD_SIZE), draw.randrange(2, STEPS - 5)
    port, context = free_port(), multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(WORLD_SIZE):
        config = Config.read(
            {
                "RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "LAB_RUN_ID": "loaded",
            }
        )  # fmt: skip
        received, results = context.Pipe(duplex=False)
        arguments = (config, folder, results)
        processes.append(context.Process(target=rank_of_run, args=arguments, daemon=True))
        processes[-1].start()
        results.close()
        pipes.append(received)
    killed_at: float | None = None
    named: dict[int, tuple[list[int], float]] = {}
    gaps_s: list[float] = []
    open_pipes, deadline = set(pipes), time.monotonic() + RUN_TIMEOUT_S
    while open_pipes and time.monotonic() < deadline:
        ready = wait(list(open_pipes), timeout=1.0)
        for rank, received in enumerate(pipes):
            if received not in ready:
                continue
            try:
                what, value, at = received.recv()
            except EOFError:
                open_pipes.discard(received)
                continue
            if what == "verdict":
                named[rank] = value, at
            if what == "passed":
                gaps_s.append(value)
            if by and killed_at is None and what == "step" and rank == victim and value >= kill_at:
                os.kill(processes[victim].pid or 0, signal.Signals[by])
                killed_at = time.monotonic()
            if by == "SIGSTOP" and len(named) == WORLD_SIZE - 1:
                os.kill(processes[victim].pid or 0, signal.SIGCONT)
    for process in processes:
        process.join(5)
        process.kill()
        process.join()
    delays = [at - killed_at for _, at in named.values()] if killed_at is not None else []
    return {
        "codes": [process.exitcode for process in processes],
        "named": {rank: lost for rank, (lost, _) in named.items()},
        "victim": victim if by else None,
        "named_after_s": delays,
        "gaps_s": gaps_s,
        "run": json.loads((folder / "run.json").read_text())["verdict"] if (folder / "run.json").exists() else "",
    }


def is_right(run: dict[str, Any]) -> bool:
    """Whether all ranks passed, or all survivors named the one that was killed and nobody else, and wrote it once."""
    victim = run["victim"]
    if victim is None:
        return run["codes"] == [0] * WORLD_SIZE and not run["named"]
    others = [code for rank, code in enumerate(run["codes"]) if rank != victim]
    named = [lost for rank, lost in run["named"].items() if rank != victim]  # one that wakes learns it as well
    all_named = len(named) == WORLD_SIZE - 1 and all(lost == [victim] for lost in named)
    return all_named and others == [3] * (WORLD_SIZE - 1) and run["run"] == "lost"


def main(words: list[str]) -> int:
    """Print the table; 0 if nobody was given up falsely, and every loss was named in time."""
    by = "SIGKILL" if "--kills" in words else "SIGSTOP" if "--stops" in words else ""
    numbers, busy = [int(word) for word in words if word.isdigit()], 0 if "--quiet" in words else BUSY
    runs, results = numbers[0] if numbers else RUNS, []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ExitStack() as stack:
        for _ in range(busy):
            loop = subprocess.Popen(BUSY_LOOP)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        sides = stack.enter_context(ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("fork")))
        for number, result in enumerate(sides.map(partial(one_run, by=by), range(runs))):
            results.append(result)
            if not is_right(result):
                print(f"run {number}: {result}", flush=True)
    wrong = sum(not is_right(result) for result in results)
    delays = [delay for result in results for delay in result["named_after_s"]]
    rows = [["runs", str(runs), ""], ["ranks given up falsely, or runs that ended otherwise", str(wrong), "0"]]
    if delays:
        rows.append([f"from {by} to its sentence, the median", f"{statistics.median(delays):.2f} s", ""])
        rows.append([f"from {by} to its sentence, the longest", f"{max(delays):.2f} s", f"{NAMED_WITHIN_S[by]:g} s"])
    gaps_s = [gap for result in results for gap in result["gaps_s"]]
    rows.append(["longest gap between two heartbeats of a rank", f"{max(gaps_s, default=0.0):.2f} s", ""])
    print(table([f"{busy} busy loops on {os.cpu_count()} cores", "measured", "at most"], rows))
    return int(wrong > 0 or any(delay > NAMED_WITHIN_S[by] for delay in delays))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
