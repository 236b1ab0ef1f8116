"""Before a run its settings, bytes and claims; after it the losses, and the k at which each recipe breaks down."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import WHOLE_RUN, Claims, Mode, untrainable
from distlab.lab import Lab
from distlab.measure.prediction import Prediction
from distlab.workload import data
from distlab.workload.model import outline
from distlab.workload.user_model import is_own

from .sweep import MULTIPLES, SEEDS, SweepResults, multiples
from .training import LAMB_RATE, LARS_RATE, Recipe, base_rate, sgd

SPREADS = 3
LAYERWISE, PROVEN_STEPS = ("lars", "lamb"), 3


def refuse(config: Config, recipes: Mapping[str, Recipe]) -> list[str]:
    """Sentences about settings that this mode cannot run."""
    if config.model == "line":
        return ["LAB_MODEL='line' has one batch of 32 points, of which there is no multiple, allowed: mlp, gpt"]
    if is_own(config.model):
        return [f"LAB_MODEL={config.model!r}: largebatch trains the lab's own, at its own sizes, allowed: mlp, gpt"]
    refusals = []
    if config.optimizer != "sgd":
        refusals.append(
            f"LAB_OPTIMIZER={config.optimizer} is no part of largebatch: each recipe has an optimizer of its own"
        )
    if config.clip is not None:
        refusals.append(
            f"LAB_CLIP={config.clip:g} is no part of largebatch: a gradient that is clipped does not grow with the rate"
        )
    if "bucket_mib" in config.model_fields_set:
        refusals.append(
            f"LAB_BUCKET_MIB={config.bucket_mib:g} is no part of largebatch: "
            "the gradients of all its runs are one bucket"
        )
    optimizers = {recipe.optimizer for recipe in recipes.values()}
    if config.lr is not None and optimizers and sgd not in optimizers:
        refusals.append(f"LAB_LR={config.lr:g} is the base rate of SGD, which no recipe of LAB_VARIANT takes")
    if config.model == "gpt" and not data.text_refusals(config) and len(data.Text(config)) == 1:
        refusals.append(
            f"the text holds one sample of LAB_SEQ={config.seq} bytes, and another is needed to judge by: "
            "name a longer one in LAB_TEXT"
        )
    return refusals + untrainable(config)


def predict(config: Config, recipes: Mapping[str, Recipe]) -> list[Prediction]:
    """Bytes of one step of all runs together, a value a rank."""
    runs, ranks = SEEDS * len(recipes), config.world_size
    nbytes = runs * outline(config).num_parameters() * getattr(torch, config.dtype).itemsize
    value = (all_reduce_bytes("gloo", ranks, nbytes),) * ranks
    messages = (gloo_all_reduce_messages(ranks, nbytes),) * ranks
    formula = f"2(N-1)/N x S x {runs} runs"
    return [Prediction(config.model, "wire bytes", "B", formula, value, 1, messages=messages)]


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """The proof of each recipe, at every k of the sweep its samples, sampled steps and replicas, and bytes."""
    batches = sum(config.steps % k == 0 for k in (1, 2, 4, 8, 16, 32))
    yield Claims(("effective batch", "seeds"), WHOLE_RUN, one=True, times=batches)
    yield Claims(("held out",), WHOLE_RUN, one=True)
    yield Claims(("replicas",), WHOLE_RUN, times=batches)
    yield Claims(("called bytes", "wire bytes"), (config.model,))
    if config.proof:
        yield Claims(("layers", "global norms"), LAYERWISE)
        yield Claims(("k steps of η against one of kη",), WHOLE_RUN, one=True)
        yield Claims(("gradients", "weights"), mode.names, one=True, times=PROVEN_STEPS)
        plain = [name for name in mode.names if name not in LAYERWISE]
        yield Claims(("learning rate",), plain, one=True, times=PROVEN_STEPS)
        yield Claims(("trained gradients", "trained weights"), mode.names, one=True, times=batches)


def show_settings(lab: Lab, recipes: Sequence[str]) -> None:
    """The model, every k with its effective batch, and the base rates."""
    config, ks = lab.config, multiples(lab.config)
    total = config.steps * config.batch
    lab.say(f"{outline(config).describe()}: {total} samples for every k, {SEEDS} seeds, {config.dtype}", "model")
    left_out = [str(k) for k in MULTIPLES if k not in ks]
    if left_out:
        lab.say(
            f"k = {', '.join(left_out)}: LAB_STEPS={config.steps} is no multiple, so the samples would differ",
            "left out",
        )
    names = ", ".join(recipes)
    lab.say(f"base rates: SGD {base_rate(config):g}, LARS {LARS_RATE:g}, LAMB {LAMB_RATE:g}; recipes {names}", "rates")
    for k in ks:
        batch = data.effective_batch(config.model_copy(update={"batch": k * config.batch}), lab.world_size)
        lab.say(f"k = {k}: {batch}, {config.steps // k} steps", "batch")


def show_found(lab: Lab, found: SweepResults) -> None:
    """A table and a chart of the losses, and the k at which each recipe breaks down."""
    ks, untrained, spread = multiples(lab.config), found.untrained, widest_spread(found)
    rows = [
        [name, *(cell(losses[k], untrained) for k in ks), broken(losses, spread, untrained)]
        for name, losses in found.losses.items()
    ]
    title = f"loss on held-out samples after {lab.config.steps * lab.config.batch} samples"
    columns = ["recipe", *(f"k = {k}" for k in ks), "breaks down at"]
    lab.table(f"{lab.config.model}: {title}, mean of {SEEDS} seeds (least to most)", columns, rows)
    lab.say(
        f"{untrained:.4g} before the first step. A recipe breaks down at the smallest k whose mean loss is above that, "
        f"or more than {SPREADS} x {100 * spread:.2g} % above its own at k = 1, where seeds lie {100 * spread:.2g} % "
        "apart at the widest",
        "found",
    )
    drawn = {
        name: [[float(k), fmean(values)] for k, values in losses.items() if learned(values, untrained)]
        for name, losses in found.losses.items()
    }
    series = {name: [list(axis) for axis in zip(*points, strict=True)] for name, points in drawn.items() if points}
    lab.chart(
        f"{lab.config.model}: held-out loss by batch (not drawn above {untrained:.3g}, that of the untrained model)",
        "k", "loss", series, log_x=True,
    )  # fmt: skip


def learned(losses: list[float], untrained: float) -> bool:
    """Whether the mean over the seeds is no worse than that of a model that never trained, and a number at all."""
    return fmean(losses) <= untrained


def cell(losses: list[float], untrained: float) -> str:
    """Mean, least and most."""
    if not learned(losses, untrained):
        return "diverged"
    return f"{fmean(losses):.3g} ({min(losses):.3g} to {max(losses):.3g})"


def widest_spread(found: SweepResults) -> float:
    """How far apart the seeds are at k = 1, (most - least) / mean: of all recipes that did not diverge there, as three
    may be close by chance."""
    bases = [by_k[1] for by_k in found.losses.values() if learned(by_k[1], found.untrained)]
    return max(((max(base) - min(base)) / fmean(base) for base in bases), default=0.0)


def broken(losses: dict[int, list[float]], spread: float, untrained: float) -> str:
    """The break-down of one recipe, by the spread or because it diverged."""
    bound = fmean(losses[1]) * (1 + SPREADS * spread)
    worse = [k for k, values in sorted(losses.items()) if not (learned(values, untrained) and fmean(values) <= bound)]
    return f"k = {worse[0]}" if worse else f"none up to {max(losses)}"
