"""What is said of the sweep: the settings of every k before it, the losses and the break-down after it."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import torch

from experiments.largebatch.recipes import LAMB_RATE, LARS_RATE, base_rate
from experiments.largebatch.sweep import MULTIPLES, SEEDS, Found, multiples
from workers.config import Config
from workers.lab import Lab
from workers.workload.data import effective_batch
from workers.workload.model import outline

SPREADS = 3


def show_settings(lab: Lab, config: Config, recipes: Sequence[str]) -> None:
    """What is about to run: the model, every k with its effective batch, and the rates."""
    ks = multiples(config)
    sizes = f"width {config.width}, depth {config.depth}" + (f", {config.seq} bytes" if config.model == "gpt" else "")
    total = config.steps * config.batch
    lab.say(
        f"{outline(config).describe()} ({sizes}): {total} samples for every k, {SEEDS} seeds, {config.dtype}", "model"
    )
    left_out = [str(k) for k in MULTIPLES if k not in ks]
    if left_out:
        lab.say(
            f"k = {', '.join(left_out)}: LAB_STEPS={config.steps} is no multiple, so the samples would differ",
            "left out",
        )
    names = ", ".join(recipes)
    lab.say(f"base rates: SGD {base_rate(config):g}, LARS {LARS_RATE:g}, LAMB {LAMB_RATE:g}; recipes {names}", "rates")
    for k in ks:
        batch = effective_batch(config.model_copy(update={"batch": k * config.batch}), lab.world_size)
        lab.say(f"k = {k}: {batch}, {config.steps // k} steps", "batch")


def show_found(lab: Lab, config: Config, found: Found) -> None:
    """The table, the chart, and the k at which each recipe breaks down."""
    ks, untrained = list(found.seconds), found.untrained
    spread = widest_spread(found.losses.values(), untrained)
    rows = [
        [name, *(cell(losses[k], untrained) for k in ks), broken(losses, spread, untrained)]
        for name, losses in found.losses.items()
    ]
    samples = config.steps * config.batch
    lab.table(
        f"{config.model}: loss on held-out samples after {samples} samples, mean of {SEEDS} seeds (least to most)",
        ["recipe", *(f"k = {k}" for k in ks), "breaks down at"],
        rows,
    )
    lab.say(f"{config.model}: {untrained:.4g} before the first step. {rule(spread)}", "found")
    show_time(lab, config, found)
    series = {
        name: [list(map(float, pair)) for pair in zip(*drawn(losses, untrained), strict=True)]
        for name, losses in found.losses.items()
        if drawn(losses, untrained)
    }
    lab.chart(
        f"{config.model}: held-out loss by batch (not drawn above {untrained:.3g}, that of the untrained model)",
        "k", "loss", series, log_x=True,
    )  # fmt: skip


def show_time(lab: Lab, config: Config, found: Found) -> None:
    """What the steps of every k took and sent; at k = 1 fewer step together, since recipes of one optimizer are one."""
    columns = ["k", "steps", "runs", "ms a step of all runs", "s in all", "MB sent a rank by each run"]
    rows = [
        [k, config.steps // k, found.runs[k], 1e3 * s * k / config.steps, s, sent_bytes(lab, config, k) / 1e6]
        for k, s in found.seconds.items()
    ]
    lab.table(f"{config.model}: time", columns, rows)


def learned(losses: list[float], untrained: float) -> bool:
    """Whether the mean over the seeds is no worse than that of a model that never trained, and a number at all."""
    return fmean(losses) <= untrained


def cell(losses: list[float], untrained: float) -> str:
    """Mean, least and most."""
    if not learned(losses, untrained):
        return "diverged"
    return f"{fmean(losses):.3g} ({min(losses):.3g} to {max(losses):.3g})"


def widest_spread(losses: Iterable[dict[int, list[float]]], untrained: float) -> float | None:
    """How far apart the seeds are at k = 1, (most - least) / mean: of all recipes, as three may be close by chance.

    Recipes that diverged there do not count, since their seeds are any distance apart; None where no other is left.
    """
    bases = [by_k[1] for by_k in losses if learned(by_k[1], untrained)]
    return max(((max(base) - min(base)) / fmean(base) for base in bases), default=None)


def broken(losses: dict[int, list[float]], spread: float | None, untrained: float) -> str:
    """The break-down of one recipe, by its spread or because it diverged."""
    bound = fmean(losses[1]) * (1 + SPREADS * (spread or 0.0))
    worse = [k for k, values in sorted(losses.items()) if not (learned(values, untrained) and fmean(values) <= bound)]
    return f"k = {worse[0]}" if worse else f"none up to {max(losses)}"


def rule(spread: float | None) -> str:
    """When a recipe breaks down, in words."""
    if spread is None:
        return "No recipe is below that at k = 1: none has a loss that a larger batch could be held against"
    return (
        "A recipe breaks down at the smallest k whose mean loss is above that, or more than "
        f"{SPREADS} x {100 * spread:.2g} % above its own at k = 1, where seeds lie {100 * spread:.2g} % apart at the "
        "widest"
    )


def drawn(losses: dict[int, list[float]], untrained: float) -> list[tuple[int, float]]:
    """Points of the chart: those that are not off it."""
    return [(k, fmean(values)) for k, values in losses.items() if learned(values, untrained)]


def sent_bytes(lab: Lab, config: Config, k: int) -> float:
    """What a rank sends for one run over all its steps: 2(N-1)/N x S each."""
    nbytes: int = outline(config).num_parameters() * getattr(torch, config.dtype).itemsize
    return 2 * (lab.world_size - 1) / lab.world_size * nbytes * (config.steps // k)
