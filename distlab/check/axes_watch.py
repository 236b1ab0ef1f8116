"""What this process holds and is given along the axes of a mesh: copies that should be alike, samples that should not.

A parameter that is a DTensor says itself along which axes it is replicated, and so does what `DTensor.from_local` is
told to be Replicate. Copies are told at the optimizer's steps 1, 2, 4, 8, ... and at the end, everything else of first
steps and calls alone; whether ranks agree is for rank 0 to say (axes.py).
"""

import functools
import math
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.check.recorder import Call, Group, Recorder, preceded
from distlab.check.replica_steps import checksum, parameters
from distlab.check.training import FIRST
from distlab.measure.tensors import hash_of

MOST_NAMED = 500  # tensors that are told by name, and passes over samplers
MOST_DECLARED = 32  # tensors declared Replicate along an axis that are looked at
MOST_BYTES = 16 << 20  # of a gradient whose bits are looked at

Axis = tuple[str, list[int]]  # its name, and the ranks along it that this rank is among


class Copy(NamedTuple):
    """What ranks along an axis should hold alike."""

    name: str
    axis: Axis
    tensor: torch.Tensor


class Summand(NamedTuple):
    """What the script has summed over a group, as it was before."""

    tensor: "weakref.ref[torch.Tensor]"
    group: Group
    numel: int
    bits: int
    place: int


def harmless(before: Callable[..., None]) -> Callable[..., None]:
    """The same, whose exceptions are told: a defect of ours, or a class of another torch, may not end the script."""

    @functools.wraps(before)
    def tried(watch: Any, *args: Any, **named: Any) -> None:
        try:
            before(watch, *args, **named)
        except Exception as error:
            watch.telling.say("unrecorded", before.__name__, repr(error))

    return tried


