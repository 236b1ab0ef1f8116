"""Large batches: k times the samples per step, k times fewer steps, and the learning rate that this needs.

More ranks help only if a step has more samples; the same samples then make fewer steps. With the same learning rate,
training needs k times the samples. So each step is made longer, and from some k on that fails: the weights move so far
that the gradient is no longer valid at the end of the step. The run searches for this k, the break-down.

  predicted   k steps of η along nearly equal gradients are one step of kη, up to η² (Goyal et al. 2017, section 2.1)
              one all_reduce per step, 2(N-1)/N x S bytes, so 1/k of all bytes for the same samples
  shapes      effective batch k x LAB_BATCH = microbatch x accumulated x ranks; gradients as one flat vector [P]

The variants are recipes for the rate, each on k = 1, 2, 4, 8, 16 and 32 times LAB_BATCH:

  unscaled    the base rate, unchanged: the most common error
  linear      k times the base rate
  warmup      linear, rising from the base rate over the first quarter of the steps (Goyal et al. 2017, section 2.2)
  lars        a rate per layer from ‖w‖ / (‖g‖ + β‖w‖), linear with warm-up (You et al. 2017)
  lamb        the same idea for Adam, √k with warm-up (You et al. 2020)

The first three are plain SGD and coincide at k = 1. LAB_STEPS counts the steps at k = 1; a k that does not divide it is
left out, since it would use other samples. LAB_LR is SGD's base rate; unset: 0.05. Break-down: the smallest k whose
held-out loss is more than twice that at k = 1, or above that of an untrained model, possibly at k = 1 already. It is
reported, not checked: the verdict depends on the proof, the rates, the samples and the bytes. The model is tiny by
default, since hundreds of steps are taken.
"""

import copy

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

import distlab.techniques.large_batch as optimizers
from distlab.contract import Mistakes, Mode, Needs, Variant
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import distance
from distlab.lab.workload.model import Model, build_model

from . import lesson
from .checks import LAYERWISE, K, check_layers, prove
from .options import Options
from .sweep import EQUALITY, claims, predict, refuse, show_found, show_settings, sweep
from .training import Recipe, Stream, Trainee, layerwise_adam, layerwise_sgd, sgd

SMALL = 1e-5  # small enough for η²: at 1e-3 a gpt of width 128 and depth 8 is 3.73 times nearer at half the rate, not 4
mistake = Mistakes()


RECIPES = {
    "unscaled": Recipe(optimizers.unscaled, sgd),
    "linear": Recipe(optimizers.linear, sgd),
    "warmup": Recipe(optimizers.linear, sgd, warms_up=True),
    "lars": Recipe(optimizers.linear, layerwise_sgd, warms_up=True),
    "lamb": Recipe(optimizers.sqrt, layerwise_adam, warms_up=True),
    "plain": Recipe(lesson.linear, sgd, warms_up=True, warmup=lesson.warmup),
}
VARIANTS = tuple(Variant(name, by_name=name == "plain", like="warmup" * (name == "plain")) for name in RECIPES)


def chosen(config: Config) -> dict[str, Recipe]:
    """Return the recipes of LAB_VARIANT, or all but those that run only by name."""
    named = config.variant or [variant.name for variant in VARIANTS if not variant.by_name]
    return {name: recipe for name, recipe in RECIPES.items() if name in named}


@mistake("lr_unscaled", check="learning rate", part="recipe", needs=Needs(ranks=1, variants=("linear", "warmup")))
class UnscaledRecipe(Recipe):
    """The batch grows k times but the learning rate does not, although the recipe says so: the same samples move the
    weights k times less, and the run looks healthy while it learns too little (the first classic bug of multi-GPU
    training)."""

    def factor(self, k: int, step: int, steps: int) -> float:
        """Return 1, where the target is k."""
        return 1.0 if self.target is optimizers.linear else super().factor(k, step, steps)


# --- the reason for k times the rate ---


def check_equality(lab: Lab) -> None:
    """Check that k steps of η and one of kη end η² apart: with half the rate, a quarter of the distance."""
    stream = Stream(lab.config, lab.config.seed, K, lab.device, torch.float64)
    dense = build_model(lab.config, lab.config.seed).to(lab.device, torch.float64)
    full, half = (distance_of_k_steps(dense, stream, lab.config, rate, lab.group) for rate in (SMALL, SMALL / 2))
    if lab.rank == 0:
        lab.compare(EQUALITY, 4, full / half, "x", 0.1, formula="distance at η over that at η/2")


def distance_of_k_steps(dense: Model, stream: Stream, config: Config, rate: float, group: dist.ProcessGroup) -> float:
    """Return the distance between the end of K steps of `rate` and of one step of K times it, on the same samples."""
    ends, config = [], config.model_copy(update={"lr": rate})
    for k in (1, K):
        trainee = Trainee(copy.deepcopy(dense), stream, Recipe(optimizers.linear, sgd), k, K // k, config, group)
        for step in range(K // k):
            trainee.backward(step)
            trainee.update(step)
        ends.append(parameters_to_vector(trainee.model.parameters()))
    return distance(*ends)


# --- the run ---


def run(lab: Lab, recipe: type[Recipe] = Recipe) -> None:
    recipes_by_name = {name: recipe(*each) for name, each in chosen(lab.config).items()}
    show_settings(lab)
    if lab.config.proof:
        for name in LAYERWISE:
            if name in recipes_by_name:
                lab.at(0, f"layers of {name}")
                check_layers(lab, name, recipes_by_name[name])
        prove(lab, recipes_by_name)
        lab.finished("proof", list(recipes_by_name))
        lab.at(0, "half the rate")
        check_equality(lab)
    found = sweep(lab, recipes_by_name)
    show_found(lab, found)
    lab.compare_predictions(lab.mode.predict(lab.config), {lab.config.model: found.counted})


MODE = Mode(
    at_once=len(RECIPES) - 1,
    variants=VARIANTS,
    gone={"sqrt": "lamb scales by the root of k"},
    run=run,
    claims=claims,
    options=Options,
    predict=predict,
    refuse=lambda config: refuse(config, chosen(config)),
    mistakes=mistake,
    unsaved="does not save its many short trainings",
    in_lesson={"lr_unscaled": ("return float(k)", "return 1.0")},
    reading=(
        "experiments/largebatch/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/largebatch/__init__.py: the recipes, and what a run of them checks",
        "experiments/largebatch/training.py: the samples of each k, and a step of a recipe",
        "distlab/techniques/large_batch/__init__.py: the learning rate by k, and LARS and LAMB with a rate for each"
        " layer",
        "experiments/largebatch/checks.py: the same formulas written again, with which each step is compared",
    ),
)
