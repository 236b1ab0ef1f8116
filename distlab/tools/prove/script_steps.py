"""`ScriptSteps`: records in a script's process what it trains, step by step, by parameter name.

A step is one `optimizer.step()`. Each of the first ones is a file with the weights before and after, the gradients that
the optimizer uses, and each backward pass's part before any reduction: from a hook on the leaf, which runs before
DistributedDataParallel's. Names are those in the outermost module, without wrappers' parts.
"""

import gc
import math
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.lab.measure.tensors import hash_of, raw
from distlab.tools.check.watch.patches import Patch, before, harmless, hook, put, step_hook
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.replicas import parameters
from distlab.tools.prove.locate import plain_name

MOST_STEPS, MOST_BYTES = 8, 1 << 28  # that are recorded in full, per rank
MOST_BACKWARDS = 16  # of a step, recorded separately
MOST_ROWS = 4096  # of the inputs of a step
MOST_OUTPUTS, MOST_OUTPUT = 200, 1 << 18  # modules whose first outputs are kept, and elements of one
LOW = (torch.bfloat16, torch.float16)


class ProofSettings(NamedTuple):
    """The settings of a proof's process: its role ("ranks", "reference" or "noise"), and the folder for files."""

    folder: str
    role: str
    rank: int
    world_size: int  # of the proven ranks
    double: bool = False
    reference_size: int = 1  # ranks of the reference

    @property
    def own_folder(self) -> Path:
        return self.folder_of(self.role, self.rank)

    def folder_of(self, role: str, rank: int) -> Path:
        return Path(self.folder) / role / str(rank)


