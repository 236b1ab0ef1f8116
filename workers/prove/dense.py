"""One process: the whole batch, plain SGD in float64, and in which order its backward pass reaches the parameters."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workers.prove import buffers
from workers.prove.dealing import Dealing
from workers.prove.theirs import Refused, Theirs
from workers.workload.data import Microbatch

STEPS = 3
LEARNING_RATE = 0.01


class Snapshot(NamedTuple):
    """What is left after a step, by name."""

    loss: float  # mean over the terms of the batch, before the update
    gradients: dict[str, Tensor]  # as the optimizer saw them: after clipping
    weights: dict[str, Tensor]  # after the update
    norm: float  # of all gradients, before clipping


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
    trained = [each for each in named.values() if each.requires_grad]
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        loss = backward(theirs, model, [dealing.whole(step)])
        if step == 0:
            for hook in hooks:
                hook.remove()
        if all(each.grad is None for each in trained):
            raise Refused("the loss depends on no parameter of the model: nothing is trained")
        clip = theirs.found.get("clip")
        norm = nn.utils.clip_grad_norm_(trained, float("inf") if clip is None else clip).item()
        with torch.no_grad():
            for each in trained:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-LEARNING_RATE)
        theirs.after_step(model)
        gradients = {name: each.grad.clone() for name, each in named.items() if each.grad is not None}
        weights = {name: each.detach().clone() for name, each in named.items()}
        steps.append(Snapshot(loss, gradients, weights, norm))
    in_order = [*order, *(name for name in named if name not in order)]
    return Dense(start, steps, in_order, buffers.Kept(carried, buffers.of(model), {}))


def backward(theirs: Theirs, model: nn.Module, parts: Sequence[Microbatch]) -> float:
    """The loss of these parts, and its gradient in the model's parameters."""
    total = 0.0
    for inputs, targets, share in parts:
        loss = theirs.loss(model, inputs, targets) * share
        loss.backward()
        total += loss.item()
    return total


def by_own_samples(theirs: Theirs, dense: Dense, dealt: Sequence[Sequence[Microbatch]]) -> dict[str, Tensor]:
    """The buffers that one process would end with on these microbatches of each step alone, at the right weights."""
    model = theirs.model(theirs.config.seed)
    named = dict(model.named_parameters())

    def take(weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])

    starts = [dense.start, *(each.weights for each in dense.steps[:-1])]
    for before, after, parts in zip(starts, dense.steps, dealt, strict=True):
        take(before)
        for part in parts:
            theirs.loss(model, part.inputs, part.targets)
        take(after.weights)
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
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.copy_(weights[each])
    for alias in aliases[1:]:
        holder, _, last = alias.rpartition(".")
        own = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model.get_submodule(holder), last, own)
    found = {}
    for shard in range(dealing.num_shards):
        for index, part in enumerate(dealing.dealt(step, shard)):
            model.zero_grad()
            backward(theirs, model, [part])
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
