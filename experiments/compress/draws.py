"""What is drawn at random, held to what it claims: no side is preferred, and no step repeats another.

Sums are held to the formula with the draws that the compressor makes, whatever these are; so the draws have to be
looked at by themselves. Each figure is counted against its expectation, in deviations of as many fair draws: more than
SIGMAS of them is no chance (one in 10^9), and the numbers come from the seed, so a run that holds holds again.

    int8     of n numbers a share f above a code, n·f go up (Alistarh et al. 2017, section 3.1: unbiased)
    randomk  k different places, the same on all ranks; over the steps their mean is the middle, and two steps share
             k²/n of them, which a hypergeometric draw would (Stich et al. 2018, section 2.2)
"""

import itertools
import math

import torch
from torch import Size

from experiments.compress.limits import sender
from workers.contract import Build
from workers.lab import Lab
from workers.passes.masks import sampling_errors

SIGMAS = 6.0
SHAPE = Size((64, 32))
SHARES = (0.125, 0.5, 0.75)
RATIOS, STEPS = (0.25, 0.5), 4  # of the places: above a quarter they are drawn in another way; and how many draws
CONTROL = "tests/experiments/test_compress.py::test_draws_that_prefer_fail_the_run"


def check_draws(lab: Lab, name: str, method: str, build: Build) -> None:
    """The largest deviation, in sigmas, of a method that draws."""
    if method not in ("int8", "randomk"):
        return
    off = rounded_up(lab, build) if method == "int8" else max(places(lab, build, ratio) for ratio in RATIOS)
    lab.check("drawn", off, SIGMAS, name, "the worst figure, of as many fair draws", unit="deviations", control=CONTROL)


def rounded_up(lab: Lab, build: Build) -> float:
    """Codes of the whole range and a share above, the same on all ranks; the largest is a whole code."""
    worst, levels, numel = 0.0, 127 // lab.world_size, SHAPE.numel()
    codes = torch.arange(numel, dtype=torch.float64) % (2 * levels - 1) - levels + 1  # from -(L - 1) to L - 1
    for share in SHARES:
        values = codes + share
        values[codes == levels - 1] = levels  # which makes the scale one
        fair = values != levels
        total = sender(lab, build, SHAPE, ratio=1.0)(values).total
        ups = (total - lab.world_size * codes)[fair].round().sum().item()
        worst = max(worst, sampling_errors(ups, lab.world_size * int(fair.sum()), share))
    return worst


def places(lab: Lab, build: Build, ratio: float) -> float:
    """Where there is a sum, step after step, of gradients without a zero."""
    numel, gradient = SHAPE.numel(), torch.full((SHAPE.numel(),), lab.rank + 1.0, dtype=torch.float64)
    send = sender(lab, build, SHAPE, ratio=ratio, error_feedback=False)
    drawn = [send(gradient).total.nonzero().flatten() for _ in range(STEPS)]
    k = round(ratio * numel)
    if any(len(each) != k for each in drawn):
        return math.inf
    left = 1 - k / numel  # a draw without repetition varies less, by about what is left
    middle = torch.cat(drawn).double().mean().item() - (numel - 1) / 2
    spread = math.sqrt((numel**2 - 1) / 12 * left / (STEPS * k))
    shared = [int(torch.isin(one, other).sum()) for one, other in itertools.pairwise(drawn)]
    alike = k * k / numel
    return max(abs(middle) / spread, *(abs(same - alike) / math.sqrt(alike * left * left) for same in shared))
