"""Report this process's replicated parameters step by step: those that must be equal on a group of ranks.

These are the parameters of each DistributedDataParallel, those whose gradients the script averages itself, and those
that it only broadcasts. At steps 1, 2, 4, 8, ... and at each LAB_CHECK_EVERY-th, checksums of all of their weights,
gradients and optimizer state are reported; at every step some elements of them, which show the first difference, and
changed options of the optimizer. Rank 0 compares them (replicas.py).
"""

import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distlab.lab.measure.tensors import raw
from distlab.tools.check.watch.parameters import MOST_NAMES, Parameters, outside_of_shards
from distlab.tools.check.watch.patches import Patch, before, harmless, hook, put
from distlab.tools.check.watch.recorder import Call, Group, Recorder

FIRST = 3  # steps, inputs and dropouts that are reported
END = -1  # used as a step number
SAMPLED = 16  # tensors with an element reported at each step
STATE_ELEMENTS = 1024  # of a tensor in an optimizer's state
MOST_KEPT = 4  # replicas whose memory is kept
SEARCHED_STEPS = 8  # of an optimizer, in which manual averaging is detected
MOST_REPORTED = 4  # steps of one kind of fault
NO_PLACE = -1
BROADCAST = "broadcast"  # the key of parameters that the script has broadcast and whose gradients were never averaged

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Forwards:
    """Forward passes of a DDP since the last step: those whose backward averages, and the others."""

    total: int = 0
    averaged: int = 0
    unaveraged_last: int = 0  # after the last averaged one
    unaveraged_at: int = NO_PLACE
    stepped: bool = False
    at_step: dict[int, int] = field(default_factory=dict)  # by id of an optimizer: `total` at its last step


@dataclass
class Replica:
    """Parameters that must be equal on a group of ranks."""

    kind: str
    key: str
    group: Group
    references: list[tuple[str, "weakref.ref[torch.Tensor]"]]
    kept: Named  # keeps them beyond the script's main function, for the report at the end
    module: "weakref.ref[Any] | None" = None  # the DDP
    frozen: frozenset[int] = frozenset()  # ids of those without requires_grad when DDP was created
    inputs: int = 0  # of the DDP that were reported
    step: int = 0
    sampled: int = 0  # of the gradients of this step
    stepped_at: int = NO_PLACE
    bypassed_at: int = NO_PLACE  # where the script last took the module out of its DDP, to call it
    forwards: Forwards = field(default_factory=Forwards)
    options: dict[int, list[dict[str, str]]] = field(default_factory=dict)  # last reported, by number of its optimizer
    fault_counts: dict[str, int] = field(default_factory=dict)  # count by kind of fault

    @property
    def named(self) -> Named:
        return [(name, tensor) for name, each in self.references if (tensor := each()) is not None]

    @property
    def is_wrapped(self) -> bool:
        """Return whether DDP or FSDP averages the gradients."""
        return self.kind in ("DDP", "FSDP")

    @property
    def ids(self) -> set[int]:
        return {id(tensor) for _, tensor in self.named}

    def add(self, named: Named) -> None:
        self.references += [(name, weakref.ref(tensor)) for name, tensor in named]
        self.kept += named

    def drop(self, ids: set[int]) -> None:
        kept = [(name, each) for name, each in self.named if id(each) not in ids]
        self.references, self.kept = [], []
        self.add(kept)


@dataclass
class Reduced:
    """Tensors that the script reduced in a group since the last step."""

    group: Group
    num_elements: int = 0  # of tensors that are not at a parameter's place, such as a flat copy
    ids: set[int] = field(default_factory=set)  # ids of parameters whose gradients they were
    place: int = NO_PLACE


