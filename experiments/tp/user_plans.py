"""How a model of one's own is cut: the `plan` beside it names its linear layers and embeddings, and each one's way.

    plan = {"layers.*.up": "column", "layers.*.down": "row"}

"column" gives each rank some of a layer's outputs, "row" some of the next one's inputs, which are those outputs
(Shoeybi et al. 2019, section 3). Features that must stay together, as a head's do, are given with it: ("column", 8).
An embedding is cut by "row", some of its vocabulary on each rank. Names are the file's own, and a `*` stands for any
part of one. A plan of PyTorch's parallelize_module says the same by its styles, ColwiseParallel() and
RowwiseParallel().
"""

from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from distlab.config import Config
from distlab.contract import Strategy
from distlab.mesh.grid import Mesh
from distlab.tensor_parallel.layers import (
    ColumnParallelLinear,
    LocalRegion,
    Region,
    RowParallelLinear,
    Slice,
    VocabularyParallelEmbedding,
    shares,
)
from distlab.tensor_parallel.strategy import TensorParallel, plan, tie
from distlab.workload import user_model
from distlab.workload.data import Microbatch
from distlab.workload.model import Model, build_model
from distlab.workload.user_model import is_own

# Layers of any model replaced by a rank's part of them, with f before and g after, and by DTensor's.
#
# f stands before a tensor and not before a layer: whatever number of layers takes the same one, as q, k and v do, it
# is entered once, and its gradient is summed once. DTensor enters it for each.


class Cut(NamedTuple):
    """How one layer is cut."""

    by_outputs: bool
    sizes: tuple[int, ...]  # features of each rank, or an embedding's rows
    embeds: bool = False


class Entered:
    """What a layer takes comes through f, once for all layers in a row that take the same tensor."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        (x,) = args
        if self.last is None or self.last[0] is not x:
            self.last = (x, self.region.enter(x))
        return self.last[1]

    def forget(self, *_: Any) -> None:
        """The pass is over: hold no activation of it."""
        self.last = None


def cut(
    model: nn.Module, cuts: dict[str, Cut], rank: int, region: Region, row: type[RowParallelLinear] = RowParallelLinear
) -> None:
    """Replace the named layers of a dense `model` by this rank's parts of them; parameters keep their names."""
    entered = Entered(region)
    for name, each in cuts.items():
        dense = model.get_submodule(name)
        if isinstance(dense, nn.Embedding):
            part: nn.Module = VocabularyParallelEmbedding(dense, each.sizes, rank, region)
            model.set_submodule(name, part)
            continue
        assert isinstance(dense, nn.Linear)
        if each.by_outputs:
            part = ColumnParallelLinear(dense, each.sizes, rank)
            part.register_forward_pre_hook(entered)
        else:
            part = row(dense, each.sizes, rank, region)
        model.set_submodule(name, part)
    model.register_forward_hook(entered.forget)


# The linear layers and embeddings of a model of one's own: which can be cut, and how a forward pass calls them.
#
# No formula knows how often a forward pass calls a layer, on how many rows, and which layers take the same tensor: so
# one pass of the dense model is watched, for each size of a microbatch.


class Layer(NamedTuple):
    """A linear layer or an embedding, whose inputs are its rows, that can be cut."""

    ours: str  # its name in the model that is trained
    inputs: int
    outputs: int
    embeds: bool


class Use(NamedTuple):
    """One call of it."""

    name: str
    rows: int  # vectors that it takes, or tokens
    inputs: int
    outputs: int
    taken: int  # which tensor: calls that take the same one have one number
    learns: bool  # whether a gradient flows back to that


@lru_cache(maxsize=32)
def cuttable(config: Config) -> dict[str, Layer]:
    """What can be cut, by its name in the file.

    One whose forward pass is its own, whose weight is another module's too, or that nobody calls is none of them.
    """
    module = user_model.make_user_model(config.model, config.seed)
    ours = {id(part): f"layers.{name}" for name, part in nn.ModuleList(user_model.layers_of(module)).named_modules()}
    owners: dict[int, int] = {}
    for part in module.modules():
        for weight in part._parameters.values():
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    called = {use.name for use in uses(config, 1)}
    return {
        name: Layer(ours[id(part)], *sizes_of(part), isinstance(part, nn.Embedding))
        for name, part in module.named_modules()
        if is_plain(part) and owners[id(part.weight)] == 1 and ours.get(id(part)) in called
    }


