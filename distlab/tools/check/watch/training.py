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
        self._recorder, self._telling = recorder, recorder.telling
        self._loaders = self._dropouts = self._steps = 0
        self._stepped_at = -1  # the place of the last step
        self._backwards = 0
        self._trained: set[int] = set()  # ids of the optimizers that have stepped

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import dataloader

        self._recorder.at_end.append(self._tell_device)
        register_optimizer_step_pre_hook(hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        put(
            Patch(torch.autograd, "backward", before(self._backward)),
            Patch(torch.nn.functional, "dropout", before(self._dropout)),
            Patch(dataloader._BaseDataLoaderIter, "__next__", self._next),
            *(Patch(place, "init_device_mesh", after(self._mesh_made)) for place in (dist, dist.device_mesh)),
        )

    def _before_step(self, *_: Any) -> None:
        self._stepped_at = self._recorder.places.here(2)[0]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self._recorder.sweep()
        if id(optimizer) not in self._trained:
            self._trained.add(id(optimizer))
            self._telling.say("trains", sum(each.numel() for each in parameters(optimizer)))
        self._telling.write(f'["step",{self._steps},{self._stepped_at}]')

    def _backward(self, *_: Any, **__: Any) -> None:
        """Count a backward pass, unless it is inside another one (checkpointing)."""
        if torch._C._current_graph_task_id() < 0:
            self._backwards += 1
            self._telling.write_later(f'["backward",{self._backwards}]')

    def _tell_device(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            number = torch.cuda.current_device()
            uuid = str(torch.cuda.get_device_properties(number).uuid)  # two ranks that see a card each call it 0
            self._telling.say("device", number, uuid, socket.gethostname(), torch.cuda.device_count())

    def _next(self, method: Function, loading: Any) -> Any:
        if "_distlab" not in loading.__dict__:
            loading.__dict__["_distlab"] = [self._loaders, 0, self._steps]
            self._telling.say("pass", self._loaders, self._recorder.places.here(2)[0], length_of(loading))
            self._loaders += 1
        turn = loading.__dict__["_distlab"]
        if self._steps > turn[2]:  # a training pass
            turn[2] = math.inf
            sampler = getattr(loading._index_sampler, "sampler", loading._index_sampler)
            if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True):
                self._telling.say("shuffled", turn[0], id(sampler))
        try:
            batch = method(loading)
        except StopIteration:
            self._telling.write_later(f'["fetched",{turn[0]},{turn[1]},true]')
            self._telling.say("batches", turn[0], turn[1])
            if loading._persistent_workers:
                del loading.__dict__["_distlab"]  # the next pass uses the same object
            raise
        if turn[1] < 2:
            self._telling.say("batch", turn[0], turn[1], checksum([batch]))
        turn[1] += 1
        self._telling.write_later(f'["fetched",{turn[0]},{turn[1]},false]')
        return batch

    def _dropout(self, given: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> None:
        if isinstance(given, FakeTensor):
            return
        if training and p > 0 and self._dropouts < FIRST and isinstance(given, torch.Tensor):
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            self._telling.say("dropout", self._dropouts, state, checksum([given]), self._recorder.places.here(3)[0])
            self._dropouts += 1

    def _mesh_made(self, mesh: Any, *_: Any, **__: Any) -> None:
        self._telling.say("mesh", list(mesh.mesh_dim_names or ()), mesh.mesh.tolist())


def length_of(loading: Any) -> int:
    """Return the number of batches in a pass over a loader; -1 if unknown."""
    with suppress(Exception):  # a user's sampler may raise anything
        return len(loading._index_sampler)
    return -1
