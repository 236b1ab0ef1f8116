"""Goodput of elastic training where ranks fail at random: how often should `restart` save, and what do others lose?

    python -m benchmarks.goodput [FAULTS] [--seed SEED] [--seconds SECONDS] [--picture FILE]

FAULTS is a text as of LAB_FAULTS, of kills and pauses with a rate: `kill:1/2s` if none is given. Four processes train,
and each event comes to the rank and at the second that the seed draws, the same in every run. Who is killed comes back
after 0.2 s with nothing, but for `shrink`; of the last two nobody is killed. Goodput is the time that the steps take
undisturbed over the time that they took.

`restart` runs with a checkpoint every 1, 2, 4, ... steps, up to the time between two kills. Each stands beside the
formula (benchmarks/useful.py) for the rate of the text and what was measured: a step, in runs without
faults before and after all others, a checkpoint and a restart, the medians of all runs. The best interval is told by
Young, by Daly and by measure. Then `join` and `shrink` run, which save nothing.
"""

import argparse
import sys
import tempfile
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.failing import Plan, Told, trained
from benchmarks.useful import Costs, Run, draw, told
from distlab.config.fault_spec import FaultSpec, parse_faults
from distlab.testing.warm_ranks import Ranks

FAULTS, WORLD_SIZE, SECONDS, CLEAN_STEPS = "kill:1/2s", 4, 20.0, 200
LEAST_STEPS, MOST_STEPS = 50, 3000
INTERVALS = (1, 2, 4, 8, 16, 32, 64)  # steps
NEVER = 10**9
BESIDE = ("join", "shrink")
SETTINGS = {"LAB_SEQ": "16"}
RUN_TIMEOUT_S = 120.0


def asked(words: list[str]) -> argparse.Namespace:
    """The command line; `faults` are kills and pauses with a rate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("faults", nargs="?", default=FAULTS, help=f"kills and pauses with a rate ({FAULTS})")
    parser.add_argument("--seed", type=int, default=1, help="draws which rank and when (1)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that a run takes undisturbed ({SECONDS:g})")
    parser.add_argument("--picture", type=Path, help="a page with the curve, to be written here")
    given = parser.parse_args(words)
    given.entries, wrong = parse_faults(given.faults)
    wrong += [
        f"{each.text!r} is no rate of kills or pauses, allowed: kill:1/2s, pause:200ms:1/5s"
        for each in given.entries
        if each.every_s is None or each.kind not in ("kill", "pause")
    ]
    if not wrong and not any(each.kind == "kill" for each in given.entries):
        wrong = [f"{given.faults!r} kills nobody, allowed: kill:1/2s"]
    if wrong:
        parser.error("; ".join(wrong))
    return given


def run(ranks: Ranks, folder: str, plan: Plan) -> Run:
    """Make it, and bring together what its ranks tell."""
    found: list[Told] = ranks(WORLD_SIZE, trained, plan, folder, timeout_s=RUN_TIMEOUT_S)
    wall_s = max(each.ended_at for each in found) - found[0].began_at
    killed, step_s = sum(each.killed for each in found), median(each.step_s for each in found if each.step_s)
    down_s = [seconds for each in found for seconds in each.down_s]
    saves_s = [seconds for each in found for seconds in each.saves_s]
    return Run(plan.steps, wall_s, killed, step_s, down_s, saves_s)


def main(words: list[str]) -> int:
    """Print the tables, and write the picture where one is asked for."""
    given = asked(words)
    ranks = Ranks(str(Path.cwd()), ["tests.preloaded"])
    names = count()
    with tempfile.TemporaryDirectory() as folder:

        def go(variant: str, saved_every: int, steps: int, faults: list[FaultSpec]) -> Run:
            name = f"{next(names)} {variant}"
            found = run(ranks, folder, Plan(name, variant, steps, saved_every, faults, given.seed, SETTINGS))
            print(f"{variant}, saved every {saved_every}: {found.wall_s:.1f} s, {found.killed} killed", file=sys.stderr)
            return found

        before = go("shrink", NEVER, CLEAN_STEPS, [])
        steps = round(min(MOST_STEPS, max(LEAST_STEPS, given.seconds / before.step_s)))
        tried = [
            every for every in INTERVALS if every * before.step_s <= between_s(given.entries)
        ]  # else little stands
        swept = {every: go("restart", every, steps, given.entries) for every in tried or INTERVALS[:1]}
        beside = {variant: go(variant, NEVER, steps, given.entries) for variant in BESIDE}
        after = go("shrink", NEVER, CLEAN_STEPS, [])
    ranks.close()
    costs = known((before.step_s + after.step_s) / 2, swept, given.entries)
    print(told(costs, swept, beside))
    if given.picture:
        draw(given.picture, costs, swept, beside)
    return 0


def known(step_s: float, swept: dict[int, Run], faults: list[FaultSpec]) -> Costs:
    """What was measured, and the rates of the text."""
    downs_s = [seconds for each in swept.values() for seconds in each.down_s]
    saves_s = [seconds for each in swept.values() for seconds in each.saves_s]
    paused = sum((each.duration_s or 0.0) / each.every_s for each in faults if each.every_s and each.kind == "pause")
    restart_s = median(downs_s) - step_s if downs_s else 0.0
    return Costs(step_s, median(saves_s), restart_s, between_s(faults), max(0.0, 1 - paused))


def between_s(faults: list[FaultSpec]) -> float:
    """Seconds between two kills in the mean."""
    return 1 / sum(1 / each.every_s for each in faults if each.every_s and each.kind == "kill")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
