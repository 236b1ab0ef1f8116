"""A user's model: LAB_MODEL=FILE:name, where `name(seed)` returns an nn.Module.

The file may also define `loss(model, inputs, targets)`, a sum over terms that calls the model once, and `batch(seed,
step)`, which returns inputs and targets of LAB_BATCH samples; the default is cross entropy over the bytes of the text.
An nn.Sequential, or an nn.ModuleList `layers` that forward runs through and nothing else, is trained layer by layer, so
that fsdp and pp can split it; any other module is one layer.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

IGNORED = -100  # the target that torch's cross_entropy ignores by default


def is_own(spec: str) -> bool:
    return ":" in spec


@lru_cache(maxsize=8)
def module_of(file: str) -> ModuleType:
    """Import the file as a module of its own name; it can import its siblings. Raises the file's own exceptions."""
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def find_in_file(spec: str, name: str) -> Any:
    """Return the object of this name in the user's file; None if there is none."""
    return getattr(module_of(spec.rpartition(":")[0]), name, None)


def reads_text(model: str) -> bool:
    """Return whether LAB_MODEL is trained on text: gpt, or a user's model whose file has no `batch`."""
    return model == "gpt" or (is_own(model) and find_in_file(model, "batch") is None)


def make_user_model(spec: str, seed: int) -> nn.Module:
    """Return the model of `seed` in float32; raises TypeError if the function returns no module."""
    maker = find_in_file(spec, spec.rpartition(":")[2])
    if not callable(maker):
        raise TypeError(f"has no function {spec.rpartition(':')[2]!r}")
    module = maker(seed)
    if not isinstance(module, nn.Module):
        raise TypeError(f"returned a {type(module).__name__}: expected an nn.Module")
    return module.float()


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers in order, those without weights joined to the layer before; [module] if it has no layers."""
    found = module if isinstance(module, nn.Sequential) else getattr(module, "layers", None)
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        return [module]
    layers: list[list[nn.Module]] = []
    for each in found:
        if layers and (not any(True for _ in each.parameters()) or not any(True for _ in layers[0][0].parameters())):
            layers[-1].append(each)
        else:
            layers.append([each])
    return [each[0] if len(each) == 1 else nn.Sequential(*each) for each in layers]


def passed_shapes(spec: str, seed: int, seq: int) -> list[tuple[int, ...]]:
    """Return the shapes of the activations between layers, for one sample, without the batch dimension."""
    batch = find_in_file(spec, "batch")
    hidden: Tensor = torch.zeros(1, seq).long() if batch is None else batch(seed, 0)[0][:1]
    hidden = hidden.float() if hidden.is_floating_point() else hidden
    shapes = []
    with torch.no_grad():
        for layer in layers_of(make_user_model(spec, seed))[:-1]:
            hidden = layer(hidden)
            shapes.append(tuple(hidden.shape[1:]))
    return shapes


class SummedLoss(nn.Module):
    """The user's loss of the last layer's output, or the default loss."""

    def __init__(self, own: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.own = own

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(lambda *_: outputs, outputs, targets)
        return default_loss(outputs, targets)


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over all terms, at least in float32: cross entropy if targets are classes, else squares."""
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets.to(outputs.dtype), reduction="sum")
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def refusals(spec: str, seed: int, batch: int, inputs: Callable[[], Tensor]) -> list[str]:
    """Return reasons why no mode can train this model; `inputs` returns a sample of text if the file has no `batch`."""
    named = f"LAB_MODEL={spec!r}"
    try:
        module = make_user_model(spec, seed)
    except Exception as error:  # whatever a user's file raises
        return [f"{named} cannot be used: {type(error).__name__}: {error}"]
    faults = [f"{named} {fault}" for fault in unfit(module)]
    own = find_in_file(spec, "batch")
    if own is None:
        sample = inputs()
    else:
        sample, targets = own(seed, 0)
        if len(sample) != batch:
            faults.append(f"{named} has batches of {len(sample)} samples: set LAB_BATCH={len(sample)}, not {batch}")
        if not targets.is_floating_point() and bool((targets == IGNORED).any()):
            faults.append(
                f"{named} has padded targets ({IGNORED}), so samples have different numbers of loss terms, but a mode"
                " gives all the same weight: use `distlab prove`"
            )
    return faults or out_of_row(named, module, sample[:2])


def unfit(module: nn.Module) -> list[str]:
    """Return reasons why ranks cannot compute the same as one process."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            found.append(f"has {name}, a SyncBatchNorm: torch runs it only on GPUs, and separately per microbatch")
        elif isinstance(part, _BatchNorm):
            found.append(f"has {name}, a {type(part).__name__}: its output depends on which samples a rank has")
        if isinstance(part, _DropoutNd) and part.p > 0:
            found.append(f"has {name}, whose masks would differ between ranks: set its p to 0, or use `distlab prove`")
    layers = layers_of(module)
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if owners.setdefault(id(parameter), index) != index:
                found.append(f"ties weights of layers {owners[id(parameter)]} and {index}: use `distlab prove`")
    return list(dict.fromkeys(found))[:3]


def out_of_row(named: str, module: nn.Module, inputs: Tensor) -> list[str]:
    """Return a sentence if running the layers in order differs from the forward pass."""
    with torch.no_grad():
        hidden = sample = inputs.float() if inputs.is_floating_point() else inputs
        try:
            for layer in layers_of(module):
                hidden = layer(hidden)
            right = torch.equal(hidden, module(sample))
        except Exception:  # they do not even fit
            right = False
    if right:
        return []
    return [f"{named} has `layers` that its forward pass does not run one after the other: rename the attribute"]


# A user's training step.

STEP = ("model", "optimizer", "microbatches", "group")


def is_step(spec: str) -> bool:
    """Return whether LAB_VARIANT names a whole training step, for a rank with the whole model and its own samples."""
    return tuple(inspect.signature(find_in_file(spec, spec.rpartition(":")[2])).parameters) == STEP
