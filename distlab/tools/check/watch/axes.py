"""Record per mesh axis which tensors must be equal across ranks and which samples must differ.

A DTensor parameter knows the axes along which it is replicated, and so does a tensor declared Replicate in
`DTensor.from_local`. Copies are reported at the optimizer's steps 1, 2, 4, 8, ... and at the end, everything else only
for first steps and calls; rank 0 compares them (axes.py).
"""

import math
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.lab.measure.tensors import hash_of
from distlab.tools.check.watch.patches import Function, Patch, after, before, harmless, hook, put
from distlab.tools.check.watch.recorder import Call, Group, Recorder, flat
from distlab.tools.check.watch.replicas import FIRST, checksum, parameters

MOST_NAMED = 500  # tensors reported by name, and passes over samplers
MOST_DECLARED = 32  # reported tensors declared Replicate along an axis
MOST_BYTES = 16 << 20  # of a gradient whose bits are reported

Axis = tuple[str, list[int]]  # its name, and the ranks along it, including this one


class Copy(NamedTuple):
    """Tensors that must be equal on the ranks along an axis."""

    name: str
    axis: Axis
    tensor: torch.Tensor


class Summand(NamedTuple):
    """A tensor that the script summed over a group, as it was before the sum."""

    tensor: "weakref.ref[torch.Tensor]"
    group: Group
    numel: int
    bits: int
    place: int


class Sharding(NamedTuple):
    """Weights that FSDP sharded on this rank: their checksums before, and the checksum of its shard then."""

    sums: list[list[Any]]
    ranks: list[int]
    place: int
    shard: list[torch.Tensor]
    shard_bits: int


