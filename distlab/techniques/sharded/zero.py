"""ZeRO: data parallelism in which no rank keeps what another keeps too (Rajbhandari et al. 2020, sections 5 and 7).

A step of Adam in float32 needs 16 bytes a parameter: 4 the weight, 4 the gradient, 8 the optimizer's two moments; and
in plain data parallelism every rank holds them all. Each stage gives up one more copy, layer by layer, in flat units
(flat_parameter.py):

    stage 1   optimizer state only for the rank's own part: the gradients are reduce-scattered, each rank steps its part
              of the weights, and they are gathered. 2(N-1)/N·S bytes a step, as an all_reduce: it is the same two
              halves
    stage 2   and of the gradients only the part: each unit's are summed and dropped as the backward pass hands them
              over
    stage 3   and of the weights: a unit is gathered just before it computes, forward and backward, and freed after.
              3(N-1)/N·S, or 2(N-1)/N·S if it stays gathered in between

`Unshard` says how weights come and go, `ReduceScatterScheduler` how gradients are summed; `Zero` says when.
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

# Whole weights, just in time: a unit is unsharded when its layer is about to compute, and resharded when it has.
#
# A gather that is begun one layer ahead costs no waiting where the link is free while the cores compute; one further
# ahead would hold one layer more (`LAB_RESHARD=0` holds them all). ZeRO-1 and -2 keep their weights, and gather them
# after each step.


class Unshard:
    """The whole weights of `units`, of which every rank has a chunk; all ranks make the same calls in order."""

    def __init__(self, units: Sequence[FlatParameter], collective: Collective) -> None:
        self.units, self.collective = units, collective
        self.there = [False] * len(units)  # or on its way
        self._pending: dict[int, Pending] = {}

    def need(self, index: int) -> None:
        """Return once the weights of unit `index` are whole."""
        self.begin(index)
        pending = self._pending.pop(index, None)
        if pending is not None:
            with phase("wait", self.units[index].label):
                pending.wait()

    def begin(self, index: int) -> None:
        """Begin to gather the unit, if it is not there yet."""
        if self.there[index]:
            return
        unit = self.units[index]
        with phase("all_gather", unit.label):
            self._pending[index] = self.collective.all_gather(unit.materialize(), unit.local, async_op=True)
        self.there[index] = True

    def reshard(self, index: int) -> None:
        """Let the unit's weights go; this rank's chunk stays."""
        self.units[index].free()
        self.there[index] = False

    def again(self) -> None:
        """Gather all units, which have kept their memory, at once."""
        with phase("all_gather"):
            pending = [self.collective.all_gather(unit.whole, unit.local, async_op=True) for unit in self.units]
        with phase("wait"):
            for each in pending:
                each.wait()


# Gradients, summed as they come: a unit's sum is begun when its last gradient is there, while the backward pass goes
# on.
#
# Each rank gets its chunk of the sum, and the rest can go. How many are held at once is the whole point: with no
# bound ZeRO-2 would hold all gradients, and peak above ZeRO-1. One sum is under way at a time; where it moves without
# the processor's help (NCCL) the next unit's gradients are collected meanwhile. Over gloo the ranks' cores do the
# sending: there a second vector costs memory, 5 % of the peak that `python -m benchmarks.ledgers` prints for 4 ranks.


class Sum(NamedTuple):
    """A unit's gradients on their way."""

    unit: FlatParameter
    flat: Tensor  # [N·c], this rank's chunk of it becomes the sum
    keeps_flat: bool
    pending: Pending


class ReduceScatterScheduler:
    """The sums of a step; all ranks begin the same ones in the same order."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.under_way: Sum | None = None

    def make_room(self) -> None:
        """Before another unit's gradients are collected."""
        if not self.collective.peers.batched:
            self.finish()

    def begin(self, unit: FlatParameter, flat: Tensor, *, keeps_flat: bool) -> None:
        """Begin to sum the unit's `flat` gradients [N·c]; `keeps_flat`: the vector stays, and with it this rank's
        part."""
        self.finish()
        own = flat[unit.rank * unit.chunk :][: unit.chunk]
        with phase("reduce_scatter", unit.label):
            pending = self.collective.reduce_scatter(own, flat, async_op=True)
        self.under_way = Sum(unit, flat, keeps_flat, pending)

    def finish(self) -> None:
        """Wait for what is under way, and add it to what earlier microbatches left."""
        if self.under_way is None:
            return
        (unit, flat, keeps_flat, pending), self.under_way = self.under_way, None
        with phase("wait", unit.label):
            pending.wait()
        unit.add_gradient(flat[unit.rank * unit.chunk :][: unit.length], keeps=keeps_flat)
        self.collective.peers.memory.release()  # (N-1)/N of a unit, which would stand beside the next one's weights


