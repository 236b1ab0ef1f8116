"""The counted pass: the bytes that a step of a variant sends and stores.

It runs one step after two warm-up steps, with one variant alive at a time, under the ledger and the memory meters,
whose cost the timed pass does not have. If a strategy's steps differ, it declares after how many they repeat
(`repeats_after`), and so many are counted.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.contract import Build, Counted, Strategy
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.measure.memory import MemoryLedger
from distlab.lab.measure.prediction import Prediction
from distlab.lab.measure.storages import SavedActivations, Storages, label_before
from distlab.lab.measure.traffic import Traffic
from distlab.lab.report import records
from distlab.lab.report.units import counted
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.phases import listening
from distlab.techniques.pipeline_parallel.costs import in_flight
from distlab.techniques.sharded.costs import PassEvent, shown_on

WARMUP_STEPS = 2  # DDP rebuilds its buckets after the first step
COUNTED_STEPS = WARMUP_STEPS + 1  # of a variant whose steps are equal


def count(lab: Lab, variants: Mapping[str, Build]) -> dict[str, Counted]:
    """Count the bytes that a step of each variant sends, and its peak memory, with one variant alive at a time."""
    dtype = getattr(torch, lab.config.dtype)
    batches = lab.batches(dtype)
    counted = {}
    again = {each.name for each in lab.mode.variants if lab.config.recompute and each.recomputes and not each.by_torch}
    for number, (name, build) in enumerate(variants.items()):
        lab.at(0, f"count of {name}")
        if number == 0 and lab.config.backend == "nccl":
            # The group's next call frees what PyTorch's variants sent: 77 MB of DDP's on an H200.
            train(lab, build(lab.model(dtype), lab.mesh, lab.config.untimed()), batches, range(1))
        gc.collect()  # torch's optimizers have reference cycles, and would keep the last pass's memory
        with MemoryLedger(lab.device) as memory:
            strategy = build(lab.model(dtype), lab.mesh, lab.config.untimed())
            train(lab, strategy, batches, range(WARMUP_STEPS))
            steps = repeats_after(strategy)
            order, passes = Order(getattr(strategy, "layers", {})), Passes(getattr(strategy, "layers", {}))
            with (
                lab.count() as traffic,
                SavedActivations(memory.saves) as activations,
                memory.step(order),
                listening(order.mark),
                passes.watched(),
            ):
                train(lab, strategy, batches, range(WARMUP_STEPS, WARMUP_STEPS + steps))
            del strategy
        counted[name] = Counted(
            traffic.per(steps), activations.peak_bytes, memory.rest, memory.peak, order, most=memory.most
        )  # fmt: skip
        write_traffic(lab, name, counted[name].traffic)
        if name in again:
            check_passes(lab, name, passes)
        lab.journal.write(records.Activations(name, activations.peak_bytes))
        write_memory(lab, name, memory)
        lab.work.advance(COUNTED_STEPS)
    return counted


def repeats_after(strategy: Strategy) -> int:
    """Return after how many steps its calls repeat; if they never do, how many are counted."""
    steps: int = getattr(strategy, "repeats_after", 1)
    return max(1, steps)


def ever_repeats(strategy: Strategy) -> bool:
    """Return whether its calls ever repeat."""
    return getattr(strategy, "repeats_after", 1) > 0


def write_memory(lab: Lab, name: str, memory: MemoryLedger) -> None:
    """Write the tensors' bytes, and those that process and container count, which include more."""
    lab.journal.write(records.Memory(name, memory.peak_bytes))
    lab.journal.write(records.Classes(name, memory.rest, memory.peak))
    lab.journal.write(records.MemoryLine(name, memory.step_s, memory.line()))
    for comparison, (counted_bytes, seen) in memory.compared_with_system().items():
        lab.compare(
            comparison, counted_bytes, seen, variant=name, formula="bytes of tensors", shown="counts more than tensors"
        )


def train(lab: Lab, strategy: Strategy, batches: Batches, steps: range) -> None:
    for step in steps:
        strategy.backward(lab.microbatches(batches, step))
        strategy.update()


def write_traffic(lab: Lab, name: str, traffic: Traffic) -> None:
    for call in traffic.called:
        lab.journal.write(records.Called(name, call.op, call.axis, call.calls, call.raw_bytes, call.called_bytes))
    for peer, wire in traffic.wire.items():
        lab.journal.write(records.Wire(name, peer, wire.sent, wire.retransmitted))
    if traffic.wire_error is not None:
        lab.say(traffic.wire_error, heading="no wire")


# Memory of a model's layers alone: one process's passes over this rank's samples, without a strategy.
#
# Activations are hard to predict by formula: torch decides which tensors an operation saves. So they are counted where
# nothing is split, gathered or scheduled, and the effect of a strategy is predicted on top
# (distlab/techniques/sharded/costs.py).

ACTIVATIONS_CONTROL = "tests/experiments/test_orders.py::test_missing_recomputation_fails_the_run"


class Saved(NamedTuple):
    """Bytes that a forward pass saves for its backward pass."""

    all_bytes: int
    linear_bytes: int  # the part in inputs of linear layers, for their weights' gradients


