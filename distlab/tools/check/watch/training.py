"""What a script trains, as far as it shows without a change: gradients, batches, dropout, meshes.

Whether ranks agree is the doctor's to say: a process knows itself alone. Of gradients, batches and dropouts only the
first are looked into.
"""

import math
import socket
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from distlab.tools.check.watch.patches import Function, Patch, after, before, hook, put
from distlab.tools.check.watch.recorder import Call, Group, Recorder
from distlab.tools.check.watch.replicas import FIRST, checksum, parameters

MOST_NODES = 100  # of a loss's graph that are looked through
MEAN, SUM = 1, 2  # what torch writes into the node of a loss function, by its `reduction`
NEAR = 1e-3
SAME_SCALE = (
    "AddBackward", "SubBackward", "NegBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward",
    "SqueezeBackward", "UnsqueezeBackward", "ToCopyBackward", "AliasBackward", "CloneBackward",
)  # fmt: skip


class Reduced(NamedTuple):
    """A tensor that was all_reduced, and its version then."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int
    by_script: bool
    size: int  # of the group
    place: int


class Training:
    """Watches optimizers and loaders of this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._telling = recorder, recorder.telling
        self._loaders = self._dropouts = self._steps = 0
        self._reduced: list[Reduced] = []  # since the last step
        self._stepped_at = -1  # the place of the last step
        self._backwards = 0
        self._scales: list[list[float]] = []  # of the means in the loss of each backward pass since the last step
        self._trained: set[int] = set()  # ids of the optimizers that have stepped

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import dataloader

        self._recorder.on_call.append(self._note_reduced)
        self._recorder.at_end.append(self._tell_device)
        register_optimizer_step_pre_hook(hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        put(
            Patch(torch.autograd, "backward", before(self._backward)),
            Patch(torch.nn.functional, "dropout", before(self._dropout)),
            Patch(dataloader._BaseDataLoaderIter, "__next__", self._next),
            *(Patch(place, "init_device_mesh", after(self._mesh_made)) for place in (dist, dist.device_mesh)),
        )

    def _note_reduced(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:  # noqa: ARG002
        if self._steps < FIRST and call.op == "all_reduce":
            for tensor in call.tensors:
                if tensor.is_floating_point() and not tensor.is_inference():
                    of_call = call.by_script, call.size, call.place
                    self._reduced.append(Reduced(weakref.ref(tensor), tensor._version, *of_call))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Of the first steps: how long the gradient is beside what was reduced, and whether that was touched since."""
        self._stepped_at = self._recorder.places.here(2)[0]
        if self._steps < FIRST and self._reduced:
            gradients = [each.grad for each in parameters(optimizer) if each.grad is not None]
            found = [(each, tensor) for each in self._reduced if (tensor := each.tensor()) is not None]
            if sum(tensor.numel() for _, tensor in found) != sum(each.numel() for each in gradients):
                found = [(each, tensor) for each, tensor in found if tensor.numel() > 1]  # a loss is reduced too
            own = sum(square(tensor) for _, tensor in found)
            if own > 0 and sum(tensor.numel() for _, tensor in found) == sum(each.numel() for each in gradients):
                ratio = math.sqrt(sum(square(each) for each in gradients) / own)
                untouched = all(tensor._version == each.version for each, tensor in found)
                by_script = all(each.by_script for each, _ in found)
                first = found[0][0]
                of_mean = any(abs(scale * len(self._scales) - 1) < NEAR for each in self._scales for scale in each)
                values = first.size, first.place, self._stepped_at, of_mean
                self._telling.say("gradient", ratio, by_script, untouched, *values)
        self._reduced.clear()
        self._scales.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self._recorder.sweep()
        if id(optimizer) not in self._trained:
            self._trained.add(id(optimizer))
            self._telling.say("trains", sum(each.numel() for each in parameters(optimizer)))
        self._telling.write(f'["step",{self._steps},{self._stepped_at}]')

    def _backward(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        """A backward pass that is none inside of another (checkpointing)."""
        if torch._C._current_graph_task_id() < 0:
            self._backwards += 1
            if self._steps < FIRST:
                loss = tensors if isinstance(tensors, torch.Tensor) and grad_tensors is None else None
                self._scales.append(list(scales_of_means(loss)) if loss is not None else [])
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
        if self._steps > turn[2]:  # a pass that trains
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
                del loading.__dict__["_distlab"]  # the next pass has the same object
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
    """How many batches a pass over a loader is to have; -1 where nobody knows."""
    with suppress(Exception):  # a sampler of the script's own may raise anything
        return len(loading._index_sampler)
    return -1


def scales_of_means(loss: torch.Tensor) -> Iterator[float]:
    """By what each mean over this rank's own samples is multiplied in a loss; a sum of n samples is n times a mean.

    Nothing comes of what its graph does not show: samples with weights of their own, compiled code.
    """
    left: list[tuple[Any, float, bool]] = [(loss.grad_fn, 1.0, False)]  # a node, its scale, whether it is in a mean
    for _ in range(MOST_NODES):
        if not left:
            return
        node, scale, in_mean = left.pop()
        if node is None:
            continue
        kind, reduction = node.name(), getattr(node, "_saved_reduction", 0)
        if kind.startswith(("DivBackward", "MulBackward")):
            scale *= factor_of(node)
        elif kind.startswith("SumBackward") and not in_mean:
            scale, in_mean = scale * length(getattr(node, "_saved_self_sym_sizes", ())), True
        elif kind.startswith(("MeanBackward", "SumBackward")):
            in_mean = True
        elif not kind.startswith(SAME_SCALE):
            if reduction == SUM and not in_mean:
                yield scale * length(node._saved_self.shape)
            elif in_mean or reduction == MEAN:
                yield scale
            continue
        left += [(each, scale, in_mean) for each, _ in node.next_functions]


def length(sizes: tuple[int, ...]) -> float:
    """How many samples a tensor of this shape has; of a single one nobody knows a sum from a mean."""
    return sizes[0] if sizes and sizes[0] > 1 else math.nan


def factor_of(node: Any) -> float:
    """The number that a node multiplies or divides by; not a number where it has more elements than one."""
    with suppress(RuntimeError):  # written since, or freed
        saved = [each for name in ("_saved_other", "_saved_self") if (each := getattr(node, name, None)) is not None]
        if saved and saved[0].numel() == 1 and node.next_functions[1][0] is None:
            return float(saved[0]) if node.name().startswith("Mul") else 1 / float(saved[0])
    return math.nan


def square(tensor: torch.Tensor) -> float:
    """The sum of squares; of a tensor that is cut over ranks, of this rank's part."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.layout != torch.strided:
        local = local.to_dense()
    return float(torch.linalg.vector_norm(local.detach().float()) ** 2)
