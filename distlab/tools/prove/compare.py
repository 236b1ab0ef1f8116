"""Differences between each tensor of a rank and one process's, step by step, and whether the ranks train all of it."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.cluster import name_ranks
from distlab.lab.measure import tensors
from distlab.lab.measure.tensors import NEAR, factor, hash_of
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.reference import LEARNING_RATE, Snapshot
from distlab.tools.prove.locate import LocatedTensor, Rows, plain_name
from distlab.tools.prove.reference import Dense
from distlab.tools.prove.user_file import UserFile

TOLERANCE = 1e-11  # relative to the largest value of all tensors of a kind, or of one if that is larger
CLIP_EPSILON = 1e-6  # torch's clip_grad_norm_ adds it to the norm; manual clipping may not
GRADIENTS, WEIGHTS, LOSSES = "gradients", "weights", "losses"


class Deviation(NamedTuple):
    """One tensor of one rank after one step."""

    step: int
    kind: str
    name: str  # on this rank
    rank: int
    difference: float  # the largest; infinite if the tensor is missing or not finite
    allowed: float
    factor: float | None  # relative to one process's, if it is a multiple

    @property
    def is_wrong(self) -> bool:
        return self.difference > self.allowed


class Step(NamedTuple):
    """One rank's record of a step, by the tensors' names there."""

    loss_part: float | None  # the rank's share of the loss, None if it has none
    gradients: Mapping[str, LocatedTensor]  # at the optimizer's step
    weights: Mapping[str, LocatedTensor]

    def of(self, kind: str) -> Mapping[str, LocatedTensor]:
        return self.gradients if kind == GRADIENTS else self.weights


def compared(
    rank: int, steps: Sequence[Step], dense: Dense, canonical: Mapping[str, str], clip: float | None
) -> list[Deviation]:
    found = []
    for number, (step, single) in enumerate(zip(steps, dense.steps, strict=True)):
        for kind in (GRADIENTS, WEIGHTS):
            wanted = single.gradients if kind == GRADIENTS else single.weights
            allowed = tolerance(wanted.values(), single, clip) * (LEARNING_RATE if kind == WEIGHTS and clip else 1.0)
            for name, each in step.of(kind).items():
                difference, times = difference_and_factor(each, wanted.get(canonical[name]))
                found.append(Deviation(number, kind, name, rank, difference, allowed, times))
    return found


def difference_and_factor(found: LocatedTensor, dense: Tensor | None) -> tuple[float, float | None]:
    """Return the largest difference, and the factor if there is one."""
    wanted = None if dense is None else found.rows.of(dense)
    if found.tensor is None or wanted is None:
        present = found.tensor if wanted is None else wanted
        missing = present is not None and bool(present.any())
        # A gradient that one process lacks may be zeros here; one that is zero there may be missing here.
        return (math.inf if missing else 0.0), None
    off = tensors.largest_difference(found.tensor.double(), wanted)
    return off, factor(found.tensor.double(), wanted) if math.isfinite(off) else None


def tolerance(wanted: Iterable[Tensor], single: Snapshot, clip: float | None) -> float:
    """Return the difference that rounding may cause, and with clipping its epsilon."""
    largest = max((each.abs().max().item() for each in wanted if each.numel()), default=0.0)
    epsilon = 0.0 if clip is None else CLIP_EPSILON / max(single.norm, CLIP_EPSILON)
    return TOLERANCE * max(1.0, largest) + epsilon * largest


def untrained(
    rows_by_rank: Sequence[Mapping[str, Rows]], canonical: Mapping[str, str], dense: Dense
) -> list[tuple[str, list[int]]]:
    """Return the parameters that no rank has, with the missing rows of sharded ones; an empty list means all."""
    stored = defaultdict[str, list[Rows]](list)
    for rows in rows_by_rank:
        for name, each in rows.items():
            stored[canonical[name]].append(each)
    missing = [(name, list[int]()) for name in dense.start if name not in stored]
    for name, parts in stored.items():
        if all(part.dim >= 0 for part in parts):
            indices = {line for part in parts for line in part.indices}
            rest = sorted(set(range(dense.start[name].shape[parts[0].dim])) - indices)
            missing += [(name, rest)] if rest else []
    return missing


# Dropout in a proof: nothing is dropped, and the ranks' random draws are compared along the axes of the mesh.
#
# N ranks cannot draw what one process draws, so no tensor could be compared. What can be checked is which ranks must
# draw equally: those with the same activations (replicated in tensor parallelism), and which must differ: those with
# other samples, or other parts of the activations.

FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LOADED = "scaled_dot_product_attention"


class Draw(NamedTuple):
    """One dropout of one rank's first step."""

    module: str
    turn: int  # earlier draws of this module
    state: int  # of the random generator
    input_hash: int  # checksum of its input


