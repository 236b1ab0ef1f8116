"""How a model of one's own is cut: the `plan` beside it names its linear layers and embeddings, and each one's way.

    plan = {"layers.*.up": "column", "layers.*.down": "row"}

"column" gives each rank some of a layer's outputs, "row" some of the next one's inputs, which are those outputs
(Shoeybi et al. 2019, section 3). Features that must stay together, as a head's do, are given with it: ("column", 8).
An embedding is cut by "row", some of its vocabulary on each rank. Names are the file's own, and a `*` stands for any
part of one. A plan of PyTorch's parallelize_module says the same by its styles, ColwiseParallel() and
RowwiseParallel().
"""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.tp.cuts import Alone, Cut, cut
from experiments.tp.layers import cuttable
from workers.config import Config
from workers.parallel.slices import shares
from workers.workload import own
from workers.workload.model import build_model

COLUMN, ROW = "column", "row"
SEQUENCE = "sequence"
# torch's, with the layouts that they have by default
STYLES = {"ColwiseParallel": COLUMN, "RowwiseParallel": ROW, "SequenceParallel": SEQUENCE}
UNSLICED = (
    "and a plan names layers, not which dim of what lies between them has the rows that a rank may keep: leave it out,"
    " and what no line names works on all rows on every rank"
)
ALLOWED = "allowed: 'column', 'row', or with the features that stay together ('column', 8)"
EXAMPLE = "plan = {'layers.*.up': 'column', 'layers.*.down': 'row'}"


class Planned(NamedTuple):
    """One that the plan names."""

    way: str
    features: int  # that are shared out
    unit: int  # of them, that stay together
    embeds: bool = False

    @property
    def units(self) -> int:
        """How many such there are."""
        return self.features // self.unit

    @property
    def what(self) -> str:
        """What is shared out, in words."""
        features = "outputs" if self.way == COLUMN else "rows" if self.embeds else "inputs"
        return features if self.unit == 1 else f"parts of {self.unit} {features}"


def plan_of(config: Config) -> Any:
    """What stands beside the model as its plan; None where nothing does."""
    return own.beside(config.model, "plan")


def planned(config: Config) -> dict[str, Planned]:
    """The layers that the plan names, by their name in the model that is trained; a later line of it counts."""
    found = {}
    for pattern, value in plan_of(config).items():
        way, unit = as_words(value)
        for name, layer in cuttable(config).items():
            if fnmatchcase(name, pattern):
                features = layer.outputs if way == COLUMN else layer.inputs
                found[layer.ours] = Planned(way, features, unit, layer.embeds)
    return found


def as_words(value: Any) -> tuple[Any, Any]:
    """The way and the unit of a line of the plan; of a style of torch's the word for it."""
    way, unit = value if isinstance(value, tuple) and len(value) == 2 else (value, 1)
    kind = type(way)
    if kind.__module__.startswith("torch.distributed.tensor.parallel") and kind.__name__ in STYLES:
        known = STYLES[kind.__name__]
        way = known if known == SEQUENCE or vars(way) == vars(kind()) else f"{kind.__name__} of layouts of its own"
    return way, unit


def cuts_of(config: Config, num_ranks: int) -> dict[str, Cut]:
    """How each of them is cut over so many ranks."""
    return {
        name: Cut(each.way == COLUMN, shares(each.units, num_ranks, each.unit), each.embeds)
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
        fault
        for pattern, value in plan.items()
        for fault in (*misnamed(config, pattern), *(misput(pattern, value) or miscut(config, pattern, value)))
    ]
    return [f"{named}: {fault}" for fault in found or misfits(config)]


def misnamed(config: Config, pattern: str) -> list[str]:
    """A sentence where a line of the plan names nothing that can be cut."""
    known = list(cuttable(config))
    if any(fnmatchcase(name, str(pattern)) for name in known):
        return []
    shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    return [f"plan[{pattern!r}] is none of the linear layers and embeddings that it calls, allowed: {shown or 'none'}"]


def misput(pattern: str, value: Any) -> list[str]:
    """A sentence where a line of the plan says no way to cut."""
    way, unit = as_words(value)
    if way == SEQUENCE:
        return [f"plan[{pattern!r}] is 'sequence', {UNSLICED}"]
    right = way in (COLUMN, ROW) and isinstance(unit, int) and unit > 0
    return [] if right else [f"plan[{pattern!r}] is {(way if unit == 1 else value)!r}, {ALLOWED}"]


def miscut(config: Config, pattern: str, value: Any) -> list[str]:
    """A sentence where an embedding is cut by its outputs, which nothing would put together."""
    embeds = [name for name, each in cuttable(config).items() if each.embeds and fnmatchcase(name, pattern)]
    if as_words(value)[0] != COLUMN or not embeds:
        return []
    return [f"plan[{pattern!r}] cuts {embeds[0]}, an embedding, by its outputs, allowed: 'row', its vocabulary"]


def misfits(config: Config) -> list[str]:
    """Sentences where what is to be cut cannot be cut in so many parts."""
    found = []
    for name, layer in cuttable(config).items():
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
