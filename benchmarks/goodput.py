"""Goodput of elastic training where ranks fail at random: how often should `restart` save, and what do others lose?

    python -m benchmarks.goodput [FAULTS] [--seed SEED] [--seconds SECONDS] [--picture FILE]

FAULTS is a text as of LAB_FAULTS, of kills and pauses with a rate: `kill:1/2s` if none is given. Four processes train,
and each event comes to the rank and at the second that the seed draws, the same in every run. Who is killed comes back
after 0.2 s with nothing, but for `shrink`; of the last two nobody is killed. Goodput is the time that the steps take
undisturbed over the time that they took.

`restart` runs with a checkpoint every 1, 2, 4, ... steps, each beside the formula (workers/measure/formulas/goodput.py)
for the rate of the text and what was measured: a step, in runs without faults before and after all others, a checkpoint
and a restart, the medians of all runs. The best interval stands there by Young, by Daly and by measure. Then `join` and
`shrink` run, which save nothing.
"""

import argparse
import math
import sys
import tempfile
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.failing import Plan, Told, trained
from benchmarks.rounds import table
from workers.config.faults import Fault, read
from workers.measure.formulas.goodput import daly_s, goodput, young_s
from workers.report import charts
from workers.report.lines import write_atomically
from workers.report.markup import document, section
from workers.testing.calls import Ranks

FAULTS, WORLD_SIZE, SECONDS, CLEAN_STEPS = "kill:1/2s", 4, 20.0, 200
LEAST_STEPS, MOST_STEPS = 50, 3000
INTERVALS = (1, 2, 4, 8, 16, 32, 64)  # steps
NEVER = 10**9
BESIDE = ("join", "shrink")
SETTINGS = {"LAB_SEQ": "16"}
RUN_TIMEOUT_S = 120.0


class Run(NamedTuple):
    """One run of all ranks."""

    steps: int
    wall_s: float
    killed: int
    step_s: float  # from one to the next that stands, the median
    down_s: list[float]  # of all ranks, from each loss to the next step
    saves_s: list[float]  # of all ranks

    @property
    def loss_s(self) -> float:
        """How long nothing stood after a loss, the median."""
        return median(self.down_s) if self.down_s else 0.0


class Costs(NamedTuple):
    """What the formula is told, in seconds."""

    step_s: float
    checkpoint_s: float
    restart_s: float
    between_s: float  # kills, in the mean
    paused: float  # the share of the time that pauses leave

    def goodput(self, saved_every: float) -> float:
        """Of `restart` with a checkpoint every so many steps."""
        interval_s = saved_every * self.step_s
        return self.paused * goodput(interval_s, self.checkpoint_s, self.restart_s, self.between_s)