def linears(config: Config) -> dict[str, Layer]:
    return {name: each for name, each in cuttable(config).items() if not each.embeds}


def sizes_of(part: nn.Linear | nn.Embedding) -> tuple[int, int]:
    """Inputs, or an embedding's rows, and outputs."""
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    return part.num_embeddings, part.embedding_dim


def is_plain(part: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether this is torch's own linear layer, or its embedding that does nothing but look rows up."""
    if isinstance(part, nn.Linear):
        return type(part).forward is nn.Linear.forward
    looks_up = isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward
    return looks_up and part.padding_idx is None and part.max_norm is None and not part.sparse


def called(config: Config) -> list[str]:
    """The layers that `gathered` cuts: all that can be."""
    return [layer.ours for layer in linears(config).values()]


def untied_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name, but one whose weight is the embedding's: `gathered` splits them, and not that one."""
    names = {name for name, _ in model.named_parameters()}  # a tied weight has its first name alone
    modules = dict(model.named_modules())
    return {
        name: module for name, module in modules.items() if isinstance(module, nn.Linear) and f"{name}.weight" in names
    }


@lru_cache(maxsize=32)
def uses(config: Config, samples: int) -> tuple[Use, ...]:
    """The calls of all these layers in a forward pass over so many samples, in their order."""
    model, found, seen = build_model(config, config.seed), list[Use](), list[Tensor]()

    def watch(name: str, part: nn.Linear | nn.Embedding, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        taken = next((number for number, one in enumerate(seen) if one is x), len(seen))
        seen.append(x)  # held until the pass is over, so that no other tensor gets its place
        inputs, outputs = sizes_of(part)
        rows = x.numel() // (inputs if isinstance(part, nn.Linear) else 1)
        found.append(Use(name, rows, inputs, outputs, taken, x.requires_grad))

    for name, part in model.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.register_forward_pre_hook(partial(watch, name))
    model(user_model.first_inputs(config.model, config.seed, config.seq, samples))
    return tuple(found)


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
        features = "outputs" if self.way == COLUMN else "rows" if self.embeds else "inputs"
        return features if self.unit == 1 else f"parts of {self.unit} {features}"


def plan_of(config: Config) -> Any:
    """What stands beside the model as its plan; None where nothing does."""
    return user_model.find_in_file(config.model, "plan")


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
    inputs = user_model.first_inputs(config.model, config.seed, config.seq, 2)
    wanted = build_model(config, config.seed)(inputs).shape
    for rank in (0, config.world_size - 1):
        model = build_model(config, config.seed)
        cut(model, cuts_of(config, config.world_size), rank, LocalRegion())
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
    outputs: Tensor = model(inputs)
    return outputs.shape


# PyTorch's own: `parallelize_module` over DTensor, with the same plan, or for the lab's layers that of its tutorial.
#
# The embedding by rows and the loss over sharded scores too (`loss_parallel`), so that it does what `megatron` does.
# One difference is the tutorial's: q, k and v each take an input of their own, whose gradients are summed three times,
# not once.


def dtensor(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's parallelize_module, with ColwiseParallel and RowwiseParallel."""
    # Not at the top: it takes a rank 0.7 s, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    devices = DeviceMesh.from_group(mesh.group, "cuda" if config.device == "cuda" else "cpu")
    own = is_own(config.model)
    parallelize_module(model, devices, styles(cuts_of(config, mesh.group.size())) if own else plan(model))
    if config.tie and not own:
        tie(model)
    return OfDTensors(model, mesh.group, config, slices_of(model, mesh.group.size()))


class OfDTensors(TensorParallel):
    """One whose weights are DTensors, whose scores are one, too, and whose loss takes them so."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """The same, with both passes inside of `loss_parallel`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.model.name == "gpt" else nullcontext():
            share = super().backward(microbatches)
        for parameter in map(self.model.get_parameter, self.slices):
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):  # the embedding's comes whole
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return share


def slices_of(model: nn.Module, num_ranks: int) -> dict[str, Slice]:
    """How each parameter is sliced that DTensor shards; it shards evenly, or `cannot` leaves it out."""
    slices = {}
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placements", [None])[0]
        if placement is not None and placement.is_shard():
            slices[name] = Slice(placement.dim, (parameter.shape[placement.dim] // num_ranks,) * num_ranks)
    return slices


def styles(cuts: dict[str, Cut]) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def style(each: Cut) -> Any:
        if each.embeds:
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel() if each.by_outputs else RowwiseParallel()

    return {name: style(each) for name, each in cuts.items()}
