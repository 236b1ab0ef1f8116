"""The names of this process's parameters and buffers, and of gradients and copies that lie in their memory.

The modules that hold them are looked for among the objects that Python's garbage collector knows. Nothing of torch is
changed for it, so deep copies, loaded modules and those of a library have names too. A look takes some 50 ms, so it is
taken where a tensor is met that has no name, after 1, 2, 4, 8, ... of them.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from distlab.check.recorder import Named
from distlab.check.telling import Telling

MOST_NAMES = 500  # that are told
MOST_LOOKS = 10
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Parameters:
    """Of all modules that the script has."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
        self._turn: dict[tuple[torch.Size, torch.dtype], int] = {}  # where the last one was found
        self._unnamed = self._looks = 0

    def named(self, tensor: torch.Tensor) -> Named | None:
        """What lies where this tensor does, as a whole."""
        found = self._found(tensor)
        if found is None and tensor.is_floating_point():
            self._unnamed += 1
            if self._unnamed & (self._unnamed - 1) == 0 and self._looks < MOST_LOOKS:
                self._looks += 1
                self.look()
                found = self._found(tensor)
        return found

    def name_of(self, parameter: torch.Tensor) -> str | None:
        entry = self._names.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def _found(self, tensor: torch.Tensor) -> Named | None:
        kind = tensor.shape, tensor.dtype
        alike, place = self._by_shape.get(kind, ()), tensor.data_ptr()
        begin = self._turn.get(kind, 0)
        for step in range(len(alike)):  # scripts go through them in order: the next one is the first to be looked at
            index = (begin + step) % len(alike)
            reference, name = self._names[alike[index]]
            parameter = reference()
            if parameter is None:
                continue
            gradient = parameter.grad
            if parameter.data_ptr() == place or (gradient is not None and gradient.data_ptr() == place):
                self._turn[kind] = index + 1
                return Named(name, alike[index], parameter.data_ptr() != place)
        return None

    def look(self) -> None:
        """Take the names anew."""
        self._names.clear()
        self._by_shape.clear()
        for name, tensor in all_named():
            if id(tensor) not in self._names and not hasattr(tensor, "_local_tensor") and tensor.numel():
                self._names[id(tensor)] = weakref.ref(tensor), name
                self._by_shape[tensor.shape, tensor.dtype].append(id(tensor))
        self._telling.say("parameters", sorted({name for _, name in self._names.values()})[:MOST_NAMES])


def all_named() -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all modules, by their names in the outermost one."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()}
    for module in modules:
        if id(module) not in inner and "_parameters" in module.__dict__:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                yield plain_name(name), tensor


def plain_name(name: str) -> str:
    """The name without what wrappers put before it."""
    for each in WRAPPERS:
        while name.startswith(each):
            name = name[len(each) :]
    return name
