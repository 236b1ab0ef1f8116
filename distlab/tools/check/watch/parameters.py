"""The names of this process's parameters and buffers, also for gradients and copies in their memory.

Modules are found among the objects of Python's garbage collector. Nothing in torch is changed for this, so deep copies,
loaded modules and those of libraries have names too. A search takes some 50 ms, so it runs only for tensors without a
name, after 1, 2, 4, 8, ... of them.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distlab.tools.check.watch.recorder import Named
from distlab.tools.check.watch.reporter import Reporter

MOST_NAMES = 500  # that are reported
MOST_SEARCHES = 10
FSDP = {"FSDPModule", "FullyShardedDataParallel"}  # classes of torch.distributed.fsdp, which is slow to import
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Parameters:
    """The names of all modules of the script."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
        self._next_index: dict[tuple[torch.Size, torch.dtype], int] = {}  # the index of the last match
        self._unnamed = self._searches = 0

    def named(self, tensor: torch.Tensor) -> Named | None:
        """Return the named tensor that is exactly at this tensor's memory."""
        found = self._find(tensor)
        if found is None and tensor.is_floating_point():
            self._unnamed += 1
            if self._unnamed & (self._unnamed - 1) == 0 and self._searches < MOST_SEARCHES:
                self._searches += 1
                self.search()
                found = self._find(tensor)
        return found

    def name_of(self, parameter: torch.Tensor) -> str | None:
        entry = self._names.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def _find(self, tensor: torch.Tensor) -> Named | None:
        kind = tensor.shape, tensor.dtype
        candidates, place = self._by_shape.get(kind, ()), tensor.data_ptr()
        begin = self._next_index.get(kind, 0)
        for step in range(len(candidates)):  # scripts use them in order, so the next one is checked first
            index = (begin + step) % len(candidates)
            reference, name = self._names[candidates[index]]
            parameter = reference()
            if parameter is None:
                continue
            gradient = parameter.grad
            if parameter.data_ptr() == place or (gradient is not None and gradient.data_ptr() == place):
                self._next_index[kind] = index + 1
                return Named(name, candidates[index], parameter.data_ptr() != place)
        return None

    def search(self) -> None:
        """Search the names again."""
        self._names.clear()
        self._by_shape.clear()
        for name, tensor in all_named():
            if id(tensor) not in self._names and not hasattr(tensor, "_local_tensor") and tensor.numel():
                self._names[id(tensor)] = weakref.ref(tensor), name
                self._by_shape[tensor.shape, tensor.dtype].append(id(tensor))
        self._reporter.send("parameters", sorted({name for _, name in self._names.values()})[:MOST_NAMES])


def all_named() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of all modules, by their names in the outermost one."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()}
    for module in modules:
        if id(module) not in inner and "_parameters" in module.__dict__:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                yield plain_name(name), tensor


def outside_of_shards(
    stepped: Sequence[torch.Tensor],
) -> tuple[dist.ProcessGroup | None, list[tuple[str, torch.Tensor]]]:
    """Return FSDP modules' parameters that are stepped whole, since FSDP does not shard them, and the sharding group;
    none if there are several."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    sharding = [each for each in modules if FSDP & {kind.__name__ for kind in type(each).__mro__}]
    wanted = {id(each): each for each in stepped if each.grad is not None}
    groups: dict[int, dist.ProcessGroup] = {}
    for module in sharding:
        for inner in module.modules():
            handle: Any = inner.__dict__.get("_handle")
            if handle is not None:  # of the older FullyShardedDataParallel
                groups[id(handle.process_group)] = handle.process_group
                for each in (handle.flat_param, *(getattr(handle.flat_param, "_params", None) or ())):
                    wanted.pop(id(each), None)
        for tensor in module.parameters():
            mesh: Any = getattr(tensor, "device_mesh", None)
            if mesh is not None:
                wanted.pop(id(tensor), None)
                if mesh.ndim > 1:
                    return None, []
                groups[id(mesh.get_group())] = mesh.get_group()
    found = {id(each): (plain_name(name), each) for module in sharding for name, each in module.named_parameters()}
    group = next(iter(groups.values())) if len(groups) == 1 else None
    return group, [found[number] for number in wanted if number in found] if group is not None else []


def plain_name(name: str) -> str:
    """Return the name without wrappers' prefixes."""
    for each in WRAPPERS:
        while name.startswith(each):
            name = name[len(each) :]
    return name
