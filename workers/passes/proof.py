"""The proof: a few steps in float64 with plain SGD, against the dense single process, whatever the timed pass uses.

Rank 0 alone computes the single process, the others wait with a bound. Losses, gradients and updated weights are
compared at every step, since each alone hides something: Adam divides an error of scale away, and a loss is right for
one step whatever the gradients are. With adamw or LAB_CLIP one more step compares the clipped gradients and the
optimizer's state.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.config import Config
from workers.contract import Build, Strategy
from workers.lab import Lab
from workers.measure.difference import difference, larger
from workers.workload import baseline
from workers.workload.baseline import Snapshot
from workers.workload.data import Batches

if TYPE_CHECKING:
    from workers.checkpoint.resuming import Checkpoints

TOLERANCE = 1e-12
LEARNING_RATE = 0.01  # small: a step that overshoots would make rounding errors grow from step to step

AlsoCheck = Callable[[str, Strategy], None]
CONTROL = "tests/workers/passes/test_controls.py::test_a_wrong_variant_fails_by_name"


def prove(
    lab: Lab, variants: Mapping[str, Build], also: AlsoCheck | None, apart: Mapping[str, Callable[[str, Build], None]],
    checkpoints: "Checkpoints | None" = None,
) -> None:  # fmt: skip
    """Check each variant against one process; `also(name, strategy)` adds the mode's own checks at its end.

    Those in `apart` are not compared to one process, but proven by what stands there.
    """
    config = lab.config.untimed()
    lr = config.learning_rate if config.model == "line" else LEARNING_RATE  # the line lesson's own: all of it is proven
    plain = config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": lr})
    batches = lab.batches(torch.float64, proof=True)
    dense = one_process(lab, plain, batches, batches.proof_steps)
    tuned = config.optimizer == "adamw" or config.clip is not None
    dense_tuned = one_process(lab, config, batches, 1) if tuned else []
    for name, build in variants.items():
        if name in apart:
            lab.at(0, f"proof of {name}")
            apart[name](name, build)
            continue
        lab.at(0, f"the making of {name}")  # where PyTorch's own import themselves, seconds on busy cores
        strategy = build(lab.model(torch.float64), lab.mesh, plain)
        differences = against(lab, strategy, name, batches, dense)
        if tuned:
            strategy_tuned = build(lab.model(torch.float64), lab.mesh, config)
            differences |= tuned_against(lab, strategy_tuned, name, batches, dense_tuned)
        if lab.rank == 0:
            for check, value in differences.items():
                lab.check(check, value, TOLERANCE, variant=name, control=CONTROL)
        if also is not None:
            also(name, strategy)
        if checkpoints is not None and checkpoints.group is not None:
            from workers.checkpoint.drill import drill

            del strategy
            drill(lab, name, build, [plain, config] if tuned else [plain], checkpoints.group)


def one_process(lab: Lab, config: Config, batches: Batches, steps: int) -> list[Snapshot]:
    """The dense run's snapshots on rank 0, nothing elsewhere."""
    lab.at(0, "one process")
    snapshots: list[Snapshot] = []
    if lab.rank == 0:
        snapshots = list(baseline.train(lab.model(torch.float64), batches, config, steps))
    lab.exchange.barrier("one process")
    return snapshots


def against(lab: Lab, strategy: Strategy, name: str, batches: Batches, dense: list[Snapshot]) -> dict[str, float]:
    """The largest differences of losses, gradients and weights over the proof's steps, on rank 0."""
    losses = gradients = weights = 0.0
    for step in range(batches.proof_steps):
        lab.at(step, f"proof of {name}")
        wanted = dense[step] if lab.rank == 0 else None
        loss = summed_loss(lab, strategy.backward(lab.dealt(batches, step)))
        losses = larger(losses, abs(loss - wanted.loss) if wanted else 0.0)
        gradients = larger(gradients, difference(strategy.full("gradients"), wanted and wanted.gradients))
        strategy.update()
        lab.stepped()
        weights = larger(weights, difference(strategy.full("weights"), wanted and wanted.weights))
    return {"losses": losses, "gradients": gradients, "weights": weights}


def tuned_against(lab: Lab, strategy: Strategy, name: str, batches: Batches, dense: list[Snapshot]) -> dict[str, float]:
    """One step with the clipping and the optimizer that were asked for."""
    lab.at(batches.proof_steps, f"proof of {name}")
    strategy.backward(lab.dealt(batches, 0))
    strategy.update()
    wanted = dense[0] if lab.rank == 0 else None
    return {
        "clipped gradients": difference(strategy.full("gradients"), wanted and wanted.gradients),
        "optimizer state": difference(strategy.full("optimizer"), wanted and wanted.optimizer),
    }


def summed_loss(lab: Lab, share: Tensor | float | None) -> float:
    """The mean loss of the global batch, from every rank's share."""
    shares = lab.exchange.everyone("loss", None if share is None else float(share))
    return math.fsum(value for value in shares if value is not None)
