"""Large batches: k times the samples a step, k times fewer steps, and what the learning rate has to do about it.

More ranks are of use only if a step has more samples, and for the same samples there are then fewer steps. If nothing else
changes, training is k times slower where it matters. So each step is made longer, and from some k on that fails: the weights move so
far in one step that its gradient no longer says anything about the end of it. That k, the break-down, is what the run looks for.

  predicted   k steps of η along gradients that are nearly equal are one step of kη, up to η² (Goyal et al. 2017, section 2.1)
              R runs in lockstep share one all_reduce: 2(N-1)/N x S x R bytes a step, so a k-th of all bytes for the same samples
  shapes      effective batch k x LAB_BATCH = microbatch x accumulated x ranks; gradients of all runs one flat vector [R·P]

The variants are recipes for the rate, each on k = 1, 2, 4, 8, 16 and 32 times LAB_BATCH, with three seeds:

  unscaled    the base rate, as if nothing had changed: the classic mistake
  sqrt        √k times the base rate
  linear      k times the base rate
  warmup      linear, but from the base rate on, over the first quarter of the steps (Goyal et al. 2017, section 2.2)
  lars        a rate for each layer by ‖w‖ / (‖g‖ + β‖w‖), linear with warm-up (You et al. 2017)
  lamb        the same idea for Adam, √k with warm-up (You et al. 2020)

The first four are plain SGD and coincide at k = 1. LAB_STEPS counts the steps at k = 1; a k that does not divide it is left out, since
it would see other samples. LAB_LR is the base rate of SGD. Break-down: the smallest k whose mean loss on held-out samples is above
that at k = 1 by more than three times the spread of the seeds there, (most - least) / mean, of the recipe where it is widest; or above that
of a model that never trained, which may be so at k = 1 already. It is found, never checked: the verdict hangs on the proof, the rates, the
samples and the bytes. The models are tiny unless sizes are set, since thousands of steps are taken.
"""

from experiments.largebatch.claims import (
    VARIANTS,
    models,
    multiples,
    predict,
    recipes,
    refuse,
    sized,
    title,
)
from experiments.largebatch.findings import show_found, show_settings
from experiments.largebatch.proof import prove
from experiments.largebatch.recipes import BUGS
from experiments.largebatch.sweep import sweep
from workers.lab import Counted, Lab

__all__ = ["BUGS", "VARIANTS", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """Each model: its settings, the proof, the sweep, and what was found."""
    measured: dict[str, Counted] = {}
    for model in models(lab.config):
        config = sized(lab.config, model)
        show_settings(lab, config, multiples(config), recipes(config))
        if config.proof:
            prove(lab, config)
        found = sweep(lab, config)
        measured[model] = found.counted
        show_found(lab, config, found)
    lab.compare_traffic(predict(lab.config), measured)
