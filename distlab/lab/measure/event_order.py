"""Record the order of events in a step, independent of clocks.

    begin, end   a phase that a mechanism marks (forward, backward, wait, ...), its microbatch the label; and "layer",
                 the forward pass of one, its number the label
    gradient     autograd has computed the gradient of a parameter, which the label names
    back         the backward pass reaches the output of a layer, its number the label
    call         a collective, a send or a receive begins, on these storages
    held         the storage of weights was allocated or freed: its bytes from then on

Overlap, a schedule and "a layer at a time" are claims about order, so they are checked here: a loaded machine changes
every duration, but not the order. Events come from torch's hooks and dispatcher, except the phases, which the
mechanisms mark; a claim that does not need these marks should not use them.

`Messages` records what is sent in a step, with times, for the timeline.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.measure.samples import Samples
from distlab.lab.measure.traffic import (
    DISPATCH_KEY,
    KEYS_BELOW,
    OPERATIONS,
    RESULT,
    SHAPES,
    Shape,
    nbytes_of,
    sent_by_call,
)  # fmt: skip

RECEIVES = ("c10d::recv_", "c10d::recv_any_source_")


class Event(NamedTuple):
    """One event."""

    what: str  # begin, end, gradient, back, call or held
    name: str  # the phase, or the operation; empty of gradients and storages
    label: str = ""  # the microbatch, the layer's number, or the parameter's name
    nbytes: int = 0  # of a call's tensors, or of the weights from now on
    storages: frozenset[int] = frozenset()  # of a call's tensors, or the one that changes


class Order:
    """The `events` of one step in order; `layers` are this rank's, by their number in the model.

    A parameter's name is "<layer>.<name in the layer>"; a shared one has the name in its first layer.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.layers = layers
        self.events: list[Event] = []
        self.gradients: dict[str, int] = {}  # the storage in which each gradient lies after the step
        self.weights: dict[str, int] = {}  # and each weight
        self._parameters: dict[str, nn.Parameter] = {}
        seen: set[nn.Parameter] = set()
        for index, layer in layers.items():
            for name, parameter in layer.named_parameters():
                if parameter not in seen and parameter.requires_grad:
                    self._parameters[f"{index}.{name}"] = parameter
                    self.weights[f"{index}.{name}"] = key_of(parameter)
                seen.add(parameter)

    def mark(self, what: str, name: str, label: str) -> None:
        self.events.append(Event(what, name, label))

    def called(self, name: str, args: Any, result: Any, tensors: list[Tensor]) -> None:
        """Record a call of torch's operation `name` on `tensors`, except barriers and waits."""
        if name not in OPERATIONS and name not in RECEIVES:
            return
        op, position = OPERATIONS.get(name, ("receive", 0))
        nbytes = nbytes_of(result if position == RESULT else args[position])
        self.events.append(Event("call", op, "", nbytes, frozenset(map(key_of, tensors))))

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.weights.values():
            self.events.append(Event("held", "", "", storage.nbytes(), frozenset({storage._cdata})))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record layers and gradients inside the block, and at its end the gradients' storages."""
        hooks: list[Any] = []
        for index, layer in self.layers.items():
            begin, end = Event("begin", "layer", str(index)), Event("end", "layer", str(index))
            hooks.append(layer.register_forward_pre_hook(lambda *_, event=begin: self.events.append(event)))
            hooks.append(layer.register_forward_hook(lambda *_, event=end: self.events.append(event)))
            hooks.append(layer.register_forward_hook(partial(self._on_output, Event("back", "layer", str(index)))))
        for name, parameter in self._parameters.items():
            event = Event("gradient", "", name)
            hooks.append(parameter.register_hook(lambda _, event=event: self.events.append(event)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        named = self._parameters.items()
        self.gradients = {name: key_of(p.grad) for name, p in named if p.grad is not None}
        self.layers, self._parameters = {}, {}  # so that the strategy can be freed while its order is kept

    def _on_output(self, event: Event, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.events.append(event))

    # --- questions ---

    def where(self, what: str, name: str = "", label: str | None = None) -> list[int]:
        return [
            place
            for place, event in enumerate(self.events)
            if (event.what, event.name) == (what, name) and label in (None, event.label)
        ]

    def within(self, phase: str) -> list[tuple[str, list[Event]]]:
        """Return (label, events inside) of every phase of this name in order; they do not nest."""
        begins, ends = self.where("begin", phase), self.where("end", phase)
        return [
            (self.events[begin].label, self.events[begin + 1 : end]) for begin, end in zip(begins, ends, strict=True)
        ]

    def launches(self, *operations: str) -> dict[int, set[str]]:
        """Return the gradients of each sum, by the position of its first call: those in the storage that it sends."""
        names_in: dict[int, set[str]] = {}
        for name, storage in self.gradients.items():
            names_in.setdefault(storage, set()).add(name)
        found: dict[int, set[str]] = {}
        for place, event in enumerate(self.events):
            if event.what == "call" and event.name in operations:
                for storage in event.storages & set(names_in):
                    found[place] = names_in.pop(storage)
        return found

    def untimely(self, launches: Mapping[int, set[str]]) -> list[int]:
        """Return the positions of sums that began before their gradients were ready, or not immediately.

        Immediately is before autograd produces another gradient, but never before the sums ahead, since all ranks
        must launch in one order.
        """
        written = {event.label: place for place, event in enumerate(self.events) if event.what == "gradient"}
        found, ready = [], -1
        for place, names in launches.items():
            own = max(written.get(name, len(self.events)) for name in names)
            ready = max(ready, own)
            if place < own or any(ready < other < place for other in written.values()):
                found.append(place)
        return found


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage; a DTensor's is that of its local part."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def key_of(tensor: Tensor) -> int:
    return int(storage_of(tensor)._cdata)


# --- messages: every collective, send and receive of a step, and when it began and ended ---
#
# Our kernel is registered at BackendSelect only while recording, since it takes some 10 microseconds per
# call: it sees what DDP's reducer, fully_shard and DTensor send as well as hand-written sends. No event reports the
# end of a call: it is checked with the next call and at each mark of a phase (`record_ends`), so an end is recorded
# late by up to the time between two of these, and never early. The end of a gloo send or receive is known
# after its wait.

LEAST_RANKS = 2  # a group of one sends nothing


class Message(NamedTuple):
    """One call on this rank, with times in seconds of `time.perf_counter`."""

    op: str
    ranks: tuple[int, ...]  # source and destination of a send or receive, else the group; global ranks
    sent_bytes: float  # sent by this rank with the best algorithm (`Calls`); 0 for a receive
    nbytes: int  # of the tensors
    tag: int  # of a send or receive
    start_s: float
    end_s: float


class Messages:
    """`with Messages().recorded() as messages: step()`, then `messages.found`."""

    def __init__(self, samples: Samples | None = None) -> None:
        """`samples` record the messages' contents."""
        self.found: list[Message] = []
        self._samples = samples
        self._phases: list[str] = []
        self._open: list[tuple[int, dist.Work]] = []

    @contextmanager
    def recorded(self) -> Iterator["Messages"]:
        """Record all calls inside the block; open calls end with it."""
        library = torch.library.Library("c10d", "IMPL")
        for name, shape in SHAPES.items():
            pass_on = getattr(torch.ops.c10d, name).default.redispatch
            library.impl(name, self._recording(name, shape, pass_on), DISPATCH_KEY.name, with_keyset=True)
        try:
            yield self
        finally:
            library._destroy()
            self.record_ends()
            self._open.clear()

    def record_ends(self) -> None:
        """Record the end of all calls that are done by now."""
        now, still = time.perf_counter(), []
        for index, work in self._open:
            self.found[index] = self.found[index]._replace(end_s=now)
            if not work.is_completed():
                still.append((index, work))
            elif self._samples is not None:
                self._samples.ended(work)
        self._open = still

    def on_phase(self, what: str, kind: str, label: str) -> None:
        """Record the begin or end of a phase, and which calls are done by now."""
        self.record_ends()
        if what == "begin":
            self._phases.append(f"{kind} {label}".rstrip())
        elif self._phases:
            self._phases.pop()
        if self._samples is not None:
            self._samples.on_phase(self._phases)

    def _recording(self, name: str, shape: Shape, pass_on: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_call(keys: Any, *args: Any) -> Any:
            self.record_ends()
            message = message_of(name, shape, args)
            sample = None
            if message is not None and self._samples is not None:
                sample = self._samples.begin(len(self.found), message, args)
            result = pass_on(keys & KEYS_BELOW, *args)
            if message is not None:
                work = result[-1] if isinstance(result, tuple) else result
                # A process group that is written in Python has the work of its current call in this attribute.
                latest = getattr(dist.ProcessGroup.unbox(args[shape.group]), "latest_work", None)
                handle = latest or dist.Work.unbox(work)
                if sample is not None and self._samples is not None:
                    self._samples.launched(sample, handle)
                self._open.append((len(self.found), handle))
                self.found.append(message)
            return result

        return recorded_call


def message_of(name: str, shape: Shape, args: tuple[Any, ...]) -> Message | None:
    """Describe a call; None for a barrier, and in a group of one."""
    group = dist.ProcessGroup.unbox(args[shape.group])
    if "barrier" in name or group.size() < LEAST_RANKS:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    own, nbytes, now = ranks[group.rank()], nbytes_of(args[shape.compared]), time.perf_counter()
    if shape.op in ("send", "recv"):
        peer = ranks[args[shape.peer]] if shape.peer >= 0 else -1
        pair = (own, peer) if shape.op == "send" else (peer, own)
        return Message(shape.op, pair, float(nbytes if shape.op == "send" else 0), nbytes, args[-1], now, now)
    whole = nbytes if shape.whole is None else nbytes_of(args[shape.whole])
    sent = sent_by_call(shape.op, whole, f"c10d::{name}", args, group)
    return Message(shape.op, ranks, sent, whole, 0, now, now)