class FlatPart(NamedTuple):
    """A rank's part of one tensor in a flat parameter of FullyShardedDataParallel."""

    name: str
    shape: list[int]  # of the whole tensor
    begin: int  # its first element, in the whole tensor's
    where: slice  # its elements, in the rank's part of the flat parameter

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor in its shape if the rank has all of it, else its elements in a row, which may be none."""
        mine = flat.view(-1)[self.where]
        return mine.view(self.shape) if mine.numel() == math.prod(self.shape) else mine

    def piece(self, flat: Tensor) -> list[Any]:
        mine = self.of(flat.detach())
        begin = [] if list(mine.shape) == self.shape else [self.begin]
        return [begin, self.shape, mine.to("cpu", copy=True)]


class ScriptSteps:
    """The records of this process; `install` once."""

    def __init__(self, recorder: Recorder, settings: ProofSettings, most: int = MOST_STEPS) -> None:
        self.recorder, self.settings = recorder, settings
        self.number = 0  # of the next step
        self.backwards = 0  # since the last step
        self.all_backwards = 0
        self.most = most
        self.parameters: dict[str, Tensor] = {}
        self.first: dict[str, int] = {}  # checksums before the first step
        self.rates: list[list[float]] = []
        self.is_low = False
        self.on_model: list[Callable[[], None]] = []  # called at a model's first forward pass
        self.on_input: list[Callable[[list[Tensor]], None]] = []  # called with a model's training input
        self.on_evaluation: list[Callable[[nn.Module], None]] = []  # called with a module in evaluation
        self.stop: Callable[[], None] = lambda: None  # ends the reference when it has done enough
        self._names: dict[int, str] = {}
        self._roots = self._depth = 0
        self._flat: dict[int, list[FlatPart]] = {}  # by the stepped parameter
        self._modules: dict[int, str] = {}
        self._outputs: dict[str, list[Any]] = {}  # of each module's first call: its input's checksum, and its output
        self._parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        self._terms = Counter[str]()  # possible divisors of this step's loss
        self._begun: dict[str, int] = {}
        self._losses: list[float] = []
        self._inputs: dict[str, set[int]] = defaultdict(set)
        self._line = ""
        self._before: dict[str, list[Any]] = {}
        self._gradients: dict[str, list[Any]] = {}

    def install(self) -> None:
        from torch.nn.modules import module
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.settings.own_folder.mkdir(parents=True, exist_ok=True)
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")  # ours, of torch.compile
        register_optimizer_step_pre_hook(step_hook(self._before_step))
        register_optimizer_step_post_hook(hook(self._after_step))
        module.register_module_forward_pre_hook(hook(self._enter))
        module.register_module_forward_hook(hook(self._leave), always_call=True)
        put(
            Patch(torch.autograd, "backward", before(self._backward)),
            Patch(torch.amp.autocast_mode.autocast, "__enter__", before(self._note_autocast)),
        )

    def _note_autocast(self, autocast: Any) -> None:
        self.is_low = self.is_low or autocast._enabled

    # Forward and backward passes

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._enter_model(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if not (self._depth or module.training or torch.is_grad_enabled()):
            for evaluate in self.on_evaluation:  # after DDP has broadcast its buffers
                evaluate(module)
        name = self._modules.get(id(module))
        is_new = name is not None and name not in self._outputs and self.number == 0
        if is_new and type(output) is Tensor and output.numel() <= MOST_OUTPUT and len(self._outputs) < MOST_OUTPUTS:
            first = inputs[0] if isinstance(inputs, tuple) and inputs else None
            input_hash = hash_of(first.detach()) if type(first) is Tensor else 0
            self._outputs[str(name)] = [input_hash, output.detach().to("cpu", copy=True)]

    @harmless
    def _enter_model(self, module: nn.Module) -> None:
        first = next((each for each in module.parameters() if each.requires_grad), None)
        if first is None:
            return
        if id(first) not in self._names and id(first) not in self._flat:
            self._name_parameters(outermost(module))
        inputs = list(inputs_of(module))
        for observe in self.on_input:
            observe([value for _, value in inputs])
        if self.number < self.most:
            self._begin("inputs", self._inputs)
            for name, value in inputs:
                rows = value.detach().reshape(len(value), -1)[:MOST_ROWS]
                self._inputs[f"{name} {list(value.shape[1:])}"] |= {zlib.crc32(raw(row)) for row in rows}

    def _begin(self, what: str, kept: Any) -> None:
        """Clear the values of earlier steps at the first new one, not earlier: one pass may serve two optimizers."""
        if self._begun.get(what) != self.number:
            self._begun[what] = self.number
            kept.clear()

    def note_terms(self, terms: Mapping[str, int]) -> None:
        self._begin("terms", self._terms)
        self._terms.update(terms)

    def _name_parameters(self, model: nn.Module) -> None:
        """Name each parameter of a new model, and record its local gradients."""
        self._roots += 1
        rest = "" if self._roots == 1 else f" (model {self._roots})"
        for flat, found in flat_handles(model):
            self._name_flat(flat, [each._replace(name=each.name + rest) for each in found])
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._flat:
                self._name(f"{plain_name(name)}{rest}", parameter)
        named = {id(each): f"{plain_name(name + '.')[:-1]}{rest}" for name, each in model.named_modules()}
        self._modules |= {number: name for number, name in named.items() if number not in self._modules}
        for begin in self.on_model:
            begin()

    def _name_flat(self, flat: Any, parts: list[FlatPart]) -> None:
        """Name the tensors in a flat parameter; with `use_orig_params` the optimizer steps each separately."""
        stepped = flat._params or [flat] * len(parts)
        kept = parts if flat._params is None else [part._replace(where=slice(None)) for part in parts]
        self._flat |= {
            id(own): [part for part, other in zip(kept, stepped, strict=True) if other is own] for own in stepped
        }
        for part, own in zip(kept, stepped, strict=True):
            self._name(part.name, part.of(own.detach()))

        def part_all(gradient: Tensor) -> None:
            for part, own in zip(parts, unflattened(flat, gradient), strict=True):
                self._part(part.name, own)

        if flat.requires_grad:
            flat.register_hook(part_all)

    def _name(self, name: str, parameter: Tensor) -> None:
        if id(parameter) in self._names:
            return
        while name in self.parameters:
            name += "'"
        self._names[id(parameter)], self.parameters[name] = name, parameter
        self.first[name] = hash_of(getattr(parameter, "_local_tensor", parameter).detach())
        if parameter.requires_grad and not hasattr(parameter, "_local_tensor"):
            parameter.register_hook(lambda gradient, name=name: self._part(name, gradient))

    def _part(self, name: str, gradient: Tensor) -> None:
        if self.number < self.most and len(self._parts[name]) < MOST_BACKWARDS:
            kept = gradient.to_dense() if gradient.layout != torch.strided else gradient
            self._parts[name].append((self.backwards, kept.detach().to("cpu", copy=True)))

    @harmless
    def _backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            return
        self.backwards += 1
        self.all_backwards += 1
        self._line = self.recorder.places.line_of(3)
        if self.number < self.most:
            self._begin("losses", self._losses)
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            self._losses.append(float(loss.detach().float().sum()))

    # Steps

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_made_by_checkpoint():
            return
        stepped = parameters(optimizer)
        for index, each in enumerate(stepped):
            if id(each) not in self._flat:
                self._name(f"parameter {index}", each)
        self.rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
        if self.number == 0:
            num_bytes = sum(each.numel() * each.element_size() for each in stepped)
            self.most = min(self.most, max(1, MOST_BYTES // max(1, 4 * num_bytes)))
        if self.number < self.most:
            self._before = self._pieces(stepped)
            self._gradients = self._pieces(stepped, gradients=True)

    def _pieces(self, stepped: Sequence[Tensor], gradients: bool = False) -> dict[str, list[Any]]:
        """Return this rank's part of each tensor, or of its gradient, by name."""
        found: dict[str, list[Any]] = {}
        for each in stepped:
            tensor = each.grad if gradients else each
            if tensor is None:
                continue
            if id(each) in self._flat:
                found |= {part.name: part.piece(tensor) for part in self._flat[id(each)] if part.of(tensor).numel()}
            else:
                found[self._names[id(each)]] = piece(tensor)
        return found

    @harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_made_by_checkpoint():
            return
        if self.number < self.most:
            after, line = self._pieces(parameters(optimizer)), self.recorder.places.line_of(2)
            low = self.is_low or any(each.dtype in LOW for each in parameters(optimizer))
            mine = {part.name for each in parameters(optimizer) for part in self._flat.get(id(each), ())} | after.keys()
            torch.save(
                {
                    "before": self._before, "gradients": self._gradients, "after": after, "low": low,
                    "parts": {name: self._parts.pop(name) for name in mine if name in self._parts},
                    "stepped_at": line, "losses": self._losses, "inputs": dict(self._inputs), "line": self._line,
                    "rates": self.rates[-1], "backwards": self.backwards, "terms": dict(self._terms),
                    "outputs": self._outputs if self.number == 0 else {},
                },
                self.settings.own_folder / f"step-{self.number}.pt",
            )  # fmt: skip
        self.number += 1
        self.backwards = 0


