"""What runs under a rate of failures came to: goodput beside its formula, as a table and as a page with the curve."""

import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.rounds import table
from distlab.report import charts
from distlab.report.html import render
from distlab.report.reading import write_atomically

# Goodput: the share of the time that ends in steps that stand, where failures come at random and a checkpoint is all
# that is left after one.
#
# In seconds: T between two checkpoints, C to write one, R to begin again from it, M between failures in the mean,
# which come independently (exponential times between them). Sources, by the names used below:
#
#   Young     Young: A first order approximation to the optimum checkpoint interval (CACM 17(9), 1974)
#   Daly      Daly: A higher order estimate of the optimum checkpoint interval for restart dumps (Future Generation
#             Computer Systems 22(3), 2006)

MOST = 700.0  # times M: exp of more is no number, and nothing stands


def goodput(interval_s: float, checkpoint_s: float, restart_s: float, between_s: float) -> float:
    """T·exp(-R/M) / (M·(exp((T+C)/M) - 1)): what Daly's equation 20 takes for a solution time of 1, turned over.

    A segment of T and its checkpoint count only if nothing fails in them; after a failure the restart may fail too.
    """
    segment = (interval_s + checkpoint_s) / between_s
    if segment > MOST:
        return 0.0
    return interval_s * math.exp(-restart_s / between_s) / (between_s * math.expm1(segment))


def young_s(checkpoint_s: float, between_s: float) -> float:
    """The interval with the least loss, to first order: sqrt(2·C·M). Young: C a segment, and half a segment a
    failure."""
    return math.sqrt(2 * checkpoint_s * between_s)


def daly_s(checkpoint_s: float, between_s: float) -> float:
    """The interval with the least loss, to higher order: sqrt(2CM)·(1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M from C = 2M
    on (Daly, equation 37). It does not depend on R."""
    share = checkpoint_s / (2 * between_s)
    if share >= 1:
        return between_s
    return young_s(checkpoint_s, between_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


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
    figure = charts.line_chart(
        curves, "steps between two checkpoints", "goodput", hues, points=80, dashed=["restart, formula"], log_x=True
    )
    title = "Goodput where ranks fail at random"
    drawing = charts.render_chart(figure, title, 260)
    write_atomically(path, [render("chart.html", title=title, drawing=drawing, told=told(costs, swept, beside))])
