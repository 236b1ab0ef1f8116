"""The classic mistake of a large batch, made on purpose by LAB_BUG: the first classic bug of multi-GPU training."""

from dataclasses import replace

from experiments.largebatch.recipes import Recipe
from workers.contract import Instead, Mistake, Needs
from workers.parallel import rates


def unscaled(recipe: Recipe) -> Recipe:
    """The rate is left as it was where it should be k times as high."""
    return replace(recipe, target=rates.unscaled) if recipe.target is rates.linear else recipe


MISTAKES = {
    "lr_unscaled": Mistake(
        "the batch grows k times and the learning rate stays, although the recipe says k times: as many samples move "
        "the weights k times less, and the run looks healthy while it learns too little (the first classic bug of "
        "multi-GPU training)",
        "learning rate",
        Instead(run={"followed": unscaled}),
        Needs(ranks=1, variants=("linear", "warmup")),
    )
}