class FlatGradient(NamedTuple):
    """A unit's gradients in one vector."""

    whole: Tensor  # [N·c]
    places: list[Tensor]  # of each parameter, views of it


class Zero(FlatUnits):
    """The parameters of `layers`, sharded over `group` in `stage` 1, 2 or 3; a step goes as `FlatUnits` says.

    A unit of two layers stays gathered from its first use to its last. The layers run in their order. Gradients are
    summed, never divided.

    Args: reshard: free a unit after its forward pass; False gathers once a step and holds everything in between. Stage
        3 alone.
    """

    unshard_class, summed_class = Unshard, ReduceScatterScheduler

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, stage: int, *,
        reshard: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, layers, group, keeps_whole=stage < 3)
        self.stage, self.reshard = stage, reshard
        self.unshard = self.unshard_class(self.units, self.collective)
        self.summed = self.summed_class(self.collective)
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
        """Around forward and backward of a microbatch. Stage 1, which has room, sums after the last one alone."""
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
        """After the optimizer's step, or a load: every rank gets the others' weights, in stage 3 when needed."""
        super().publish()
        if self.stage < 3:
            self.unshard.again()

    # --- what happens in the passes ---

    def _watch_layer(self, layer: nn.Module, place: int) -> None:
        """Hear of a layer before and after it runs.

        By a weak reference: torch keeps hooks where Python's garbage collector does not look, and a cycle would never
        be freed.
        """
        zero = weakref.proxy(self)
        layer.register_forward_pre_hook(lambda *_: zero._before_forward(place))
        layer.register_forward_hook(lambda _layer, _inputs, output: zero._after_forward(place, output))

    def _before_forward(self, place: int) -> None:
        self.unshard.need(self.unit_of[place])
        if not self._in_backward:  # where a layer is computed again, the one before it comes next
            self._begin(place + 1)

    def _after_forward(self, place: int, output: Tensor) -> None:
        if self._in_backward:
            return
        if output.requires_grad:  # the output's gradient comes just before the layer's own
            zero = weakref.proxy(self)
            output.register_hook(lambda _gradient: zero._before_backward(place))
        if self.reshard and self.unit_of[place] not in self._shared:
            self.unshard.reshard(self.unit_of[place])

    def _before_backward(self, place: int) -> None:
        self._in_backward = True
        self.unshard.need(self.unit_of[place])
        self._begin(place - 1)

    def _begin(self, place: int) -> None:
        """Gather ahead what the layer in this place needs, if there is one."""
        if 0 <= place < len(self.unit_of):
            self.unshard.begin(self.unit_of[place])

    def _watch_gradients(self) -> None:
        """Hear of every gradient once it is accumulated."""
        for index, unit in enumerate(self.units):
            for place, (name, parameter) in enumerate(unit.named.items()):
                parameter.register_post_accumulate_grad_hook(partial(_take, weakref.proxy(self), index, place, name))

    def _take_gradient(self, index: int, place: int, name: str, parameter: Tensor) -> None:
        """Move a fresh gradient to its place in the unit's flat one; the last of a unit begins the sum."""
        view = self._flat_gradient(index).places[place]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view if self.stage == 1 else None
        self._missing[index].discard(name)
        if not self._missing[index]:
            self._complete(index)

    def _flat_gradient(self, index: int) -> FlatGradient:
        """Where the unit's gradients are collected; from stage 2 on only until they are summed."""
        if index not in self._gradients:
            unit = self.units[index]
            self.summed.make_room()
            whole = unit.whole.new_empty(unit.num_ranks * unit.chunk)
            whole[unit.numel :] = 0
            self._gradients[index] = FlatGradient(whole, unit.views(whole))
        return self._gradients[index]

    @torch.no_grad()
    def _complete(self, index: int) -> None:
        """All gradients that this microbatch gives the unit are there: sum them, and in stage 3 let the weights go."""
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


def _take(zero: Zero, index: int, place: int, name: str, parameter: Tensor) -> None:
    zero._take_gradient(index, place, name, parameter)
