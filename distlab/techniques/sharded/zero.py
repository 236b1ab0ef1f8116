"""ZeRO: data parallelism in which no rank keeps what another keeps too (Rajbhandari et al. 2020, sections 5 and 7).

A step of Adam in float32 needs 16 bytes per parameter: 4 the weight, 4 the gradient, 8 the optimizer's two moments; and
in plain data parallelism every rank holds them all. Each stage gives up one more copy, layer by layer, in flat units
(flat_parameter.py):

    stage 1   each rank keeps optimizer state for its own part only: gradients are reduce-scattered, each rank steps its
              part of the weights, and the weights are gathered. It sends 2(N-1)/N·S bytes per step, as an all_reduce,
              which has the same two halves
    stage 2   each rank keeps only its part of the gradients, too: a unit's gradients are summed during the backward
              pass, and dropped
    stage 3   each rank keeps only its part of the weights, too: a unit is gathered just before it computes, forward and
              backward, and freed after. It sends 3(N-1)/N·S, or 2(N-1)/N·S if units stay gathered in between

`Zero` decides in the passes when a unit is gathered, freed and summed. Below it, `Unshard` gathers and frees weights,
and `ReduceScatterScheduler` sums gradients.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Pending
from distlab.techniques.sharded.flat_parameter import FlatParameter, FlatUnits


class FlatGradient(NamedTuple):
    """A unit's gradients in one vector."""

    whole: Tensor  # [N·c]
    places: list[Tensor]  # of each parameter, views of it


class Zero(FlatUnits):
    """The parameters of `layers`, sharded over `group` in `stage` 1, 2 or 3; `FlatUnits` shows a step.

    The layers run in their order. A unit of two layers stays gathered from its first use to its last. Gradients are
    summed, never divided.

    Args:
        reshard: in stage 3, free a unit after its forward pass; False gathers it once per step and keeps it.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, stage: int, *,
        reshard: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, layers, group, keeps_whole=stage < 3)
        self.stage, self.reshard = stage, reshard
        self.unshard = Unshard(self.units, self.collective)
        self.summed = ReduceScatterScheduler(self.collective)
        self._shared = {index for index in self.unit_of if self.unit_of.count(index) > 1}
        self._gradients: dict[int, FlatGradient] = {}  # by unit, as they are collected
        self._missing: list[set[str]] = []  # of each unit: parameters without a gradient in this microbatch
        self._in_backward = self._last = False
        self._watch_gradients()
        if stage == 3:
            for place, layer in enumerate(layers):
                self._watch_layer(layer, place)

    # --- one step ---

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Surround forward and backward of a microbatch. Stage 1 keeps all gradients, and sums after the last one."""
        self._last = last
        self._missing = [set(unit.named) for unit in self.units]
        try:
            yield
        finally:
            self._in_backward = False
        for index, missing in reversed(list(enumerate(self._missing))):
            if missing:  # the loss did not reach them here, but may have on another rank
                self._complete(index)

    def finish(self) -> None:
        """Wait for the last sums."""
        self.summed.finish()

    def publish(self) -> None:
        """After the optimizer's step, or a load: gather all weights; in stage 3 each unit when it is needed."""
        super().publish()
        if self.stage < 3:
            self.unshard.gather_all()

    # --- what happens in the passes ---

    def _watch_layer(self, layer: nn.Module, place: int) -> None:
        """Call back before and after the layer runs.

        The hooks hold a weak reference: Python's garbage collector does not see torch's hooks, so it would never free
        a cycle through one.
        """
        zero = weakref.proxy(self)
        layer.register_forward_pre_hook(lambda *_: zero._before_forward(place))
        layer.register_forward_hook(lambda _layer, _inputs, output: zero._after_forward(place, output))

    def _before_forward(self, place: int) -> None:
        self.unshard.wait_for(self.unit_of[place])
        if not self._in_backward:  # when a layer is computed again, the one before it is next
            self._gather_ahead(place + 1)

    def _after_forward(self, place: int, output: Tensor) -> None:
        if self._in_backward:
            return
        if output.requires_grad:  # the gradient of the output is computed just before the layer's own
            zero = weakref.proxy(self)
            output.register_hook(lambda _gradient: zero._before_backward(place))
        if self.reshard and self.unit_of[place] not in self._shared:
            self.unshard.reshard(self.unit_of[place])

    def _before_backward(self, place: int) -> None:
        self._in_backward = True
        self.unshard.wait_for(self.unit_of[place])
        self._gather_ahead(place - 1)

    def _gather_ahead(self, place: int) -> None:
        """Begin to gather the unit of the layer in this place, if there is one."""
        if 0 <= place < len(self.unit_of):
            self.unshard.begin(self.unit_of[place])

    def _watch_gradients(self) -> None:
        """Call back for every gradient once it is accumulated."""
        for index, unit in enumerate(self.units):
            for place, (name, parameter) in enumerate(unit.named.items()):
                parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.proxy(self), index, place, name))

    def _collect_gradient(self, index: int, place: int, name: str, parameter: Tensor) -> None:
        """Move a fresh gradient to its place in the unit's flat one; after the last one, begin the sum."""
        view = self._flat_gradient(index).places[place]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view if self.stage == 1 else None
        self._missing[index].discard(name)
        if not self._missing[index]:
            self._complete(index)

    def _flat_gradient(self, index: int) -> FlatGradient:
        """Return the vector that collects the unit's gradients; from stage 2 on it lives until they are summed."""
        if index not in self._gradients:
            unit = self.units[index]
            self.summed.make_room()
            whole = unit.whole.new_empty(unit.num_ranks * unit.chunk)
            whole[unit.numel :] = 0
            self._gradients[index] = FlatGradient(whole, unit.views(whole))
        return self._gradients[index]

    @torch.no_grad()
    def _complete(self, index: int) -> None:
        """Sum the unit's gradients, which are all there, and in stage 3 free its weights."""
        unit, flat = self.units[index], self._flat_gradient(index)
        for (name, parameter), place in zip(unit.named.items(), flat.places, strict=True):
            if name in self._missing[index] and parameter.grad is None:
                place.zero_()
        self._missing[index] = set()
        if self.stage > 1 or self._last:
            self.summed.begin(unit, flat.whole, keeps_flat=self.stage == 1)
        if self.stage > 1:
            del self._gradients[index]
        if self.stage == 3:
            self.unshard.reshard(index)


