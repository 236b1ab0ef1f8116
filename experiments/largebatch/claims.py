"""What a run of large batches has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import WHOLE_RUN, Claims, Mode

MODELS, LAYERWISE, PROVEN_STEPS = ("mlp", "gpt"), ("lars", "lamb"), 3


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of each model and recipe the proof, of the sweep's batches who saw what, and bytes."""
    recipes = [name for name in mode.names if not config.variant or name in config.variant]
    models = (config.model,) if "model" in config.model_fields_set else MODELS
    batches = sum(config.steps % k == 0 for k in (1, 2, 4, 8, 16, 32))
    yield Claims(("effective batch",), WHOLE_RUN, one=True, times=len(models) * batches)
    yield Claims(("replicas",), models, times=batches)
    yield Claims(("called bytes", "wire bytes"), models)
    if not config.proof:
        return
    yield Claims(("layers", "global norms"), [name for name in LAYERWISE if name in recipes])
    yield Claims(("held out",), models, one=True)
    yield Claims(("k steps of η against one of kη",), models, one=True)
    for model in models:
        named = {name: f"{model} {name}" for name in recipes}
        yield Claims(("gradients", "weights"), [*named.values()], one=True, times=PROVEN_STEPS)
        plain = [full for name, full in named.items() if name not in LAYERWISE]
        yield Claims(("learning rate",), plain, one=True, times=PROVEN_STEPS)
        audited = [full for name, full in named.items() if name in ("unscaled", *LAYERWISE)]
        yield Claims(("trained gradients", "trained weights"), audited, one=True)