def asked(words: list[str]) -> argparse.Namespace:
    """The command line; `faults` are kills and pauses with a rate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("faults", nargs="?", default=FAULTS, help=f"kills and pauses with a rate ({FAULTS})")
    parser.add_argument("--seed", type=int, default=1, help="draws which rank and when (1)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that a run takes undisturbed ({SECONDS:g})")
    parser.add_argument("--picture", type=Path, help="a page with the curve, to be written here")
    given = parser.parse_args(words)
    given.entries, wrong = read(given.faults)
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
    told: list[Told] = ranks(WORLD_SIZE, trained, plan, folder, timeout_s=RUN_TIMEOUT_S)
    wall_s = max(each.ended_at for each in told) - told[0].began_at
    killed, step_s = sum(each.killed for each in told), median(each.step_s for each in told if each.step_s)
    down_s = [seconds for each in told for seconds in each.down_s]
    saves_s = [seconds for each in told for seconds in each.saves_s]
    return Run(plan.steps, wall_s, killed, step_s, down_s, saves_s)


def main(words: list[str]) -> int:
    """Print the tables, and write the picture where one is asked for."""
    given = asked(words)
    ranks = Ranks(str(Path.cwd()), ["tests.preloaded"])
    names = count()
    with tempfile.TemporaryDirectory() as folder:

        def go(variant: str, saved_every: int, steps: int, faults: list[Fault]) -> Run:
            name = f"{next(names)} {variant}"
            found = run(ranks, folder, Plan(name, variant, steps, saved_every, faults, given.seed, SETTINGS))
            print(f"{variant}, saved every {saved_every}: {found.wall_s:.1f} s, {found.killed} killed", file=sys.stderr)
            return found

        before = go("shrink", NEVER, CLEAN_STEPS, [])
        steps = round(min(MOST_STEPS, max(LEAST_STEPS, given.seconds / before.step_s)))
        swept = {every: go("restart", every, steps, given.entries) for every in INTERVALS}
        beside = {variant: go(variant, NEVER, steps, given.entries) for variant in BESIDE}
        after = go("shrink", NEVER, CLEAN_STEPS, [])
    ranks.close()
    costs = known((before.step_s + after.step_s) / 2, swept, given.entries)
    print(told(costs, swept, beside))
    if given.picture:
        draw(given.picture, costs, swept, beside)
    return 0


def known(step_s: float, swept: dict[int, Run], faults: list[Fault]) -> Costs:
    """What was measured, and the rates of the text."""
    downs_s = [seconds for each in swept.values() for seconds in each.down_s]
    saves_s = [seconds for each in swept.values() for seconds in each.saves_s]
    kills = sum(1 / each.every_s for each in faults if each.every_s and each.kind == "kill")
    paused = sum((each.duration_s or 0.0) / each.every_s for each in faults if each.every_s and each.kind == "pause")
    restart_s = median(downs_s) - step_s if downs_s else 0.0
    return Costs(step_s, median(saves_s), restart_s, 1 / kills, max(0.0, 1 - paused))


def measured(costs: Costs, run: Run) -> float:
    """Goodput: what the steps take undisturbed over what they took."""
    return run.steps * costs.step_s / run.wall_s


def told(costs: Costs, swept: dict[int, Run], beside: dict[str, Run]) -> str:
    """A row a run, and the best intervals in steps."""
    found = {every: measured(costs, each) for every, each in swept.items()}
    best = max(found, key=lambda every: found[every])
    young, daly = (each(costs.checkpoint_s, costs.between_s) / costs.step_s for each in (young_s, daly_s))
    nearest = min(found, key=lambda every: abs(math.log(every / daly)))
    rows = [
        [
            f"restart, saved every {every}", f"{found[every]:.1%}", f"{costs.goodput(every):.1%}", each.killed,
            f"{1000 * each.loss_s:.0f}", f"{each.wall_s:.1f}",
            " and ".join(["best measured"] * (every == best) + ["nearest to Daly's"] * (every == nearest)),
        ]
        for every, each in swept.items()
    ]  # fmt: skip
    rows += [
        [name, f"{measured(costs, each):.1%}", "-", each.killed, f"{1000 * each.loss_s:.0f}", f"{each.wall_s:.1f}", ""]
        for name, each in beside.items()
    ]
    return "\n".join([
        f"a step {1000 * costs.step_s:.1f} ms, a checkpoint {1000 * costs.checkpoint_s:.1f} ms, a restart"
        f" {1000 * costs.restart_s:.0f} ms; a rank is killed every {costs.between_s:g} s in the mean",
        f"best interval: {young:.1f} steps by Young, {daly:.1f} by Daly, {best} by measure",
        table(["", "goodput", "formula", "killed", "ms to the next step", "seconds", ""], rows),
    ])  # fmt: skip


def draw(path: Path, costs: Costs, swept: dict[int, Run], beside: dict[str, Run]) -> None:
    """A page with the curve: goodput by the steps between two checkpoints."""
    intervals = list(swept)
    fine = [intervals[-1] ** (place / 60) for place in range(61)]
    daly = daly_s(costs.checkpoint_s, costs.between_s) / costs.step_s
    curves: dict[str, charts.Curve] = {
        "restart, formula": (fine, [costs.goodput(every) for every in fine]),
        "restart, measured": (intervals, [measured(costs, each) for each in swept.values()]),
        "best by Daly": ([daly, daly], [0.0, costs.goodput(daly)]),
    }
    curves |= {name: ([1, intervals[-1]], [measured(costs, each)] * 2) for name, each in beside.items()}
    hues = charts.colours(curves) | {"best by Daly": charts.GREY}
    figure = charts.lines(
        curves, "steps between two checkpoints", "goodput", hues, points=80, dashed=["restart, formula"], log_x=True
    )
    title = "Goodput where ranks fail at random"
    card = section(title, charts.drawn(figure, title, 260), f"<pre>{told(costs, swept, beside)}</pre>")
    write_atomically(path, [document(title, [charts.look(), card])])


if __name__ == "__main__":
    from benchmarks import goodput as module  # by its own name, under which the ranks know it too

    sys.exit(module.main(sys.argv[1:]))