def is_made_by_checkpoint() -> bool:
    """Return whether torch.distributed.checkpoint steps the optimizer: with a rate of 0, to create its state."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def outermost(module: nn.Module) -> nn.Module:
    """Return the outermost module that contains this one."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    parents = {id(child): each for each in modules for child in each._modules.values() if child is not None}
    seen = set[int]()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module = parents[id(module)]
    return module


def flat_handles(model: nn.Module) -> Iterator[tuple[Any, list[FlatPart]]]:
    """Yield each flat parameter of FullyShardedDataParallel, with this rank's parts of its tensors, in order."""
    for prefix, module in model.named_modules():
        handle: Any = module.__dict__.get("_handle")
        if handle is not None:
            flat, found = handle.flat_param, list[FlatPart]()
            for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                first, numel = info.offset_in_shard or 0, info.numel_in_shard or 0
                where = slice(first, first + numel)
                name = plain_name(f"{prefix}.{fqn}").lstrip(".")
                found.append(FlatPart(name, list(shape), info.intra_param_start_idx or 0, where))
            yield flat, found


def unflattened(flat: Any, gradient: Tensor) -> list[Tensor]:
    """Return the gradients of the tensors in a whole flat parameter, without its padding."""
    parts = gradient.view(-1)[: sum(flat._numels_with_padding)].split(list(flat._numels_with_padding))
    own = [each for each, is_padding in zip(parts, flat._is_padding_mask, strict=True) if not is_padding]
    return [each.view(shape) for each, shape in zip(own, flat._shapes, strict=True)]


def inputs_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor inputs of the module whose forward pass calls this; they are read from the frame, since a global
    hook gets no keyword arguments."""
    frame: Any = sys._getframe(1)
    found: tuple[Any, Mapping[str, Any]] = ((), {})
    called: Any = nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is called and frame.f_locals.get("self") is module:
            found = frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    for value in [*found[0], *found[1].values()]:
        if isinstance(value, Tensor) and value.dim() and type(value) in (Tensor, nn.Parameter) and len(value):
            yield str(value.dtype), value


def piece(tensor: Tensor) -> list[Any]:
    """Return a copy of this rank's part of a tensor: its start in the whole (empty if unknown), the whole shape, and
    the values."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is None:
        return [[], list(tensor.shape), tensor.detach().to("cpu", copy=True)]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    _, begin = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    return [list(begin), list(whole.shape), local.detach().to("cpu", copy=True)]
