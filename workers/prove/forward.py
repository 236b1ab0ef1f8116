"""Where the forward pass parts first: the first module whose input is one process's and whose output is not.

Looked for only where something is wrong already, on each rank's first microbatch. A module that is cut has inputs or
outputs of another shape, and these are not compared; the one that puts the parts together is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workers.measure.difference import NEAR, factor
from workers.prove.held import plain_name
from workers.prove.theirs import Theirs
from workers.workload.data import Microbatch


class Passed(NamedTuple):
    """One module's first call."""

    kind: str
    given: Tensor | None
    found: Tensor | None


class Passes:
    """The first call of each module of a model, in the order in which they end."""

    def __init__(self) -> None:
        self.calls: dict[str, Passed] = {}

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Note them meanwhile."""
        hooks = []
        for name, module in model.named_modules():
            note = partial(self._note, plain_name(f"{name}.").rstrip("."), type(module).__name__)
            hooks.append(module.register_forward_hook(lambda _, given, found, note=note: note(given, found)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, kind: str, given: Any, found: Any) -> None:
        if name and name not in self.calls:
            first = given[0] if isinstance(given, tuple) and given else None
            self.calls[name] = Passed(kind, copied(first), copied(found))


def copied(value: Any) -> Tensor | None:
    """A copy of a plain tensor; None of all else, DTensors too."""
    plain = isinstance(value, Tensor) and not hasattr(value, "full_tensor")
    return value.detach().clone() if plain else None


def parted(theirs: Theirs, mine: Passes, first: Microbatch) -> str:
    """A sentence on the first module that parts from one process's, on the rank that calls this; empty if none does."""
    model = theirs.model(theirs.config.seed)
    alone = Passes()
    with alone.watched(model), torch.no_grad():
        theirs.loss(model, first.inputs, first.targets)
    for name, call in mine.calls.items():
        wanted = alone.calls.get(name)
        if wanted is None or off(call.given, wanted.given) or not off(call.found, wanted.found):
            continue
        assert call.found is not None
        assert wanted.found is not None
        difference = call.found - wanted.found
        return f"the output of {name} ({call.kind}) is {how(difference, wanted.found, model.get_submodule(name), name)}"
    return ""


def off(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors of one shape differ."""
    if one is None or other is None or one.shape != other.shape or not one.is_floating_point():
        return False
    return not torch.allclose(one, other, rtol=NEAR, atol=NEAR * max(other.abs().max().item(), 1e-12))


def how(difference: Tensor, wanted: Tensor, module: nn.Module, name: str) -> str:
    """What it has too much, or by which factor it is off."""
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 1 and parameter.shape[0] == difference.shape[-1]:
            times = factor(difference, parameter.detach().expand_as(difference))
            if times is not None:
                return f"one process's and {times:.4g} x {name}.{own} more"
    times = factor(difference + wanted, wanted)
    return f"{times:.4g} x one process's" if times is not None else f"off by up to {difference.abs().max():.2g}"