class Axes:
    """Watches this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.telling = recorder, recorder.telling
        self._steps = 0
        self._copies: dict[int, list[Copy]] = {}  # by id of the optimizer that steps them
        self._names: dict[int, str] = {}  # of parameters, by id
        self._summed: list[Summand] = []  # since the last step
        self._given_at = -1  # the step in which the first inputs were told
        self._times: Counter[str] = Counter()
        self._sharded: dict[
            int, list[int]
        ] = {}  # ranks that a parameter is cut over by FullyShardedDataParallel, by id

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils import data
        from torch.utils.data import dataset, distributed

        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._recorder.on_call.append(self._note_sum)
        self._recorder.at_end.append(lambda: self._tell_copies(-1))
        sampler: Any = distributed.DistributedSampler
        sampler.__iter__ = preceded(sampler.__iter__, self._drawn)
        split = followed(dataset.random_split, self._split)
        for place in (data, dataset):
            made: Any = place
            made.random_split = split
        clip = self._clips(torch.nn.utils.clip_grad.clip_grad_norm_)
        for clipping in (torch.nn.utils, torch.nn.utils.clip_grad):
            clips: Any = clipping
            clips.clip_grad_norm_ = clip
        for holder, name in (
            (dist, "init_process_group"),
            (dist, "init_device_mesh"),
            (dist.device_mesh, "init_device_mesh"),
        ):
            setattr(holder, name, preceded(getattr(holder, name), self._look_at_classes))

    @harmless
    def _look_at_classes(self, *_: Any, **__: Any) -> None:
        """Those that take a second to import are watched once the script has imported them."""
        tensors, sharded = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
        if tensors is not None and not self._turn("tensor"):
            tensors.DTensor.from_local = staticmethod(followed(tensors.DTensor.from_local, self._declared))
        if sharded is not None and not self._turn("fsdp"):
            one: Any = sharded.FullyShardedDataParallel
            one.forward = preceded(one.forward, self._forward_1)
            two: Any = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_state"].FSDPState
            two._pre_forward = preceded(two._pre_forward, self._forward_2)

    # First inputs

    @harmless
    def _forward_1(self, module: Any, *inputs: Any, **named: Any) -> None:
        if self._is_first():
            axes: list[Axis] = [("shard", dist.get_process_group_ranks(module.process_group))]
            between = getattr(module, "_inter_node_pg", None)
            if between is not None:
                axes.append(("replicate", dist.get_process_group_ranks(between)))
                shards = [handle.flat_param for each in module.fsdp_modules(module) if (handle := each._handle)]
                self._copies[id(module)] = [Copy(each._fqns[0], axes[1], each) for each in shards]
            if module.sharding_strategy.name != "NO_SHARD":
                self._sharded |= {id(each): axes[0][1] for each in module.parameters()}
            self._tell_given(axes, [*inputs, *named.values()])

    @harmless
    def _forward_2(self, state: Any, module: torch.nn.Module, args: Any, named: Any) -> None:
        if self._is_first():
            self._names |= {id(each): name for name, each in module.named_parameters()}
            of_module = state._fsdp_param_group
            if of_module is not None:
                mesh = of_module.mesh_info.mesh
                self._tell_given([axis_of(mesh, index) for index in range(mesh.ndim)], [*args, *named.values()])

    def _is_first(self) -> bool:
        """Whether no input was told in this step, which is one of the first."""
        if self._steps >= FIRST or self._given_at == self._steps or not torch.is_grad_enabled():
            return False
        self._given_at = self._steps
        return True

    def _tell_given(self, axes: list[Axis], inputs: list[Any]) -> None:
        for name, ranks in axes:
            self.telling.say("given", self._steps, name, ranks, checksum(inputs), self._recorder.places.here(3)[0])

    @harmless
    def _note_sum(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Before an all_reduce of the script's own: it may be of gradients."""
        self._look_at_classes()
        if self._steps >= FIRST or name != "allreduce_" or not call.by_script:
            return
        for tensor in args[0]:
            if tensor.is_floating_point() and 1 < tensor.numel() * tensor.element_size() <= MOST_BYTES:
                self._summed.append(Summand(weakref.ref(tensor), group, tensor.numel(), hash_of(tensor), call.place))

    # Steps

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Gradients that were all summed by the script are told, by one checksum of what went in."""
        self._look_at_classes()
        summed, self._summed = self._summed, []
        if not summed:
            return
        gradients = [each.grad for each in parameters(optimizer) if each.grad is not None]
        for these in (summed, [each for each in summed if each.numel > 1]):  # a loss is summed too
            if these and len({each.group.number for each in these}) == 1 and are_summed(these, gradients):
                found = zlib.crc32(repr([each.bits for each in these]).encode())
                self.telling.say("summands", self._steps, these[0].group.number, found, these[0].place)
                break

    @harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        if self._steps.bit_count() == 1:
            self._copies[id(optimizer)] = list(self._copies_of(optimizer))
            self._tell_copies(self._steps)

    def _copies_of(self, optimizer: torch.optim.Optimizer) -> Iterator[Copy]:
        each: Any
        for number, each in enumerate(parameters(optimizer)):
            if hasattr(each, "placements"):
                for index, placement in enumerate(each.placements):
                    if placement.is_replicate() and each.device_mesh.size(index) > 1:
                        name = self._names.get(id(each), f"parameter {number}")
                        yield Copy(name, axis_of(each.device_mesh, index), each)

    def _tell_copies(self, step: int) -> None:
        by_axis: dict[tuple[str, tuple[int, ...]], list[list[Any]]] = {}  # an axis and its ranks
        for copies in self._copies.values():
            for name, (axis, ranks), tensor in copies:
                by_axis.setdefault((axis, tuple(ranks)), []).append([name, *bits_and_norm(tensor)])
        for (axis, along), held in by_axis.items():
            self.telling.say("copies", step, axis, list(along), held[:MOST_NAMED])

    # What else is alike or meant to be

    @harmless
    def _declared(self, made: Any, *args: Any, **named: Any) -> None:
        if named.get("run_check", args[3] if len(args) > 3 else False):
            return
        for index, placement in enumerate(made.placements):
            if placement.is_replicate() and made.device_mesh.size(index) > 1:
                axis, ranks = axis_of(made.device_mesh, index)
                turn = self._turn(f"declared {axis} {ranks}")
                if turn < MOST_DECLARED:
                    found = bits_and_norm(made)
                    self.telling.say("declared", turn, axis, ranks, *found, self._recorder.places.here(3)[0])

    def _clips(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clipped(parameters: Any, *args: Any, **named: Any) -> Any:
            given = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = function(given, *args, **named)
            self._clipped(norm, given)
            return norm

        return clipped

    @harmless
    def _clipped(self, norm: Any, given: Any) -> None:
        turn = self._turn("clipped")
        if turn < FIRST and not hasattr(norm, "placements") and math.isfinite(float(norm)):
            ranks = next((self._sharded[id(each)] for each in given if id(each) in self._sharded), [])
            self.telling.say("clipped", turn, float(norm), ranks, self._recorder.places.here(3)[0])

    @harmless
    def _drawn(self, sampler: Any) -> None:
        """A pass over a DistributedSampler begins."""
        turn = self._turn("drawn")
        if sampler.num_replicas > 1 and turn < MOST_NAMED:
            indices = getattr(sampler.dataset, "indices", None)
            order = [int(sampler.seed), int(sampler.epoch)] if sampler.shuffle else [0, 0]
            subset = zlib.crc32(repr(list(indices)).encode()) if isinstance(indices, (list, tuple)) else 0
            place = self._recorder.places.here(3)[0]
            self.telling.say("drawn", turn, *order, subset, len(sampler.dataset), sampler.num_replicas, place)

    @harmless
    def _split(self, parts: Any, *_: Any, **__: Any) -> None:
        found = zlib.crc32(repr([list(each.indices) for each in parts]).encode())
        sizes = [len(each) for each in parts]
        self.telling.say("split", self._turn("split"), sizes, found, self._recorder.places.here(3)[0])

    def _turn(self, what: str) -> int:
        """How often this came before."""
        turn = self._times[what]
        self._times[what] += 1
        return turn


def are_summed(summed: list[Summand], gradients: list[torch.Tensor]) -> bool:
    """Whether these calls summed all of these gradients: themselves, or copies of the same norm, or of that before a
    division by the number of ranks."""
    if sum(each.numel for each in summed) != sum(each.numel() for each in gradients):
        return False
    tensors = [tensor for each in summed if (tensor := each.tensor()) is not None]
    if {each.data_ptr() for each in tensors} == {each.data_ptr() for each in gradients}:
        return True
    of_sum, of_gradients = (math.hypot(*(bits_and_norm(each)[1] for each in these)) for these in (tensors, gradients))
    size = len(summed[0].group.ranks)
    return any(math.isclose(of_sum, factor * of_gradients, rel_tol=1e-3) for factor in (1, size)) and of_sum > 0


def followed(function: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """The same function, whose result and arguments `after` is told."""

    @functools.wraps(function)
    def both(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        after(result, *args, **named)
        return result

    return both


def axis_of(mesh: Any, index: int) -> Axis:
    """The axis of a mesh with this number, and the ranks along it that this rank is among."""
    coordinates = mesh.get_coordinate()
    along = mesh.mesh.movedim(index, -1)[tuple(each for at, each in enumerate(coordinates) if at != index)]
    return ((mesh.mesh_dim_names or {}) and mesh.mesh_dim_names[index]) or str(index), along.tolist()


def bits_and_norm(tensor: torch.Tensor) -> tuple[int, float]:
    """The checksum of what this rank has of a tensor, and its norm: -1 where it is no number."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "_local_shard", tensor)).detach()
    norm = float(torch.linalg.vector_norm(local.double())) if local.numel() else 0.0
    return hash_of(local), norm if math.isfinite(norm) else -1.0
