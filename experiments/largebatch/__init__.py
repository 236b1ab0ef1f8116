"""Large batches: k times the samples a step, k times fewer steps, and what the learning rate has to do about it.

More ranks are of use only if a step has more samples, and for the same samples there are then fewer steps. If nothing
else changes, training is k times slower where it matters. So each step is made longer, and from some k on that fails:
the weights move so far in one step that its gradient no longer says anything about the end of it. That k, the
break-down, is what the run looks for.

  predicted   k steps of η along gradients that are nearly equal are one step of kη, up to η² (Goyal et al. 2017,
              section 2.1)
              R runs in lockstep share one all_reduce: 2(N-1)/N x S x R bytes a step, so a k-th of all bytes for the
              same samples
  shapes      effective batch k x LAB_BATCH = microbatch x accumulated x ranks; gradients of all runs one flat vector
              [R·P]

The variants are recipes for the rate, each on k = 1, 2, 4, 8, 16 and 32 times LAB_BATCH, with three seeds:

  unscaled    the base rate, as if nothing had changed: the classic mistake
  sqrt        √k times the base rate
  linear      k times the base rate
  warmup      linear, but from the base rate on, over the first quarter of the steps (Goyal et al. 2017, section 2.2)
  lars        a rate for each layer by ‖w‖ / (‖g‖ + β‖w‖), linear with warm-up (You et al. 2017)
  lamb        the same idea for Adam, √k with warm-up (You et al. 2020)

The first four are plain SGD and coincide at k = 1. LAB_STEPS counts the steps at k = 1; a k that does not divide it is
left out, since it would see other samples. LAB_LR is SGD's base rate; unset: 0.05. Break-down: the smallest k whose
mean loss on held-out samples is above that at k = 1 by more than three times the spread of the seeds there, (most -
least) / mean, of the recipe where it is widest; or above that of a model that never trained, which may be so at k = 1
already. It is found, never checked: the verdict hangs on the proof, the rates, the samples and the bytes. The models
are tiny unless sizes are set (LAB_DEPTH unset: 2 of mlp, 1 of gpt), since thousands of steps are taken.
"""

import copy
from collections.abc import Callable, Iterator

import torch

from experiments.largebatch.claims import claims
from experiments.largebatch.findings import show_found, show_settings
from experiments.largebatch.mistakes import MISTAKES
from experiments.largebatch.predictions import predict, refuse
from experiments.largebatch.proof import K, flat, prove, prove_layers
from experiments.largebatch.recipes import Recipe, layerwise_adam, layerwise_sgd, sgd
from experiments.largebatch.samples import Stream
from experiments.largebatch.sweep import SEEDS, models, sized, sweep
from workers.config import Config
from workers.config.options import ModeOptions
from workers.contract import Counted, Mode, Variant
from workers.lab import Lab
from workers.parallel import rates
from workers.parallel.rates import set_rates
from workers.workload.model import Model, build_model, outline

SMALL = 1e-5  # small enough for η²: at 1e-3 a gpt of width 128 and depth 8 is 3.73 times nearer at half the rate, not 4


class Options(ModeOptions):
    """No variable of its own; many short trainings in place of a long one."""

    sizes = {"width": 16, "heads": 2, "seq": 16, "steps": 192}  # noqa: RUF012  nobody writes to it


def naive(model: Model, stream: Stream, recipe: Recipe, k: int, steps: int, config: Config) -> Iterator[None]:
    """Train `model` in one process on batches of k times the base, a step at each turn of whoever iterates.

    On N ranks each takes its part of the samples, and the gradients are added up (lockstep.py).
    """
    optimizer = recipe.optimizer(model, config)
    for step in range(steps):
        model.zero_grad()
        # One shard of one: the whole batch, in LAB_MICROBATCHES parts whose gradients accumulate. A term counts by its
        # share, one over those of all k times LAB_BATCH samples: a gradient is a mean, as long as that of the base.
        for inputs, targets, share in stream.dealt(k, step, 0, 1):
            (model(inputs, targets) * share).backward()
        # So with the base rate a step is no longer than before, and there are k times fewer: it is up to the recipe.
        set_rates(optimizer.param_groups, recipe.factor(k, step, steps))
        optimizer.step()
        yield


