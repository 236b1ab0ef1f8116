"""The contents of a user's file for a proof; the lab provides what it leaves out.

    model(seed)                                       an nn.Module; its weights a function of the seed
    loss(model, inputs, targets)                      the sum over all loss terms, a scalar
    batch(seed, step)                                 inputs and targets of the whole batch, samples first
    terms(targets)                                    the number of these terms; unset: targets that are not -100
    train_step(model, optimizer, microbatches, group) one step of a rank; returns its share of the loss, or nothing
    prepare(model, group)                             the module that is trained: DDP(model), fully_shard(model), ...
    strategy(model, mesh, config)                     instead of both: a Strategy, as in distlab.contract
    mesh                                              axes and sizes as {"dp": -1, "tp": 2}; unset: all ranks are dp
    after_step(model)                                 changes after the update, such as an average of weights
    clip                                              the norm to which train_step clips; unset: none
    even                                              True: shards and microbatches must be of equal size

A microbatch is (inputs, targets, share): the sum of `loss * share` over all microbatches of all ranks is the mean loss.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distlab.lab.cluster import name_ranks
from distlab.lab.config import Config
from distlab.lab.measure.tensors import digest_of
from distlab.lab.workload import user_model
from distlab.lab.workload.model import build_model

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "model": ("seed",),
    "loss": ("model", "inputs", "targets"),
    "batch": ("seed", "step"),
    "terms": ("targets",),
    "train_step": ("model", "optimizer", "microbatches", "group"),
    "prepare": ("model", "group"),
    "strategy": ("model", "mesh", "config"),
    "after_step": ("model",),
}
VALUES = ("mesh", "clip", "even")
NAMES = (*PARAMETERS, *VALUES)


class Refused(Exception):
    """The file cannot be proven; the message is one sentence with the reason."""


@dataclass(frozen=True)
class UserFile:
    """The file's functions by name, or the lab's for missing ones."""

    found: Mapping[str, Any]
    config: Config

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def model(self, seed: int) -> nn.Module:
        """Return the model in float64, with all weights distinct and not zero: each is moved by 1 % of a normal draw.

        A zero weight would hide the gradients of what it multiplies, and equal rows could not be located.
        """
        if "model" not in self:
            return jittered(build_model(self.config, seed).double(), seed)
        made = self["model"](seed)
        if not isinstance(made, nn.Module):
            raise Refused(f"model({seed}) returned a {type(made).__name__}: expected an nn.Module")
        return jittered(made.double(), seed)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all terms."""
        if "loss" in self:
            found: Tensor = self["loss"](model, inputs, targets)
        elif "model" not in self:
            found = model(inputs, targets)  # the lab's own models return the sum
        else:
            found = default_loss(model(inputs), targets)
        if not isinstance(found, Tensor) or found.dim():
            shape = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise Refused(f"loss(model, inputs, targets) returned {shape}: expected a sum, a tensor without dims")
        return found

    def after_step(self, model: nn.Module) -> None:
        if "after_step" in self:
            with torch.no_grad():
                self["after_step"](model)

    def terms(self, targets: Tensor) -> int:
        if "terms" in self:
            return int(self["terms"](targets))
        return targets.numel() if targets.is_floating_point() else int((targets != user_model.IGNORED).sum())

    def axes(self, world_size: int) -> dict[str, int]:
        """Return the mesh; its sizes multiply to the number of ranks."""
        mesh = self.found.get("mesh", {"dp": world_size})
        sizes = dict(mesh(world_size) if callable(mesh) else mesh)
        known = math.prod(size for size in sizes.values() if size != -1)
        if list(sizes.values()).count(-1) == 1 and known and world_size % known == 0:
            sizes = {axis: world_size // known if size == -1 else size for axis, size in sizes.items()}
        if -1 in sizes.values() or math.prod(sizes.values()) != world_size:
            shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise Refused(f"mesh is {shown}, which does not give WORLD_SIZE={world_size} ranks")
        return sizes

    @property
    def described(self) -> str:
        """Return which parts are the file's, and which the lab's."""
        steps = [name for name in ("strategy", "prepare", "train_step") if name in self]
        of_lab = [name for name in ("model", "loss", "batch") if name not in self]
        of_lab += [] if {"strategy", "train_step"} & set(steps) else ["train_step"]
        of_file = ", ".join(name for name in NAMES if name in self)
        return f"{of_file} from the file" + (f" · {', '.join(of_lab)} from the lab" if of_lab else "")


def load(file: Path, config: Config) -> UserFile:
    """Run the file and return its contents; raises Refused, or the file's own exception."""
    module = user_model.module_of(str(file))
    return from_names({name: getattr(module, name) for name in NAMES if hasattr(module, name)}, config, file.name)


def from_names(found: Mapping[str, Any], config: Config, where: str) -> UserFile:
    """Return the named functions; raises Refused for those that a proof cannot call."""
    if not found:
        raise Refused(f"{where} defines none of {', '.join(NAMES)}: there is nothing to prove")
    for name in set(found) & set(PARAMETERS):
        if fault := why_not_called(found[name], name):
            raise Refused(fault)
    for one, other in (("strategy", "train_step"), ("strategy", "prepare")):
        if one in found and other in found:
            raise Refused(f"{where} defines {one} and {other}: a strategy makes the whole step, so leave one out")
    return UserFile(found, config)


def why_not_called(function: Any, name: str) -> str:
    """Return a sentence if a proof cannot call this."""
    wanted = f"{name}({', '.join(PARAMETERS[name])})"
    if not callable(function):
        return f"{name} is a {type(function).__name__}: expected a function {wanted}"
    with suppress(ValueError):  # a C function: its signature is unknown
        signature = inspect.signature(function)
        try:
            signature.bind(*PARAMETERS[name])
        except TypeError:
            return f"{name}{signature} cannot be called as {wanted}"
    return ""


def default_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the default loss: cross entropy if targets are classes, else squares."""
    if not isinstance(outputs, Tensor):
        raise Refused(f"the model returned a {type(outputs).__name__}: also define loss(model, inputs, targets)")
    return user_model.default_loss(outputs, targets)


@torch.no_grad()
def jittered(model: nn.Module, seed: int) -> nn.Module:
    """Move every weight a little, by the same amount in every process."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        moved = 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(moved.to(parameter.device))
    return model


# Models that no number of ranks can compute like one process, rejected with a sentence before any training.


def refuse(model: nn.Module) -> None:
    """Raises Refused for a model whose output depends on neighbouring samples, or that draws inside C++."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            why = "which torch runs on GPUs only, and each microbatch would still be normalised separately"
            raise Refused(f"{name} is a SyncBatchNorm, {why}: use GroupNorm, or put it into eval()")
        if isinstance(module, _BatchNorm) and module.training:
            raise Refused(
                f"{name} is a {type(module).__name__}, whose output depends on the other samples of a batch: ranks"
                " and microbatches compute something else than one process; use GroupNorm, or put it into eval()"
            )
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training:
            raise Refused(f"{name} applies dropout inside C++, where a proof cannot disable it: set its dropout to 0")
    if not any(each.requires_grad for each in model.parameters()):
        raise Refused("the model has no trainable parameter")


def digest(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """Return checksums of what must be equal on all ranks at the start: the model, and the first batch."""
    return [digest_of(model.parameters()), digest_of([inputs, targets])]


def refuse_different_starts(digests: Sequence[Sequence[str]], seed: int) -> None:
    """Raises Refused if a seed gives ranks different models, or different batches."""
    calls: list[Any] = [f"model({seed})", f"batch({seed}, 0)"]
    for index, call in enumerate(calls):
        differing = [rank for rank, each in enumerate(digests) if each[index] != digests[0][index]]
        if differing:
            raise Refused(f"{call} differs on {name_ranks(differing)} from rank 0: let it depend on the seed only")
