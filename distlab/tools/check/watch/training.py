"""Record a script's training, as far as it is visible without changes: steps, batches, dropout, meshes.

Rank 0 compares the ranks, since a process knows only itself. Only the first batches and dropouts are recorded.
"""

import math
import socket
import zlib
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from distlab.tools.check.watch.patches import Function, Patch, after, before, hook, put
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.replicas import FIRST, checksum, parameters


class Training:
    """Observes optimizers and loaders of this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._reporter = recorder, recorder.reporter
        self._loaders = self._dropouts = self._steps = 0
        self._stepped_at = -1  # the place of the last step
        self._backwards = 0
        self._trained: set[int] = set()  # ids of the optimizers that have stepped

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import dataloader

        self._recorder.at_end.append(self._report_device)
        register_optimizer_step_pre_hook(hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        put(
            Patch(torch.autograd, "backward", before(self._backward)),
            Patch(torch.nn.functional, "dropout", before(self._dropout)),
            Patch(dataloader._BaseDataLoaderIter, "__next__", self._next),
            *(Patch(place, "init_device_mesh", after(self._note_mesh)) for place in (dist, dist.device_mesh)),
        )

    def _before_step(self, *_: Any) -> None:
        self._stepped_at = self._recorder.places.here(2)[0]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self._recorder.sweep()
        if id(optimizer) not in self._trained:
            self._trained.add(id(optimizer))
            self._reporter.send("trains", sum(each.numel() for each in parameters(optimizer)))
        self._reporter.write(f'["step",{self._steps},{self._stepped_at}]')

    def _backward(self, *_: Any, **__: Any) -> None:
        """Count a backward pass, unless it is inside another one (checkpointing)."""
        if torch._C._current_graph_task_id() < 0:
            self._backwards += 1
            self._reporter.write_later(f'["backward",{self._backwards}]')

    def _report_device(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            number = torch.cuda.current_device()
            uuid = str(torch.cuda.get_device_properties(number).uuid)  # two ranks that see a card each call it 0
            self._reporter.send("device", number, uuid, socket.gethostname(), torch.cuda.device_count())

    def _next(self, method: Function, iterator: Any) -> Any:
        if "_distlab" not in iterator.__dict__:
            iterator.__dict__["_distlab"] = [self._loaders, 0, self._steps]
            self._reporter.send("pass", self._loaders, self._recorder.places.here(2)[0], length_of(iterator))
            self._loaders += 1
        progress = iterator.__dict__["_distlab"]
        if self._steps > progress[2]:  # a training pass
            progress[2] = math.inf
            sampler = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
            if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True):
                self._reporter.send("shuffled", progress[0], id(sampler))
        try:
            batch = method(iterator)
        except StopIteration:
            self._reporter.write_later(f'["fetched",{progress[0]},{progress[1]},true]')
            self._reporter.send("batches", progress[0], progress[1])
            if iterator._persistent_workers:
                del iterator.__dict__["_distlab"]  # the next pass uses the same object
            raise
        if progress[1] < 2:
            self._reporter.send("batch", progress[0], progress[1], checksum([batch]))
        progress[1] += 1
        self._reporter.write_later(f'["fetched",{progress[0]},{progress[1]},false]')
        return batch

    def _dropout(self, tensor: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> None:
        if isinstance(tensor, FakeTensor):
            return
        if training and p > 0 and self._dropouts < FIRST and isinstance(tensor, torch.Tensor):
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            self._reporter.send("dropout", self._dropouts, state, checksum([tensor]), self._recorder.places.here(3)[0])
            self._dropouts += 1

    def _note_mesh(self, mesh: Any, *_: Any, **__: Any) -> None:
        self._reporter.send("mesh", list(mesh.mesh_dim_names or ()), mesh.mesh.tolist())


def length_of(iterator: Any) -> int:
    """Return the number of batches in a pass over a loader; -1 if unknown."""
    with suppress(Exception):  # a user's sampler may raise anything
        return len(iterator._index_sampler)
    return -1
