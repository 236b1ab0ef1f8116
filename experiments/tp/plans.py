"""How a model of one's own is cut: the `plan` beside it names its linear layers, and each one's way.

    plan = {"layers.*.up": "column", "layers.*.down": "row"}

"column" gives each rank some of a layer's outputs, "row" some of the next one's inputs, which are those outputs
(Shoeybi et al. 2019, section 3). Features that must stay together, as a head's do, are given with it: ("column", 8).
Names are the file's own, and a `*` stands for any part of one.
"""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.tp.cuts import Alone, Cut, cut
from experiments.tp.layers import linears
from workers.config import Config
from workers.parallel.slices import shares
from workers.workload import own
from workers.workload.model import build_model

COLUMN, ROW = "column", "row"
ALLOWED = "allowed: 'column', 'row', or with the features that stay together ('column', 8)"
EXAMPLE = "plan = {'layers.*.up': 'column', 'layers.*.down': 'row'}"


class Planned(NamedTuple):
    """One that the plan names."""

    way: str
    features: int  # that are shared out
    unit: int  # of them, that stay together

    @property
    def units(self) -> int:
        """How many such there are."""
        return self.features // self.unit

    @property
    def what(self) -> str:
        """What is shared out, in words."""
        features = "outputs" if self.way == COLUMN else "inputs"
        return features if self.unit == 1 else f"parts of {self.unit} {features}"


def plan_of(config: Config) -> Any:
    """What stands beside the model as its plan; None where nothing does."""
    return own.beside(config.model, "plan")


def planned(config: Config) -> dict[str, Planned]:
    """The layers that the plan names, by their name in the model that is trained; a later line of it counts."""
    found = {}
    for pattern, value in plan_of(config).items():
        way, unit = value if isinstance(value, tuple) else (value, 1)
        for name, layer in linears(config).items():
            if fnmatchcase(name, pattern):
                found[layer.ours] = Planned(way, layer.outputs if way == COLUMN else layer.inputs, unit)
    return found


def cuts_of(config: Config, num_ranks: int) -> dict[str, Cut]:
    """How each of them is cut over so many ranks."""
    return {
        name: Cut(each.way == COLUMN, shares(each.units, num_ranks, each.unit))
        for name, each in planned(config).items()
    }


# --- what is wrong with it ---


def faults(config: Config) -> list[str]:
    """Sentences why a model of one's own cannot be cut over WORLD_SIZE ranks."""
    plan, named = plan_of(config), f"LAB_MODEL={config.model!r}"
    if plan is None:
        return [f"{named} has no plan beside it, and tp cannot know how to cut it: name its linear layers, {EXAMPLE}"]
    if not isinstance(plan, dict) or not plan:
        return [f"{named}: its plan is {plan!r}, allowed: linear layers and how each is cut, {EXAMPLE}"]
    found = [
        fault for pattern, value in plan.items() for fault in (*misnamed(config, pattern), *misput(pattern, value))
    ]
    return [f"{named}: {fault}" for fault in found or misfits(config)]


def misnamed(config: Config, pattern: str) -> list[str]:
    """A sentence where a line of the plan names no linear layer."""
    known = list(linears(config))
    if any(fnmatchcase(name, str(pattern)) for name in known):
        return []
    shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    return [f"plan[{pattern!r}] is none of the linear layers that it calls, allowed: {shown or 'it has none'}"]


def misput(pattern: str, value: Any) -> list[str]:
    """A sentence where a line of the plan says no way to cut."""
    way, unit = value if isinstance(value, tuple) and len(value) == 2 else (value, 1)
    right = way in (COLUMN, ROW) and isinstance(unit, int) and unit > 0
    return [] if right else [f"plan[{pattern!r}] is {value!r}, {ALLOWED}"]


def misfits(config: Config) -> list[str]:
    """Sentences where what is to be cut cannot be cut in so many parts."""
    found = []
    for name, layer in linears(config).items():
        each = planned(config).get(layer.ours)
        if each is None:
            continue
        if each.features % each.unit:
            found.append(f"{name} has {each.features} features, which make no whole {each.what}")
        elif each.units < config.world_size:
            found.append(
                f"{name} has {each.units} {each.what}, which cannot be split over WORLD_SIZE={config.world_size}: every"
                f" rank needs one, allowed: up to {each.units} ranks"
            )
    return found or unrunnable(config)


def unrunnable(config: Config) -> list[str]:
    """A sentence where the parts of the first rank, or of the last, do not fit each other."""
    inputs = own.first_inputs(config.model, config.seed, config.seq, 2)
    wanted = build_model(config, config.seed)(inputs).shape
    for rank in (0, config.world_size - 1):
        model = build_model(config, config.seed)
        cut(model, cuts_of(config, config.world_size), rank, Alone())
        try:
            shape = forward(model, inputs)
        except Exception as error:  # whatever a user's model raises
            why = " ".join(str(error).split())
        else:
            if shape == wanted:
                continue
            why = f"it gives {tuple(shape)}, not {tuple(wanted)}"
        return [
            f"cut by its plan for rank {rank} of {config.world_size} it does not run ({why}): a 'row' takes what a"
            " 'column' leaves, heads are counted in what a layer gives, and whole ones stay together, ('column', 8)"
        ]
    return []


@torch.no_grad()
def forward(model: nn.Module, inputs: Tensor) -> torch.Size:
    """The shape of what it gives."""
    outputs: Tensor = model(inputs)
    return outputs.shape