def saved_bytes(lab: Lab, run: range, microbatch: Microbatch) -> int:
    """Return the bytes that a forward pass of `microbatch` through the layers `run` saves for its backward pass."""
    return saved(lab, run, microbatch).all_bytes


def saved(lab: Lab, run: range, microbatch: Microbatch) -> Saved:
    """Return the same by kind, after the last layer with the loss; the input of the first layer is made up."""
    dtype = getattr(torch, lab.config.dtype)
    model = lab.model(dtype)
    hidden, targets, share = microbatch
    if run.start:
        shape = (*hidden.shape, lab.config.width) if model.name == "gpt" or is_own(model.name) else hidden.shape
        hidden = torch.zeros(shape, dtype=dtype, device=lab.device).requires_grad_()
    inputs: dict[int, int] = {}  # bytes by storage
    layers = model.layers[run.start : run.stop]
    for linear in (module for layer in layers for module in layer.modules() if type(module) is nn.Linear):
        linear.register_forward_pre_hook(lambda _, args: inputs.update(storage_bytes(args[0])))
    with SavedActivations() as seen:
        for layer in layers:
            hidden = layer(hidden)
        if run.stop == len(model.layers):
            hidden = model.loss(hidden, targets) * share
    return Saved(seen.live_bytes, sum(inputs.values()))


def most_of_a_layer(lab: Lab, assign: Callable[[list[Microbatch]], list[Microbatch]] = list) -> int:
    """The most that one layer leaves for its backward pass, of this rank's largest microbatch."""
    microbatches = assign(lab.microbatches(lab.batches(getattr(torch, lab.config.dtype)), WARMUP_STEPS))
    largest = max(microbatches, key=lambda microbatch: len(microbatch.inputs))
    return max(saved_bytes(lab, range(at, at + 1), largest) for at in range(len(outline(lab.config).layers)))


def checks_recomputed(lab: Lab) -> bool:
    """Return whether layers are recomputed, with known saved bytes: those of a user's model are not known."""
    return lab.config.recompute and not is_own(lab.config.model) and not shown_on(lab.config.device)


def check_recomputed(lab: Lab, name: str, peak_bytes: float, again_bytes: float, layer_bytes: int) -> None:
    """Check that with LAB_RECOMPUTE a step's peak is at most that of a step where every layer keeps only its input
    (`again`), plus the saved bytes of one layer. Other predictions come from the recomputing code itself."""
    bound = again_bytes + layer_bytes
    detail = f"{peak_bytes:.0f} B at the peak, {bound:.0f} allowed if every layer is recomputed"
    lab.check("recomputed peak", max(0.0, peak_bytes - bound), 0, name, detail, control=ACTIVATIONS_CONTROL)


def predicted_peaks(
    lab: Lab,
    measured: Mapping[str, Counted],
    peak_of: Callable[[str, list[PassEvent]], float],
    formula_of: Callable[[str], str],
    *,
    recompute: Mapping[str, bool] | None = None,
    assign: Callable[[list[Microbatch]], list[Microbatch]] = list,
) -> list[Prediction]:
    """Predict each variant's peak on this rank, by `peak_of(name, one process's passes)`; if layers are recomputed,
    check that bound too. Variants in `recompute` recompute all layers or none, whatever LAB_RECOMPUTE says.
    """
    recomputes, found, recompute = checks_recomputed(lab), list[Prediction](), recompute or {}
    whole = outlined(lab, again=True, recompute=False, assign=assign) if recomputes else []
    layer_bytes = most_of_a_layer(lab, assign) if recomputes else 0
    outlines: dict[bool | None, list[PassEvent]] = {}
    for name in [name for name in measured if name not in lab.mode.by_torch]:
        again = recompute.get(name)
        if again not in outlines:
            outlines[again] = outlined(
                lab, again=bool(again), recompute=None if again is None else False, assign=assign
            )
        value = (peak_of(name, outlines[again]),) * lab.world_size
        formula = f"{formula_of(name)} + one process's passes"
        found.append(Prediction(name, "peak bytes", "B", formula, value, 0, shown_on(lab.config.device)))
        if recomputes and again is None:
            check_recomputed(lab, name, sum(measured[name].peak.values()), peak_of(name, whole), layer_bytes)
    return found


def storage_bytes(tensor: Tensor) -> dict[int, int]:
    storage = tensor.untyped_storage()
    return {storage._cdata: storage.nbytes()}


def outlined(
    lab: Lab,
    *,
    again: bool = False,
    recompute: bool | None = None,
    assign: Callable[[list[Microbatch]], list[Microbatch]] = list,
) -> list[PassEvent]:
    """Record a step's passes over this rank's microbatches in one process, which frees each gradient at once.

    again: every layer is recomputed as a whole for its backward pass. recompute: LAB_RECOMPUTE's way, by default as
    set. assign: turns microbatches into those of the strategy.
    """
    dtype = getattr(torch, lab.config.dtype)
    model, batches = lab.model(dtype), lab.batches(dtype)
    model.recompute = model.recompute if recompute is None else recompute
    watch = Watch(lab.device)
    watch.over(enumerate(model.layers), again=again)
    watch.begin()
    with watch.storages:
        microbatches = assign(lab.microbatches(batches, WARMUP_STEPS))
        watch.note("batch")
        for inputs, targets, share in microbatches:
            (model(inputs, targets) * share).backward()
            watch.note("microbatch_end")
    del microbatches
    return watch.events