RECIPES = {
    "unscaled": Recipe(rates.unscaled, sgd),
    "sqrt": Recipe(rates.sqrt, sgd),
    "linear": Recipe(rates.linear, sgd),
    "warmup": Recipe(rates.linear, sgd, warms_up=True),
    "lars": Recipe(rates.linear, layerwise_sgd, warms_up=True),
    "lamb": Recipe(rates.sqrt, layerwise_adam, warms_up=True),
}


def chosen(config: Config) -> dict[str, Recipe]:
    """Those of LAB_VARIANT, or all."""
    return {name: recipe for name, recipe in RECIPES.items() if not config.variant or name in config.variant}


# --- why k times the rate ---


def hold_equality(lab: Lab, config: Config) -> None:
    """k steps of η and one of kη end as far apart as η²: half the rate, a quarter of the distance."""
    stream = Stream(config, config.seed, K, lab.device, torch.float64)
    dense = build_model(config, config.seed).to(lab.device, torch.float64)
    whole, half = (apart(dense, stream, config, rate) for rate in (SMALL, SMALL / 2))
    lab.compare(
        "k steps of η against one of kη", 4, whole / half, "x", 0.1, variant=config.model,
        formula="distance at η over that at η/2",
        control="tests/experiments/test_largebatch.py::test_a_gradient_that_is_no_mean_fails_the_run",
    )  # fmt: skip


def apart(dense: Model, stream: Stream, config: Config, rate: float) -> float:
    """How far K steps of `rate` end from one step of K times it, over the same samples."""
    ends = []
    for k in (1, K):
        model, by_k = copy.deepcopy(dense), Recipe(rates.linear, sgd)
        for _ in naive(model, stream, by_k, k, K // k, config.model_copy(update={"lr": rate})):
            pass
        ends.append(flat(model))
    distance: float = torch.linalg.vector_norm(ends[0] - ends[1]).item()
    return distance


# --- the run ---


def as_stated(recipe: Recipe) -> Recipe:
    """What the ranks make of a recipe: nothing else."""
    return recipe


def run(lab: Lab, followed: Callable[[Recipe], Recipe] = as_stated) -> None:
    """Each model: its settings, the proof, the sweep, and what was found."""
    recipes = chosen(lab.config)
    trained = {name: followed(recipe) for name, recipe in recipes.items()}
    measured: dict[str, Counted] = {}
    if lab.config.proof:
        prove_layers(lab, trained)
    for model in models(lab.config):
        config = sized(lab.config, model)
        show_settings(lab, config, list(recipes))
        if config.proof:
            prove(lab, config, trained)
            lab.finished("proof", [f"{each} {name}" for each in models(lab.config) for name in trained])
            lab.at(0, f"one process, to halve the rate of {model}")
            if lab.rank == 0:
                hold_equality(lab, config)
        found = sweep(lab, config, trained)
        measured[model] = found.counted
        show_found(lab, config, found)
    lab.compare_traffic(lab.mode.predict(lab.config), measured)


MODE = Mode(
    at_once=SEEDS * len(RECIPES),
    watched=("audited replicas",),
    variants=tuple(Variant(name) for name in RECIPES),
    run=run,
    claims=claims,
    title=lambda config: " and ".join(outline(sized(config, name)).describe() for name in models(config)),
    options=Options,
    predict=lambda config: predict(config, chosen(config)),
    refuse=lambda config: refuse(config, chosen(config)),
    mistakes=MISTAKES,
    unsaved="saves none of its many short trainings",
    reading=(
        "experiments/largebatch/__init__.py: the naive loop, the recipes, and what a run of them claims",
        "experiments/largebatch/recipes.py: a recipe's rate and optimizer (factors: workers/parallel/rates.py)",
        "workers/parallel/lars.py: a rate for each layer; lamb.py beside it has Adam's",
        "experiments/largebatch/lockstep.py: many trainings on all ranks, with one all_reduce a step",
    ),
)