class Axes:
    """Observes this process; `install` once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._reporter = recorder, recorder.reporter
        self._steps = 0
        self._copies: dict[int, list[Copy]] = {}  # by id of the optimizer that steps them
        self._names: dict[int, str] = {}  # of parameters, by id
        self._summed: list[Summand] = []  # since the last step
        self._inputs_reported_at = -1  # the step whose first inputs were reported
        self._counts: Counter[str] = Counter()
        self._sharded: dict[int, list[int]] = {}  # ranks that FullyShardedDataParallel cuts a parameter over, by its id
        self._scattered: dict[int, list[int]] = {}  # ranks of the script's reduce_scatter since the last step, by size
        self._activation_inputs = -1, 0  # a step, and the checksum of the samples behind its summed activations
        self._activation_sums: dict[int, tuple[Group, int]] = {}  # by number of the group that sums, with the place
        self._averages: set[int] = set()  # numbers of groups that average gradients
        self._shardings: list[Sharding] = []
        self._wrapping = False

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils import data
        from torch.utils.data import dataset, distributed

        register_optimizer_step_pre_hook(hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        self.recorder.on_call.append(self._note_sum)
        self.recorder.at_end.append(lambda: self._report_copies(-1))
        patch_late = before(self._patch_late_imports)
        put(
            Patch(distributed.DistributedSampler, "__iter__", before(self._note_pass)),
            *(Patch(place, "random_split", after(self._note_split)) for place in (data, dataset)),
            *(Patch(place, "clip_grad_norm_", self._clip) for place in (torch.nn.utils, torch.nn.utils.clip_grad)),
            Patch(dist, "init_process_group", patch_late),
            *(Patch(place, "init_device_mesh", patch_late) for place in (dist, dist.device_mesh)),
        )

    @harmless
    def _patch_late_imports(self, *_: Any, **__: Any) -> None:
        """Observe classes that are slow to import once the script has imported them."""
        tensor_module, fsdp_module = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
        if tensor_module is not None and not self._count_before("tensor"):
            put(Patch(tensor_module.DTensor, "from_local", after(self._note_declared)))
        if fsdp_module is not None and not self._count_before("fsdp"):
            fsdp1, within = fsdp_module.FullyShardedDataParallel, "torch.distributed.fsdp._fully_shard._fsdp"
            put(
                Patch(fsdp1, "forward", before(self._forward_fsdp1)),
                Patch(fsdp1, "__init__", self._init_fsdp1),
                Patch(sys.modules[f"{within}_param_group"].FSDPParamGroup, "__init__", self._init_fsdp2),
                Patch(sys.modules[f"{within}_state"].FSDPState, "_pre_forward", before(self._forward_fsdp2)),
            )

    # First inputs

    @harmless
    def _forward_fsdp1(self, module: Any, *inputs: Any, **named: Any) -> None:
        self._report_shardings()
        if self._is_first():
            axes: list[Axis] = [("shard", dist.get_process_group_ranks(module.process_group))]
            between = getattr(module, "_inter_node_pg", None)
            if between is not None:
                axes.append(("replicate", dist.get_process_group_ranks(between)))
                shards = [handle.flat_param for each in module.fsdp_modules(module) if (handle := each._handle)]
                self._copies[id(module)] = [Copy(each._fqns[0], axes[1], each) for each in shards]
            if module.sharding_strategy.name != "NO_SHARD":
                self._sharded |= {id(each): axes[0][1] for each in module.parameters()}
            self._report_inputs(axes, [*inputs, *named.values()])

    @harmless
    def _forward_fsdp2(self, state: Any, module: torch.nn.Module, args: Any, named: Any) -> None:
        self._report_shardings()
        if self._is_first():
            self._names |= {id(each): name for name, each in module.named_parameters()}
            of_module = state._fsdp_param_group
            if of_module is not None:
                mesh = of_module.mesh_info.mesh
                self._report_inputs([axis_of(mesh, index) for index in range(mesh.ndim)], [*args, *named.values()])

    def _is_first(self) -> bool:
        """Return whether no input was reported in this step, which is one of the first."""
        if self._steps >= FIRST or self._inputs_reported_at == self._steps or not torch.is_grad_enabled():
            return False
        self._inputs_reported_at = self._steps
        return True

    def _report_inputs(self, axes: list[Axis], inputs: list[Any]) -> None:
        for name, ranks in axes:
            self._reporter.send("given", self._steps, name, ranks, checksum(inputs), self.recorder.places.here(3)[0])

    # FSDP's sharding

    def _init_fsdp1(self, init: Function, fsdp: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
        """Handle FullyShardedDataParallel, the outermost that one wrapping creates."""
        if self._wrapping or named.get("sync_module_states"):
            init(fsdp, module, *args, **named)
            return
        sums: list[list[Any]] = []
        self._note_sums(sums, lambda: not_yet_sharded(module, type(fsdp)))
        self._wrapping = True
        try:
            init(fsdp, module, *args, **named)
        finally:
            self._wrapping = False
        self._add_sharding(sums, lambda: dist.get_process_group_ranks(fsdp.process_group), lambda: [*fsdp.parameters()])

    def _init_fsdp2(
        self, init: Function, param_group: Any, params: Any, modules: Any, mesh_info: Any, *args: Any, **named: Any
    ) -> None:
        """fully_shard's."""
        sums: list[list[Any]] = []
        self._note_sums(sums, lambda: with_names(params, modules))
        init(param_group, params, modules, mesh_info, *args, **named)
        self._add_sharding(
            sums, lambda: axis_of(mesh_info.mesh, mesh_info.mesh.ndim - 1)[1],
            lambda: [each.sharded_param for each in param_group.fsdp_params],
        )  # fmt: skip

    @harmless
    def _note_sums(self, sums: list[list[Any]], find: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> None:
        named = [] if self._steps else find()
        if not any(each.is_meta for _, each in named):
            sums += [[name, checksum([each.detach()])] for name, each in named[:MOST_NAMED]]

    @harmless
    def _add_sharding(
        self, sums: list[list[Any]], get_ranks: Callable[[], list[int]], get_shard: Callable[[], list[torch.Tensor]]
    ) -> None:
        if sums:
            shard = get_shard()
            self._shardings.append(Sharding(sums, get_ranks(), self.recorder.places.here(4)[0], shard, checksum(shard)))

    def _report_shardings(self) -> None:
        """Report at the first forward pass the weights that were not loaded since."""
        shardings, self._shardings = self._shardings, []
        for each in shardings:
            count = self._count_before(f"taken {each.ranks}")
            if checksum(each.shard) == each.shard_bits:
                self._reporter.send("taken", count, each.ranks, each.sums, each.place)

    # Manual tensor parallelism

    def _note_part(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Note a call that shards gradients over a group, averages them, or sums partial activations."""
        if call.op == "reduce_scatter" and call.by_script:
            self._scattered[sum(each.numel() for each in flat(args[0]))] = group.ranks
        if call.op == "reduce_scatter" or (call.op == "all_reduce" and not call.by_script):
            self._averages.add(group.number)
        if name == "allreduce_" and call.by_script and len(group.ranks) > 1:
            (tensor, *_) = flat(args[0])
            if call.parameter is not None and call.parameter.gradient:
                self._averages.add(group.number)
            elif self._activation_inputs[0] != self._steps and tensor.dim() > 1 and call.parameter is None:
                inputs = outermost_inputs()
                if inputs and len(inputs[0]) == len(tensor):
                    self._activation_inputs = self._steps, checksum(inputs)
                    self._activation_sums.setdefault(group.number, (group, call.place))

    @harmless
    def _note_sum(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:
        """Note an all_reduce of the script, which may be of gradients."""
        self._patch_late_imports()
        if self._steps < FIRST:
            self._note_part(name, args, call, group)
        if self._steps >= FIRST or name != "allreduce_" or not call.by_script:
            return
        for tensor in args[0]:
            if tensor.is_floating_point() and 1 < tensor.numel() * tensor.element_size() <= MOST_BYTES:
                self._summed.append(Summand(weakref.ref(tensor), group, tensor.numel(), hash_of(tensor), call.place))

    # Steps

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Report gradients that the script has all summed, by one checksum of the inputs."""
        self._patch_late_imports()
        summed, self._summed = self._summed, []
        self._scattered.clear()
        try:
            if summed:
                self._report_summands(optimizer, summed)
        finally:
            self._report_activation_inputs()

    def _report_activation_inputs(self) -> None:
        """Report the samples of a rank that sums activations over a group without averaging gradients there."""
        if self._activation_inputs[0] == self._steps:
            for number, (_, place) in self._activation_sums.items():
                if number not in self._averages:
                    self._reporter.send("entered", self._steps, number, self._activation_inputs[1], place)

    def _report_summands(self, optimizer: torch.optim.Optimizer, summed: list[Summand]) -> None:
        gradients = [each.grad for each in parameters(optimizer) if each.grad is not None]
        for these in (summed, [each for each in summed if each.numel > 1]):  # a loss is summed too
            if these and len({each.group.number for each in these}) == 1 and are_summed(these, gradients):
                found = zlib.crc32(repr([each.bits for each in these]).encode())
                self._reporter.send("summands", self._steps, these[0].group.number, found, these[0].place)
                self._averages.add(these[0].group.number)
                break

    @harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        if self._steps.bit_count() == 1:
            self._copies[id(optimizer)] = list(self._copies_of(optimizer))
            self._report_copies(self._steps)

    def _copies_of(self, optimizer: torch.optim.Optimizer) -> Iterator[Copy]:
        each: Any
        for number, each in enumerate(parameters(optimizer)):
            if hasattr(each, "placements"):
                for index, placement in enumerate(each.placements):
                    if placement.is_replicate() and each.device_mesh.size(index) > 1:
                        name = self._names.get(id(each), f"parameter {number}")
                        yield Copy(name, axis_of(each.device_mesh, index), each)

    def _report_copies(self, step: int) -> None:
        by_axis: dict[tuple[str, tuple[int, ...]], list[list[Any]]] = {}  # an axis and its ranks
        for copies in self._copies.values():
            for name, (axis, ranks), tensor in copies:
                by_axis.setdefault((axis, tuple(ranks)), []).append([name, *bits_and_norm(tensor)])
        for (axis, along), copies_along in by_axis.items():
            self._reporter.send("copies", step, axis, list(along), copies_along[:MOST_NAMED])

    # Other values that must be equal

    @harmless
    def _note_declared(self, tensor: Any, *args: Any, **named: Any) -> None:
        if named.get("run_check", args[3] if len(args) > 3 else False):
            return
        for index, placement in enumerate(tensor.placements):
            if placement.is_replicate() and tensor.device_mesh.size(index) > 1:
                axis, ranks = axis_of(tensor.device_mesh, index)
                place = self.recorder.places.here(3)[0]
                count = self._count_before(f"declared {axis} {ranks} {place}")
                if count < MOST_DECLARED:
                    found = bits_and_norm(tensor)
                    self._reporter.send("declared", count, axis, ranks, *found, place)

    def _clip(self, function: Function, parameters: Any, max_norm: float, *args: Any, **named: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = function(tensors, max_norm, *args, **named)
        self._report_clipping(norm, max_norm, tensors)
        return norm

    @harmless
    def _report_clipping(self, norm: Any, max_norm: Any, tensors: list[torch.Tensor]) -> None:
        place = self.recorder.places.here(3)[0]
        count = self._count_before(f"clipped {place}")
        if count < FIRST and not hasattr(norm, "placements") and math.isfinite(float(norm)) and math.isfinite(max_norm):
            ranks, by = self._sharded_over(tensors)
            self._reporter.send("clipped", count, float(norm), float(max_norm), ranks, by, place)

    def _sharded_over(self, tensors: list[torch.Tensor]) -> tuple[list[int], str]:
        """Return the ranks over which these gradients are sharded, and by what."""
        by_fsdp = next((self._sharded[id(each)] for each in tensors if id(each) in self._sharded), None)
        if by_fsdp is not None:
            return by_fsdp, "FSDP"
        size = sum(each.grad.numel() for each in tensors if each.grad is not None)
        if size in self._scattered:
            return self._scattered[size], "reduce_scatter"
        parts = [group for number, (group, _) in self._activation_sums.items() if number not in self._averages]
        return (parts[0].ranks, "parts") if parts else ([], "")

    @harmless
    def _note_pass(self, sampler: Any) -> None:
        """Record the start of a pass over a DistributedSampler."""
        place = self.recorder.places.here(3)[0]
        count = self._count_before(f"drawn {place}")
        if sampler.num_replicas > 1 and count < MOST_NAMED:
            indices = getattr(sampler.dataset, "indices", None)
            order = [int(sampler.seed), int(sampler.epoch)] if sampler.shuffle else [0, 0]
            subset = zlib.crc32(repr(list(indices)).encode()) if isinstance(indices, (list, tuple)) else 0
            self._reporter.send("drawn", count, *order, subset, len(sampler.dataset), sampler.num_replicas, place)

    @harmless
    def _note_split(self, parts: Any, *_: Any, **__: Any) -> None:
        found = zlib.crc32(repr([list(each.indices) for each in parts]).encode())
        sizes = [len(each) for each in parts]
        place = self.recorder.places.here(3)[0]
        self._reporter.send("split", self._count_before(f"split {place}"), sizes, found, place)

    def _count_before(self, what: str) -> int:
        """Return how often this was counted before."""
        count = self._counts[what]
        self._counts[what] += 1
        return count


def not_yet_sharded(module: torch.nn.Module, kind: type) -> list[tuple[str, torch.Tensor]]:
    """Return the module's parameters that no submodule of this kind has sharded."""
    inner = {id(one) for each in module.modules() if isinstance(each, kind) for one in each.parameters()}
    return [(name, each) for name, each in module.named_parameters() if id(each) not in inner]


def with_names(tensors: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    names = {id(each): name for module in modules for name, each in module.named_parameters()}
    return [(names.get(id(each), "a parameter"), each) for each in tensors]


def outermost_inputs() -> list[torch.Tensor]:
    """Return the tensor inputs of the outermost module in whose forward this call is made."""
    frame: Any = sys._getframe(1)
    inputs: tuple[Any, ...] = ()
    called: Any = torch.nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is called:
            inputs = frame.f_locals["args"]
        frame = frame.f_back
    return [each for each in inputs if isinstance(each, torch.Tensor) and each.dim()]


def are_summed(summed: list[Summand], gradients: list[torch.Tensor]) -> bool:
    """Return whether these calls summed all of these gradients: directly, or as copies with the same norm, also after a
    division by the number of ranks."""
    if sum(each.numel for each in summed) != sum(each.numel() for each in gradients):
        return False
    tensors = [tensor for each in summed if (tensor := each.tensor()) is not None]
    if {each.data_ptr() for each in tensors} == {each.data_ptr() for each in gradients}:
        return True
    of_sum, of_gradients = (math.hypot(*(bits_and_norm(each)[1] for each in these)) for these in (tensors, gradients))
    size = len(summed[0].group.ranks)
    return any(math.isclose(of_sum, factor * of_gradients, rel_tol=1e-3) for factor in (1, size)) and of_sum > 0


def axis_of(mesh: Any, index: int) -> Axis:
    """Return a mesh's axis with this number, and the ranks along it, including this one."""
    coordinates = mesh.get_coordinate()
    along = mesh.mesh.movedim(index, -1)[tuple(each for at, each in enumerate(coordinates) if at != index)]
    return ((mesh.mesh_dim_names or {}) and mesh.mesh_dim_names[index]) or str(index), along.tolist()


def bits_and_norm(tensor: torch.Tensor) -> tuple[int, float]:
    """Return the checksum of this rank's part of a tensor, and its norm: -1 if it is not finite."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "_local_shard", tensor)).detach()
    norm = float(torch.linalg.vector_norm(local.double())) if local.numel() else 0.0
    return hash_of(local), norm if math.isfinite(norm) else -1.0