class Draws:
    """Replaces torch's dropouts; `watch` records the modules that draw."""

    def __init__(self) -> None:
        self.drawn: list[Draw] = []
        self._inside: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Drop nothing inside the block; the random generator advances as usual."""
        functional: Any = F
        before = {name: getattr(F, name) for name in (*FUNCTIONS, LOADED)}
        for name in FUNCTIONS:
            setattr(functional, name, self._replacement(before[name]))
        setattr(functional, LOADED, self._attention(before[LOADED]))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(functional, name, function)

    def watch(self, model: nn.Module) -> None:
        """Record the draws of this rank's model from now on."""
        self.drawn = []
        for name, module in model.named_modules():
            shown = plain_name(f"{name}.").rstrip(".")
            module.register_forward_pre_hook(lambda *_, shown=shown: self._inside.append(shown))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self._inside.pop()

    def _record(self, inputs: Tensor) -> None:
        name = next((each for each in reversed(self._inside) if each), "the model")
        turn = Counter(each.module for each in self.drawn)[name]
        local = getattr(inputs, "_local_tensor", inputs)
        on_card = local.device.type == "cuda"
        state = torch.cuda.get_rng_state(local.device) if on_card else torch.get_rng_state()
        self.drawn.append(Draw(name, turn, hash_of(state), hash_of(local)))

    def _replacement(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        function = getattr(function, "__wrapped__", function)  # without other observers

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001
            if training and p > 0:
                self._record(input)
                function(input.detach(), p, True)  # advances the generator
            return input

        return dropout

    def _attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            *args: Any, **named: Any,
        ) -> Tensor:  # fmt: skip
            if dropout_p > 0:
                self._record(query)
                torch.rand(1, device=query.device)  # advances the generator
            return function(query, key, value, attn_mask, 0.0, *args, **named)

        return attention


def wrong_draws(
    by_rank: Sequence[Sequence[Draw]], neighbours: Callable[[int], Mapping[str, Sequence[int]]]
) -> Iterator[tuple[str, list[int]]]:
    """Yield a sentence per axis along which ranks draw equally or differently by mistake, with these ranks."""
    faults: dict[str, tuple[str, list[int], list[str]]] = {}
    by_dropout = [{(each.module, each.turn): each for each in draws} for draws in by_rank]
    for rank, draws in enumerate(by_dropout):
        sides = [(axis, other) for axis, ranks in neighbours(rank).items() for other in ranks if other > rank]
        for axis, other in sides:
            for dropout in [each for each in draws if each in by_dropout[other]]:
                if fault := fault_of(axis, draws[dropout], by_dropout[other][dropout]):
                    faults.setdefault(axis, (fault, [rank, other], []))[2].append(dropout[0])
    for axis, (fault, ranks, modules) in faults.items():
        others = len(set(modules)) - 1
        which = f"dropout {modules[0]}" + (f" and {others} more" if others else "")
        yield f"{which} on {name_ranks(ranks)}, neighbours along {axis}: {fault}", ranks


def fault_of(axis: str, one: Draw, two: Draw) -> str:
    same_draw, same_input = one.state == two.state, one.input_hash == two.input_hash
    if axis == "dp":
        return "they draw the same random numbers for different samples; give each its own seed" if same_draw else ""
    if same_input and not same_draw:
        return "they draw different random numbers for the same activations, so they diverge; give them one seed"
    if same_draw and not same_input:
        return "they draw the same random numbers for different parts of the activations; give each its own seed"
    return ""


# The first wrong module of the forward pass: its input equals one process's, but its output does not.
#
# It is searched only if there is a difference, on each rank's first microbatch. A sharded module has inputs or outputs
# of another shape, which are not compared; the module that combines the parts is.


class ModuleCall(NamedTuple):
    """The first call of a module."""

    kind: str
    input: Tensor | None
    output: Tensor | None


class Passes:
    """The first call of each module of a model, in the order of their ends."""

    def __init__(self) -> None:
        self.calls: dict[str, ModuleCall] = {}

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        names = [(plain_name(f"{name}.").rstrip("."), module) for name, module in model.named_modules()]
        hooks = [module.register_forward_hook(partial(self._record, name)) for name, module in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if name and name not in self.calls:
            first = inputs[0] if isinstance(inputs, tuple) and inputs else None
            self.calls[name] = ModuleCall(type(module).__name__, copied(first), copied(output))


def copied(value: Any) -> Tensor | None:
    """Return a copy of a plain tensor; None for anything else, also DTensors."""
    plain = isinstance(value, Tensor) and not hasattr(value, "full_tensor")
    return value.detach().clone() if plain else None


def first_wrong_module(file: UserFile, passes: Passes, microbatch: Microbatch) -> str:
    """Return a sentence on the first module that differs from one process's, on this rank; empty if none does."""
    model = file.model(file.config.seed)
    expected = Passes()
    with expected.watched(model), torch.no_grad():
        file.loss(model, microbatch.inputs, microbatch.targets)
    for name, call in passes.calls.items():
        wanted = expected.calls.get(name)
        if wanted is None or differs(call.input, wanted.input) or not differs(call.output, wanted.output):
            continue
        assert call.output is not None
        assert wanted.output is not None
        error = how_wrong(call.output - wanted.output, wanted.output, model.get_submodule(name), name)
        return f"the output of {name} ({call.kind}) is {error}"
    return ""


def differs(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or not one.is_floating_point():
        return False
    return not torch.allclose(one, other, rtol=NEAR, atol=NEAR * max(other.abs().max().item(), 1e-12))


def how_wrong(difference: Tensor, wanted: Tensor, module: nn.Module, name: str) -> str:
    """Describe the excess of an output, or the factor by which it is wrong."""
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 1 and parameter.shape[0] == difference.shape[-1]:
            times = factor(difference, parameter.detach().expand_as(difference))
            if times is not None:
                return f"one process's plus {times:.4g} x {name}.{own}"
    times = factor(difference + wanted, wanted)
    return f"{times:.4g} x one process's" if times is not None else f"off by up to {difference.abs().max():.2g}"
