"""The linear layers and embeddings of a model of one's own: which can be cut, and how a forward pass calls them.

No formula knows how often a forward pass calls a layer, on how many rows, and which layers take the same tensor: so one
pass of the dense model is watched, for each size of a microbatch.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from workers.config import Config
from workers.workload import own
from workers.workload.model import build_model


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
    module = own.made(config.model, config.seed)
    ours = {id(part): f"layers.{name}" for name, part in nn.ModuleList(own.layers_of(module)).named_modules()}
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
    """The linear layers among them."""
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
    model(own.first_inputs(config.model, config.seed, config.seq, samples))
    return tuple(found)
