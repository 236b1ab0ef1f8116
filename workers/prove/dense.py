"""One process: the whole batch, plain SGD in float64, and in which order its backward pass reaches the parameters."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workers.prove import buffers
from workers.prove.dealing import Dealing
from workers.prove.theirs import Refused, Theirs
from workers.workload.baseline import Reference, Snapshot, backward, fill
from workers.workload.data import Microbatch

STEPS = 3
LEARNING_RATE = 0.01


class Dense(NamedTuple):
    """The whole training of one process."""

    start: dict[str, Tensor]
    steps: list[Snapshot]
    order: list[str]  # of the backward pass
    carried: buffers.Kept = buffers.Kept({}, {}, {})  # buffers


def one_process(theirs: Theirs, dealing: Dealing) -> Dense:
    """Train alone; raises Refused where nothing is trained."""
    model = theirs.model(theirs.config.seed)
    named = dict(model.named_parameters())
    start = {name: each.detach().clone() for name, each in named.items()}
    carried = buffers.of(model)
    order: list[str] = []
    hooks = [
        each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, each in named.items()
        if each.requires_grad
    ]
    plain = {"optimizer": "sgd", "lr": LEARNING_RATE, "clip": theirs.found.get("clip")}
    reference = Reference(model, theirs.config.model_copy(update=plain), loss=theirs.loss)
    steps = []
    for step in range(STEPS):
        loss = reference.step([dealing.whole(step)])
        for hook in hooks if step == 0 else ():
            hook.remove()
        theirs.after_step(model)
        steps.append(reference.snapshot(loss))
        if not steps[-1].gradients:
            raise Refused("the loss depends on no parameter of the model: nothing is trained")
    in_order = [*order, *(name for name in named if name not in order)]
    return Dense(start, steps, in_order, buffers.Kept(carried, buffers.of(model), {}))


def by_own_samples(theirs: Theirs, dense: Dense, dealt: Sequence[Sequence[Microbatch]]) -> dict[str, Tensor]:
    """The buffers that one process would end with on these microbatches of each step alone, at the right weights."""
    model = theirs.model(theirs.config.seed)
    starts = [dense.start, *(each.weights for each in dense.steps[:-1])]
    for before, after, parts in zip(starts, dense.steps, dealt, strict=True):
        fill(model, before)
        for part in parts:
            theirs.loss(model, part.inputs, part.targets)
        fill(model, after.weights)
        theirs.after_step(model)
    return buffers.of(model)


def contributions(
    theirs: Theirs, dealing: Dealing, weights: Mapping[str, Tensor], step: int, name: str
) -> dict[tuple[str, int, int], Tensor]:
    """What each microbatch of each shard gives to the gradient of one parameter, by use of it, shard and microbatch.

    A parameter that is tied has a use a name: the sum of all is its gradient.
    """
    model = theirs.model(theirs.config.seed)
    aliases = [alias for alias, canonical in names_of(model).items() if canonical == name]
    fill(model, weights)
    for alias in aliases[1:]:
        holder, _, last = alias.rpartition(".")
        own = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model.get_submodule(holder), last, own)
    found = {}
    for shard in range(dealing.num_shards):
        for index, part in enumerate(dealing.dealt(step, shard)):
            backward(model, [part], None, theirs.loss)
            for alias in aliases:
                gradient = model.get_parameter(alias).grad
                found[alias, shard, index] = torch.zeros_like(weights[name]) if gradient is None else gradient.clone()
    return found


def names_of(model: nn.Module) -> dict[str, str]:
    """All names of all parameters, with the one that stands for a tied one."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found
