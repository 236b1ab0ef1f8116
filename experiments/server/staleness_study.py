"""Loss against staleness: the first lesson's line, trained by gradients of weights that are some updates old.

    w <- w - lr·g(w of tau updates ago)

In one process, with no noise and a delay that does not vary, so that nothing else is seen: the same 200 updates, and
so the same samples, for each staleness tau. A late gradient is a push in a direction that was right a while ago; with
a small step that costs little, with a large one the weights overshoot before the first gradient tells of it. How large
is known exactly, since the line's loss is a quadratic: up to lr = 2·sin(pi / (2(2·tau + 1))) / curvature. What is
found by trying is held against that.
"""

import math
import random

from distlab.lab import Lab
from distlab.parameter_server.costs import largest_stable_rate

CONTROL = (
    "tests/experiments/test_server.py::test_late_gradients_are_as_stable_as_the_formula_says_and_the_check_can_fail"
)
POINTS, UPDATES = 32, 200
STALENESS = (0, 1, 2, 4, 8, 16)
RATES = (0.02, 0.05, 0.1, 0.2, 0.5)
SEARCH_UPDATES, SWING, HALVINGS = 2400, 800, 12  # a swing takes 4·tau + 2 updates
HIGHEST_LOSS = 1e3  # where a curve that runs away is cut

Quadratic = tuple[float, float, float]  # means of x·x, x and 1: half of the loss' second derivatives by w and b


def show(lab: Lab) -> None:
    """A chart of the loss after the same updates; the largest rate that is stable at each, as a table and compared."""
    if lab.rank > 0:
        return
    line = points(lab.config.seed)
    ends = {lr: [drawable(losses(line, lr, late, UPDATES)[-1]) for late in STALENESS] for lr in RATES}
    series = {f"lr {lr:g}": [list(map(float, STALENESS)), values] for lr, values in ends.items()}
    lab.chart(f"Loss of the line after {UPDATES} updates", "staleness in updates", "loss", series, log_y=True)
    rows: list[list[object]] = []
    for index, late in enumerate(STALENESS):
        predicted, found = largest_stable_rate(late, curvature(line)), largest_rate(line, late)
        cells = [f"{values[index]:.2g}" for values in ends.values()]
        rows.append([late, *cells, f"{predicted:.4f}", f"{found:.4f}"])
        lab.compare(
            f"largest stable rate at staleness {late}",
            predicted,
            found,
            "",
            0.02 * predicted,
            formula="2 sin(pi/(2(2tau+1))) / curvature",
            control=CONTROL,
        )
    columns = ["staleness", *(f"lr {lr:g}" for lr in RATES), "largest stable lr", "found by trying"]
    lab.table(f"The line after {UPDATES} updates, each from weights that are some updates old: loss", columns, rows)


def points(seed: int) -> Quadratic:
    """The line's 32 points, as far as its loss depends on them: x uniform in (-1, 1)."""
    draw = random.Random(seed)
    x = [draw.uniform(-1.0, 1.0) for _ in range(POINTS)]
    return math.fsum(value * value for value in x) / POINTS, math.fsum(x) / POINTS, 1.0


def curvature(line: Quadratic) -> float:
    """The largest eigenvalue of the loss' second derivatives, 2·[[xx, x], [x, 1]]."""
    xx, x, one = line
    return xx + one + math.hypot(xx - one, 2 * x)


def losses(line: Quadratic, lr: float, late: int, updates: int) -> list[float]:
    """The loss of y = 2x + 1 after each of some `updates` from w = b = 0; infinite once it ran away.

    Each gradient is taken `late` updates ago; before the first update all weights are the same.
    """
    xx, x, one = line
    # How far w and b are from 2 and 1, now last; before the first update all weights are the same.
    past = [(-2.0, -1.0)] * (late + 1)
    found: list[float] = []
    for update in range(updates):
        w, b = past[update % (late + 1)]  # the oldest, and the next to be written over
        now_w, now_b = past[(update + late) % (late + 1)]
        now_w, now_b = now_w - lr * 2 * (xx * w + x * b), now_b - lr * 2 * (x * w + one * b)
        if abs(now_w) + abs(now_b) > HIGHEST_LOSS:
            return found + [math.inf] * (updates - update)
        past[update % (late + 1)] = now_w, now_b
        found.append(xx * now_w * now_w + 2 * x * now_w * now_b + one * now_b * now_b)
    return found


def largest_rate(line: Quadratic, late: int) -> float:
    """Between a learning rate that converges and one that does not, by halving: whether the swings grow tells."""
    low, high = 0.0, 4.0 / curvature(line)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = losses(line, middle, late, SEARCH_UPDATES)
        shrinks = max(found[-SWING:]) < max(found[-2 * SWING : -SWING]) or found[-1] == 0.0
        low, high = (middle, high) if shrinks else (low, middle)
    return low


def drawable(loss: float) -> float:
    """A loss that a chart can draw."""
    return min(max(loss, 1e-12), HIGHEST_LOSS)