class Watch:
    """Records events of a model's passes, and the live bytes at each."""

    def __init__(self, device: torch.device) -> None:
        self.storages = Storages(device.type)
        self.events: list[PassEvent] = []

    def begin(self) -> None:
        # Keep existing tensors alive: if one were freed, such as a message in gloo's thread, counts would be negative.
        self._kept = label_before(self.storages)
        self.before = self.storages.live_bytes
        self.storages.peak_bytes = self.before

    def note(self, kind: str, layer: int = -1, name: str = "", numel: int = 0) -> None:
        live, highest = self.storages.live_bytes, self.storages.peak_bytes
        self.events.append(PassEvent(kind, layer, name, numel, highest - self.before, live - self.before))
        self.storages.peak_bytes = live

    def over(self, layers: Iterable[tuple[int, nn.Module]], *, again: bool = False) -> None:
        """Record the passes and gradients of these layers, given by number in the model."""
        seen: set[nn.Parameter] = set()
        for index, layer in layers:
            if again:
                anchor = torch.zeros((), requires_grad=True)  # bytes of text have no gradient, hence no graph
                layer.forward = partial(
                    Again.apply, layer.forward, partial(self.note, "layer_gradients", index), anchor
                )
            layer.register_forward_pre_hook(lambda *_, index=index: self.note("layer", index))
            layer.register_forward_hook(partial(self._layer_end, index))
            for name, parameter in layer.named_parameters():
                if parameter not in seen:
                    self._gradient(parameter, index, f"{index}.{name}")
                seen.add(parameter)

    def _layer_end(self, index: int, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        self.note("layer_end", index)
        if output.requires_grad:
            output.register_hook(lambda _: self.note("output", index))

    def _gradient(self, parameter: nn.Parameter, layer: int, name: str) -> None:
        numel = parameter.numel()

        def dropped(parameter: Tensor) -> None:
            parameter.grad = None
            self.note("delivered", layer, name, numel)

        parameter.register_hook(lambda _: self.note("gradient", layer, name, numel))
        parameter.register_post_accumulate_grad_hook(dropped)


class Again(torch.autograd.Function):
    """A layer that keeps only its input, and is recomputed completely for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Tensor], Tensor], computed: Callable[[], None], _anchor: Tensor, hidden: Tensor
    ) -> Tensor:
        ctx.compute, ctx.computed = compute, computed
        ctx.save_for_backward(hidden)
        return compute(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor | None]:
        hidden = ctx.saved_tensors[0].detach()
        hidden.requires_grad_(hidden.is_floating_point())
        with torch.enable_grad():
            ctx.compute(hidden).backward(gradient)
        ctx.computed()
        return None, None, None, hidden.grad


# Microbatches in flight: the most that a pipeline's rank kept for their backward pass.

IN_FLIGHT_CONTROL = "tests/lab/verify/test_counted.py::test_too_many_in_flight_fail"


def check_in_flight(lab: Lab, name: str, strategy: Any, schedule: str) -> None:
    """Check that no rank keeps more than `schedule` allows; engines that do not count them are not checked."""
    kept, mesh, chunks = strategy.engine.most_in_flight, lab.mesh, len(strategy.parts.stages)
    if kept is None:
        return
    allowed = in_flight(schedule, mesh.size("pp"), lab.config.num_microbatches, mesh.index("pp"), chunks)
    detail = f"at most {counted(kept, 'microbatches')} kept, {allowed} allowed"
    lab.check("in flight", max(0, kept - allowed), 0, name, detail, control=IN_FLIGHT_CONTROL)


# With LAB_RECOMPUTE=1 the backward pass runs each layer again. Predictions come from the same code, so the passes are
# counted independently: by the layers' hooks, and by whether autograd is running.

PASSES_CONTROL = "tests/lab/verify/test_counted.py::test_a_layer_that_is_not_computed_again_is_seen"


class Passes:
    """Counts how often each of `layers` is computed, first and again in a backward pass."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.layers = layers
        self.first: Counter[int] = Counter()
        self.again: Counter[int] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = [layer.register_forward_pre_hook(partial(self._passed, index)) for index, layer in self.layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.layers = {}

    def _passed(self, index: int, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point():
            return  # an embedding, which saves only its input
        (self.again if in_backward() else self.first)[index] += 1

    def missing(self) -> int:
        """Return the number of passes that were not recomputed, or recomputed without need."""
        return sum(abs(self.first[index] - self.again[index]) for index in self.first | self.again)


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def check_passes(lab: Lab, name: str, passes: Passes) -> None:
    detail = f"passes that were not recomputed, of {passes.first.total()} on this rank"
    lab.check("computed again", passes.missing(), 0, variant=name, detail=detail, control=PASSES_CONTROL)