class ReplicaSteps:
    """All replicas of this process; `install` once."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self.recorder, self._reporter, self._every = recorder, recorder.reporter, every
        self._parameters = Parameters(recorder.reporter)
        self._replicas: list[Replica] = []
        self._stepped: weakref.WeakKeyDictionary[Any, SteppedReplicas] = weakref.WeakKeyDictionary()  # by optimizer
        self._broadcast: dict[int, Group] = {}  # by address of what the script has broadcast before its first step
        self._reduced: dict[int, Reduced] = {}  # by group, since the last step
        self._begun = self._reduced_is_old = False  # a step was made; `_reduced` is from before the last step

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.recorder.named = self._parameters.named
        self.recorder.on_call.append(self._note_call)
        self.recorder.at_end.append(self._report_end)
        register_optimizer_step_pre_hook(hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        parallel: Any = torch.nn.parallel.DistributedDataParallel
        parallel.module = property(self._module)
        put(Patch(parallel, "__init__", before(self._wrap)), Patch(parallel, "forward", before(self._forward)))

    def _wrap(self, parallel: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
        """Handle a new DDP before it compares the ranks: it checks the shapes of parameters, not their names, and no
        buffers, which it may send to all ranks."""
        own = named.get("process_group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        default: Any = dist.group.WORLD
        group = self.recorder.group_of(own or default)
        broadcast = named.get("broadcast_buffers", args[3] if len(args) > 3 else None)
        sent = broadcast is not False or named.get("forward_sync_buffers") is not None
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        found: Named = [(name, each) for name, each in module.named_parameters() if name not in ignored]
        buffers = [f"{name} {tuple(each.shape)}" for name, each in module.named_buffers() if name not in ignored]
        frozen = frozenset(id(each) for _, each in found if not each.requires_grad)
        replica = self._add_replica("DDP", group, found)
        replica.module, replica.frozen = weakref.ref(parallel), frozen
        parallel.__dict__["_distlab"] = replica
        place = self.recorder.places.here(3)[0]
        shown = [f"{name} {tuple(each.shape)}" for name, each in found][:MOST_NAMES]
        self._reporter.send("module", replica.key, group.number, place, shown, buffers[:MOST_NAMES] if sent else [])

    def _add_replica(self, kind: str, group: Group, named: Named) -> Replica:
        """Return a replica numbered by kind and ranks, since one rank may have others on fewer ranks."""
        before = sum(each.kind == kind and each.group.ranks == group.ranks for each in self._replicas)
        replica = Replica(kind, kind if kind == BROADCAST else f"{kind} {before}", group, [], [])
        replica.add(named)
        for each in [each for each in self._replicas if each.kept][: -MOST_KEPT + 1]:
            if each.step:  # of an earlier training
                each.kept = []
        self._replicas.append(replica)
        return replica

    def _module(self, parallel: Any) -> torch.nn.Module:
        """Return DDP's attribute `module`, noting where the script took it: it may call it without DDP."""
        try:
            module: torch.nn.Module = parallel.__dict__["_modules"]["module"]
        except KeyError:
            raise AttributeError("'DistributedDataParallel' object has no attribute 'module'") from None
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            caller, replica = sys._getframe(1), parallel.__dict__.get("_distlab")
            if replica is not None and self.recorder.places.kind(caller.f_code.co_filename) == "user":
                replica.bypassed_at = self.recorder.places.here(2)[0]
        return module

    def _forward(self, parallel: Any, *inputs: Any, **named: Any) -> None:
        """Record a forward pass of a DDP."""
        replica: Replica | None = parallel.__dict__.get("_distlab")
        if replica is None or not torch.is_grad_enabled():
            return
        if replica.inputs < FIRST:
            found, place = checksum([*inputs, *named.values()]), self.recorder.places.here(3)[0]
            self._reporter.send("input", replica.key, replica.group.number, replica.inputs, found, place)
            replica.inputs += 1
        forwards = replica.forwards
        if forwards.stepped:
            forwards.averaged = forwards.unaveraged_last = 0
            forwards.stepped = False
        forwards.total += 1
        if parallel.require_backward_grad_sync:
            forwards.averaged += 1
            forwards.unaveraged_last = 0
        else:
            forwards.unaveraged_last += 1
            forwards.unaveraged_at = self.recorder.places.here(3)[0]

    def _note_call(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:  # noqa: ARG002
        """Note what the script itself broadcasts before its first step, and what it sums."""
        if call.op in ("broadcast", "scatter", "gather") and call.by_script and not self._begun:
            self._broadcast |= {tensor.data_ptr(): group for tensor in call.tensors if tensor.numel()}
        if call.op != "all_reduce" or not call.by_script or call.size < 2:
            return
        if self._reduced_is_old:
            self._reduced.clear()
            self._reduced_is_old = False
        found = self._reduced.setdefault(group.number, Reduced(group))
        sizes = [each.numel() for each in call.tensors if each.is_floating_point()]
        found.num_elements += 0 if call.parameter is not None else sum(size for size in sizes if size > 1)
        if call.parameter is not None and call.parameter.gradient:
            found.ids.add(call.parameter.number)
            found.place = call.place
        elif call.parameter is None and not found.ids:
            found.place = call.place

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped, place = self._stepped_by(optimizer), self.recorder.places.here(2)[0]
        for replica in stepped.replicas:
            replica.step += 1
            replica.stepped_at = place
            self._add_averaged(replica, optimizer)
            if replica.step == 1:
                self._report_sums("weights", replica, 0, [(name, each) for name, each in replica.named])
            self._report_options(replica, optimizer)
            self._report_faults(replica, optimizer)
            mine = [(name, each.grad) for name, each in replica.named if each.grad is not None]
            replica.sampled = sample([each for _, each in mine])
            if self._is_due(replica.step):
                self._report_sums("gradients", replica, replica.step, mine)

    @harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = self._stepped[optimizer]
        for replica in stepped.replicas:
            step, named = replica.step, replica.named
            options = zlib.crc32(repr(sorted(replica.options.items())).encode())
            found = replica.sampled, options, sample([each for _, each in named])
            self._reporter.send("trace", replica.key, replica.group.number, step, *found)
            if self._is_due(step):
                self._report_sums("weights", replica, step, named)
                states = [(name, optimizer.state[each]) for name, each in named if each in optimizer.state]
                self._report_sums("states", replica, step, [(name, first_elements(state)) for name, state in states])
                self._report_sums("buffers", replica, step, buffers_of(replica))
            replica.forwards.stepped = True
        if not self._begun:
            self._add_broadcast(optimizer, self.recorder.places.here(2)[0])
        self._begun = self._reduced_is_old = True

    def _report_end(self) -> None:
        """Report the weights of all replicas at the script's end."""
        for replica in self._replicas:
            if len(replica.named) == len(replica.references):
                self._report_sums("weights", replica, END, replica.named)

    def _is_due(self, step: int) -> bool:
        return step & (step - 1) == 0 or step % self._every == 0

    def _report_sums(self, kind: str, replica: Replica, step: int, named: Iterable[tuple[str, Any]]) -> None:
        sums = [[name, checksum([value])] for name, value in named]
        rest = [["those beyond", zlib.crc32(repr(sums[MOST_NAMES:]).encode())]] if len(sums) > MOST_NAMES else []
        shown = sums[:MOST_NAMES] + rest
        self._reporter.send("sums", kind, replica.key, replica.group.number, step, shown, replica.stepped_at)

    def _report_options(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """Report the options of its parameter groups, if they have changed. Its number is that of its first parameter,
        since a rank may have created other optimizers before."""
        found = [options_of(group) for group in optimizer.param_groups]
        stepped = {id(each) for each in parameters(optimizer)}
        number = next((index for index, (_, each) in enumerate(replica.named) if id(each) in stepped), 0)
        if replica.options.get(number) != found:
            replica.options[number] = found
            values = number, replica.step, found, replica.stepped_at
            self._reporter.send("options", replica.key, replica.group.number, *values)

    def _report_faults(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """Report why gradients of a DDP were not averaged."""
        named = [(name, each) for name, each in replica.named if each.grad is not None]
        if replica.module is None or not named:
            return
        forwards = replica.forwards
        before = forwards.at_step.get(id(optimizer), 0)
        forwards.at_step[id(optimizer)] = forwards.total
        thawed = [name for name, each in named if id(each) in replica.frozen and each.requires_grad]
        if thawed and "unfrozen" not in replica.fault_counts:
            self._report_fault(replica, "unfrozen", thawed, NO_PLACE)
        if forwards.total == before:
            self._report_fault(replica, "past", [], replica.bypassed_at)
        elif not forwards.averaged:
            self._report_fault(replica, "unaveraged", [], forwards.unaveraged_at)
        elif forwards.unaveraged_last:
            self._report_fault(replica, "after the average", [], forwards.unaveraged_at)

    def _report_fault(self, replica: Replica, kind: str, names: Sequence[str], place: int) -> None:
        replica.fault_counts[kind] = replica.fault_counts.get(kind, 0) + 1
        if replica.fault_counts[kind] <= MOST_REPORTED:
            values = kind, replica.step, list(names)[:MOST_NAMES], place
            self._reporter.send("fault", replica.key, replica.group.number, *values, replica.stepped_at)

    # The replicas that an optimizer steps.

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> "SteppedReplicas":
        """Search again if its parameters have changed, and in its first steps."""
        num_ddps = sum(each.kind == "DDP" for each in self._replicas)
        ids = num_ddps, *(id(each) for each in parameters(optimizer))
        stepped = self._stepped.get(optimizer)
        if stepped is None:
            stepped = self._stepped[optimizer] = SteppedReplicas()
        if stepped.ids != ids:
            stepped.ids = ids
            self._add_late(optimizer)
            if "torch.distributed.fsdp" in sys.modules:
                self._add_outside_of_shards(optimizer)
            stepped.replicas = [each for each in self._replicas if each.is_wrapped and each.ids & set(ids)]
            stepped.searched = 0
        if not stepped.replicas and stepped.searched < SEARCHED_STEPS and not self._reduced_is_old:
            stepped.searched += 1
            stepped.replicas = self._averaged_by_hand(optimizer)
            for each in stepped.replicas:
                each.step = stepped.searched - 1  # otherwise ranks may have diverged before
        return stepped

    def _add_late(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters that were put into the module of a DDP after its creation."""
        in_replicas = {number for each in self._replicas for number in each.ids}
        late = {id(each): each for each in parameters(optimizer) if id(each) not in in_replicas}
        for replica in self._replicas if late else ():
            parallel = replica.module() if replica.module else None
            inner = [] if parallel is None else parallel._modules["module"].named_parameters()
            ignored = getattr(parallel, "parameters_to_ignore", ())
            added = [(name, each) for name, each in inner if id(each) in late and name not in ignored]
            if added:
                replica.add(added)
                self._report_fault(replica, "added", [name for name, _ in added], NO_PLACE)

    def _add_outside_of_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters that an FSDP module does not shard: their gradients differ per rank."""
        in_replicas = {number for each in self._replicas for number in each.ids}
        group, named = outside_of_shards([each for each in parameters(optimizer) if id(each) not in in_replicas])
        if group is not None and named:
            self._add_replica("FSDP", self.recorder.group_of(group), named)

    def _add_averaged(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters whose gradients the script averages for the first time, or in another group."""
        others = [each for each in self._reduced.values() if each.group is not replica.group]
        if not replica.is_wrapped and any(each.ids & replica.ids for each in others):
            replica.fault_counts["elsewhere"] = replica.fault_counts.get("elsewhere", 0) + 1
            if replica.fault_counts["elsewhere"] == 1:
                self._reporter.send("elsewhere", replica.key, replica.group.number)
        found = self._reduced.get(replica.group.number)
        new = found.ids - replica.ids if found is not None and not replica.is_wrapped else ()
        if new:
            mine = [each for each in parameters(optimizer) if id(each) in new]
            replica.add(self._named(mine))

    def _averaged_by_hand(self, optimizer: torch.optim.Optimizer) -> list[Replica]:
        """Return the parameters whose gradients were reduced in only one group, by name or as a copy of all."""
        in_replicas = {each for replica in self._replicas if replica.key != BROADCAST for each in replica.ids}
        mine = {id(each): each for each in parameters(optimizer) if is_plain(each) and id(each) not in in_replicas}
        total = sum(each.numel() for each in mine.values() if each.grad is not None)
        by_name = {each for found in self._reduced.values() for each in found.ids}
        averaged = []
        for found in self._reduced.values():
            others = {each for other in self._reduced.values() if other is not found for each in other.ids}
            whole = not by_name & set(mine) and found.num_elements == total > 0
            chosen = list(mine) if whole else [each for each in mine if each in found.ids - others]
            if chosen:
                named = self._named([mine[each] for each in chosen])
                replica = self._add_replica("optimizer", found.group, named)
                for each in self._replicas:
                    if each.key == BROADCAST:
                        each.drop(set(chosen))
                self._reporter.send("averaged", replica.key, found.group.number, not whole, found.place)
                averaged.append(replica)
        return averaged

    def _add_broadcast(self, optimizer: torch.optim.Optimizer, place: int) -> None:
        """Add parameters that were broadcast, and whose gradients were never averaged."""
        in_replicas = {each for replica in self._replicas for each in replica.ids}
        mine = [each for each in parameters(optimizer) if id(each) not in in_replicas and is_plain(each)]
        for number in {self._broadcast[each.data_ptr()].number for each in mine if each.data_ptr() in self._broadcast}:
            chosen = [each for each in mine if getattr(self._broadcast.get(each.data_ptr()), "number", -1) == number]
            replica = self._add_replica(BROADCAST, self._broadcast[chosen[0].data_ptr()], self._named(chosen))
            replica.stepped_at = place

    def _named(self, tensors: Sequence[torch.Tensor]) -> Named:
        """Return them with their names, or positions if names are missing or not unique."""
        if any(self._parameters.name_of(each) is None for each in tensors):
            self._parameters.search()
        names = [self._parameters.name_of(each) or str(index) for index, each in enumerate(tensors)]
        twice = {name for name, count in Counter(names).items() if count > 1}
        indexed = [f"{name} ({index})" if name in twice else name for index, name in enumerate(names)]
        return list(zip(indexed, tensors, strict=True))


@dataclass
class SteppedReplicas:
    """An optimizer's parameters at the last search, and the replicas that it steps."""

    ids: tuple[int, ...] = ()
    replicas: list[Replica] = field(default_factory=list)
    searched: int = 0


def buffers_of(replica: Replica) -> Named:
    """Return the buffers of a DDP's module, without statistics of a rank's batches, which do not affect training."""
    parallel = replica.module() if replica.module is not None else None
    module: Any = parallel._modules["module"] if parallel is not None else torch.nn.Identity()
    norms = [each for each in module.modules() if isinstance(each, torch.nn.modules.batchnorm._NormBase)]
    statistics = {id(buffer) for each in norms for buffer in each.buffers()}
    return [(name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in statistics]


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether it is no part of a sharded tensor."""
    return tensor.is_floating_point() and not hasattr(tensor, "_local_tensor") and not hasattr(tensor, "_sharding_spec")


def options_of(group: dict[str, Any]) -> dict[str, str]:
    """Return the numbers and words of a parameter group, and its number of parameters."""
    kept = {name: value for name, value in group.items() if isinstance(value, (int, float, str, tuple))}
    kept |= {
        name: value.item() for name, value in group.items() if isinstance(value, torch.Tensor) and value.numel() == 1
    }
    return {name: repr(value)[:80] for name, value in kept.items()} | {"parameters": str(len(group["params"]))}


def sample(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of one element each of some of the tensors."""
    some = tensors[:: max(len(tensors) // SAMPLED, 1)]
    dense = [each.detach() for each in some if each.layout == torch.strided and each.numel()]
    middle = [each[tuple(size // 2 for size in each.shape)].item() for each in dense]
    return zlib.crc32(repr(middle).encode())


def first_elements(state: Any) -> list[Any]:
    """Return the first elements of each tensor of an optimizer's state."""
    values = state.values() if isinstance(state, dict) else ()
    return [each.detach().flatten()[:STATE_ELEMENTS] if isinstance(each, torch.Tensor) else each for each in values]


def checksum(values: Iterable[Any]) -> int:
    """Return a checksum of all tensors and numbers in nested lists and dicts."""
    found = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            found = zlib.crc32(raw(local if local.layout == torch.strided else local.to_dense()), found)
        elif isinstance(value, (dict, list, tuple)):
            inner = value.values() if isinstance(value, dict) else value
            found = zlib.crc32(repr(checksum(inner)).encode(), found)
        else:
            found = zlib.crc32(repr(value).encode() if isinstance(value, (int, float, str)) else b"", found)
    return found
