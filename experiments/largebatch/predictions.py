"""What the mode predicts before it runs, the bytes of a step; and the settings that it cannot take."""

from collections.abc import Mapping

import torch

from experiments.largebatch.recipes import Recipe, sgd
from experiments.largebatch.sweep import models, multiples, num_runs, sized
from workers.config import Config
from workers.contract import untrainable
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.workload import data, text
from workers.workload.model import outline
from workers.workload.own import is_own


def refuse(config: Config, recipes: Mapping[str, Recipe]) -> list[str]:
    """What this mode cannot run."""
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
    for name in models(config):
        refusals += untrainable(sized(config, name)) + nothing_held_out(sized(config, name))
    return list(dict.fromkeys(refusals))


def nothing_held_out(config: Config) -> list[str]:
    """A sentence if the text has a sample to train on and none to judge by."""
    if config.model != "gpt" or text.refusals(config) or len(data.Text(config)) > 1:
        return []
    return [
        f"the text holds one sample of LAB_SEQ={config.seq} bytes, and another is needed to judge by: "
        "name a longer one in LAB_TEXT"
    ]


def predict(config: Config, recipes: Mapping[str, Recipe]) -> list[Prediction]:
    """Bytes of one step of all runs together, at the largest k, a value a rank."""
    predictions = []
    for name in models(config):
        own = sized(config, name)
        runs = num_runs(recipes, multiples(own)[-1])
        nbytes = outline(own).num_parameters() * getattr(torch, own.dtype).itemsize
        total = all_reduce_bytes("gloo", config.world_size, runs * nbytes)
        formula = f"2(N-1)/N x S x {runs} runs"
        messages = (gloo_all_reduce_messages(config.world_size, runs * nbytes),) * config.world_size
        value = (total,) * config.world_size
        predictions.append(Prediction(name, "wire bytes", "B", formula, value, 1, messages=messages))
    return predictions