def _collect(zero: Zero, index: int, place: int, name: str, parameter: Tensor) -> None:
    zero._collect_gradient(index, place, name, parameter)


# Gather a unit's weights just before its layer computes, and free them after.
#
# A gather that begins one layer ahead costs no waiting where the link is free while the cores compute. Beginning two
# layers ahead would hold one more layer (`LAB_RESHARD=0` holds all). ZeRO-1 and -2 keep their weights, and gather them
# after each step.


class Unshard:
    """Gathers and frees the weights of `units`, of which every rank has a chunk; all ranks make the same calls."""

    def __init__(self, units: Sequence[FlatParameter], collective: Collective) -> None:
        self.units, self.collective = units, collective
        self.gathered = [False] * len(units)  # or being gathered
        self._pending: dict[int, Pending] = {}

    def wait_for(self, index: int) -> None:
        """Return once the weights of unit `index` are whole."""
        self.begin(index)
        pending = self._pending.pop(index, None)
        if pending is not None:
            with phase("wait", self.units[index].label):
                pending.wait()

    def begin(self, index: int) -> None:
        """Begin to gather the unit, if it is not gathered yet."""
        if self.gathered[index]:
            return
        unit = self.units[index]
        with phase("all_gather", unit.label):
            self._pending[index] = self.collective.all_gather(unit.materialize(), unit.local, async_op=True)
        self.gathered[index] = True

    def reshard(self, index: int) -> None:
        """Free the unit's weights; this rank's chunk stays."""
        self.units[index].free()
        self.gathered[index] = False

    def gather_all(self) -> None:
        """Gather all units, which have kept their memory, at once."""
        with phase("all_gather"):
            pending = [self.collective.all_gather(unit.whole, unit.local, async_op=True) for unit in self.units]
        with phase("wait"):
            for each in pending:
                each.wait()


# Sum gradients during the backward pass: a unit's sum begins when its last gradient is computed.
#
# Each rank gets its chunk of the sum, and the rest is freed. The number of sums under way is bounded: without a bound
# ZeRO-2 would hold all gradients, and peak above ZeRO-1. One sum is under way at a time; where it runs without the
# processor (NCCL), the next unit's gradients are collected meanwhile. Over gloo the ranks' cores send: there a second
# vector costs memory, 5 % of the peak that `python -m benchmarks.ledgers` prints for 4 ranks.


class Sum(NamedTuple):
    """The sum of a unit's gradients, under way."""

    unit: FlatParameter
    flat: Tensor  # [N·c], this rank's chunk of it becomes the sum
    keeps_flat: bool
    pending: Pending


class ReduceScatterScheduler:
    """Sums the gradients of a step, unit by unit; all ranks begin the same sums in the same order."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.under_way: Sum | None = None

    def make_room(self) -> None:
        """Wait for the sum under way where it has to end before the next unit's gradients are collected."""
        if not self.collective.peers.batched:
            self.finish()

    def begin(self, unit: FlatParameter, flat: Tensor, *, keeps_flat: bool) -> None:
        """Begin to sum the unit's `flat` gradients [N·c]; with `keeps_flat` the vector and the sum in it are kept."""
        self.finish()
        own = flat[unit.rank * unit.chunk :][: unit.chunk]
        with phase("reduce_scatter", unit.label):
            pending = self.collective.reduce_scatter(own, flat, async_op=True)
        self.under_way = Sum(unit, flat, keeps_flat, pending)

    def finish(self) -> None:
        """Wait for the sum under way, and add it to the sums of earlier microbatches."""
        if self.under_way is None:
            return
        (unit, flat, keeps_flat, pending), self.under_way = self.under_way, None
        with phase("wait", unit.label):
            pending.wait()
        unit.add_gradient(flat[unit.rank * unit.chunk :][: unit.length], keeps=keeps_flat)
        self.collective.peers.memory.release()  # (N-1)/N of a unit, which would stand beside the next one's weights
