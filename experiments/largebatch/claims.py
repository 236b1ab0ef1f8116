"""What the mode claims before it runs: its own sizes, the bytes of a step, and the settings that it cannot take."""

import torch

from experiments.largebatch.recipes import RECIPES, Recipe, sgd
from workers.config import Config
from workers.lab import no_checkpoints
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.workload import data, model, text
from workers.workload.model import outline

VARIANTS = tuple(RECIPES)
MODELS = ("mlp", "gpt")
MULTIPLES = (1, 2, 4, 8, 16, 32)
SEEDS = 3
DEPTHS = {"mlp": 2, "gpt": 1}  # unless set


def models(config: Config) -> tuple[str, ...]:
    """LAB_MODEL, or both where it is not set."""
    return (config.model,) if "model" in config.model_fields_set else MODELS


def sized(config: Config, model: str) -> Config:
    """The settings for one model, with the depth that the mode gives it where none was set."""
    depth = config.depth if "depth" in config.model_fields_set else DEPTHS.get(model, 1)
    return config.model_copy(update={"model": model, "depth": depth})


def multiples(config: Config) -> list[int]:
    """The k that divide the steps: all of them then see the same samples."""
    return [k for k in MULTIPLES if config.steps % k == 0]


def recipes(config: Config) -> dict[str, Recipe]:
    """Those of LAB_VARIANT, or all."""
    return {name: recipe for name, recipe in RECIPES.items() if not config.variant or name in config.variant}


def standing_for(config: Config, k: int) -> dict[str, str]:
    """Which recipe is run for which: at k = 1 all rates are the base rate, and those of one optimizer are one run."""
    chosen = recipes(config)
    first = {recipe.optimizer: name for name, recipe in reversed(chosen.items())}
    return {name: first[recipe.optimizer] if k == 1 else name for name, recipe in chosen.items()}


def distinct(config: Config, k: int) -> dict[str, Recipe]:
    """The recipes that are run at k."""
    return {name: RECIPES[name] for name in dict.fromkeys(standing_for(config, k).values())}


def num_runs(config: Config, k: int) -> int:
    """How many trainings step together at k."""
    return SEEDS * len(distinct(config, k))


def title(config: Config) -> str:
    """What is trained, for headings."""
    return " and ".join(outline(sized(config, name)).describe() for name in models(config))


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    if config.model == "line":
        return ["LAB_MODEL='line' has one batch of 32 points, of which there is no multiple, allowed: mlp, gpt"]
    faults = []
    if config.optimizer != "sgd":
        faults.append(
            f"LAB_OPTIMIZER={config.optimizer} is no part of largebatch: each recipe has an optimizer of its own"
        )
    if config.clip is not None:
        faults.append(
            f"LAB_CLIP={config.clip:g} is no part of largebatch: a gradient that is clipped does not grow with the rate"
        )
    if "bucket_mib" in config.model_fields_set:
        faults.append(
            f"LAB_BUCKET_MIB={config.bucket_mib:g} is no part of largebatch: the gradients of all its runs are one bucket"
        )
    optimizers = {recipe.optimizer for recipe in recipes(config).values()}
    if config.lr is not None and optimizers and sgd not in optimizers:
        faults.append(f"LAB_LR={config.lr:g} is the base rate of SGD, which no recipe of LAB_VARIANT takes")
    for name in models(config):
        own = sized(config, name)
        faults += model.faults(own) + (text.faults(own) or nothing_held_out(own))
    faults += no_checkpoints(config, "saves none of its many short trainings")
    return list(dict.fromkeys(faults + data.faults(config, config.world_size) + invisible(config)))


def nothing_held_out(config: Config) -> list[str]:
    """A sentence if the text has a sample to train on and none to judge by."""
    if config.model != "gpt" or len(data.Text(config)) > 1:
        return []
    return [
        f"the text holds one sample of LAB_SEQ={config.seq} bytes, and another is needed to judge by: name a longer one in LAB_TEXT"
    ]


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    if config.bug != "lr_unscaled":
        return []
    scaled = [name for name in ("linear", "warmup") if name in recipes(config)]
    reasons = [
        (not config.proof, "LAB_PROOF=0: no rate is compared"),
        (not scaled, "these variants: it takes linear or warmup"),
    ]
    return [f"LAB_BUG=lr_unscaled cannot show with {reason}" for applies, reason in reasons if applies][:1]


def predict(config: Config) -> list[Prediction]:
    """Bytes of one step of all runs together, at the largest k, a value a rank."""
    predictions = []
    for name in models(config):
        own = sized(config, name)
        runs = num_runs(own, multiples(own)[-1])
        nbytes = outline(own).num_parameters() * getattr(torch, own.dtype).itemsize
        total = all_reduce_bytes("gloo", config.world_size, runs * nbytes)
        formula = f"2(N-1)/N x S x {runs} runs"
        predictions.append(Prediction(name, "wire bytes", "B", formula, (total,) * config.world_size, 1))
    return predictions
