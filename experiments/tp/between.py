"""What stands between the columns and the rows of a plan: it may work on each feature by itself, or on whole heads.

An activation may, and attention does. A softmax or a norm over the features needs all of them, and what a rank makes of
its own has the same shape and other numbers. So what a row takes on this rank is held against its part of what it takes
in one process, with every row before it replaced by one process's outputs: nothing else can be off.
"""

import torch
from torch import Tensor, nn

from experiments.tp.cuts import Alone, cut
from experiments.tp.plans import cuts_of
from workers.config import Config
from workers.lab import Lab
from workers.workload import own
from workers.workload.model import Model, build_model

TOLERANCE = 1e-12
CONTROL = "tests/experiments/test_tp_plans.py::test_what_works_on_all_features_is_named_beside_the_proof_that_fails"


class Watched(nn.Module):
    """Stands in for a row: one process's `calls` of it, inputs and outputs, and how far this rank's inputs are off."""

    def __init__(self, calls: list[tuple[Tensor, Tensor]], first: int, size: int) -> None:
        super().__init__()
        self.calls, self.first, self.size = calls, first, size
        self.off = 0.0

    def forward(self, x: Tensor) -> Tensor:
        taken, given = self.calls.pop(0)
        difference = x - taken.narrow(-1, self.first, self.size)
        self.off = max(self.off, difference.abs().max().item())
        return given


def in_one_process(model: Model, name: str) -> list[tuple[Tensor, Tensor]]:
    """Filled in as the model runs: what the layer takes and gives."""
    calls = list[tuple[Tensor, Tensor]]()
    model.get_submodule(name).register_forward_hook(lambda _, args, given: calls.append((args[0], given)))
    return calls


@torch.no_grad()
def off(config: Config, rank: int) -> dict[str, float]:
    """By name of a row how far what it takes on `rank` is from one process's, in float64."""
    inputs = own.first_inputs(config.model, config.seed, config.seq, 2)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    dense, sliced = (build_model(config, config.seed).double() for _ in range(2))
    planned = cuts_of(config, config.world_size).items()
    cuts = {name: each for name, each in planned if not each.embeds}  # whose sum is made before anything takes it
    rows = {name: each for name, each in cuts.items() if not each.by_outputs}
    calls = {name: in_one_process(dense, name) for name in rows}
    dense(inputs)
    cut(sliced, cuts, rank, Alone())
    watched = {name: Watched(calls[name], sum(each.sizes[:rank]), each.sizes[rank]) for name, each in rows.items()}
    for name, row in watched.items():
        sliced.set_submodule(name, row)
    sliced(inputs)
    return {name: row.off for name, row in watched.items()}


def check_between(lab: Lab) -> None:
    """What each row takes on this rank is its part of what it takes in one process."""
    found = off(lab.config, lab.rank)
    wrong = next((name for name, each in found.items() if not each <= TOLERANCE), None)
    said = f"what {len(found)} rows take is a part of one process's"
    if wrong is not None:
        said = (
            f"what {wrong} takes on rank {lab.rank} is no part of one process's: between it and its columns stands what"
            " works on more than a feature, as a softmax or a norm does, or heads are torn apart"
        )
    lab.check("between the slices", max(found.values(), default=0.0), TOLERANCE, "megatron", said, control=CONTROL)
