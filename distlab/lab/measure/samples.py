"""Sample numbers from a step's messages, before and after each, with the module that made the call.

    watch = Samples(strategy.layers, allowed_bytes)
    messages = Messages(watch)

Inputs are copied when a call begins, and outputs after its wait, before the program continues. Whole tensors are
copied, since the sampled positions are chosen after the step (`place_of`), when every rank has the same result to
choose by. This costs a pass over the memory that the call sends, and stops at `allowed_bytes`.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.measure.traffic import tensors_in

SHOWN = 3  # numbers in a sample
FAINT = 1e-3  # of the largest number; smaller ones would be printed as zeros

# The position of the input in a c10d operation's arguments, if it is not also the output, the first one.
BACKWARD = ("backward", "input", "weight")
SEPARATE_INPUT = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")


class Stretch(NamedTuple):
    """A tensor's position in its storage."""

    storage: tuple[int, int]  # its key, and its bytes: reallocated memory usually has others
    offset: int  # in numbers
    numel: int


@dataclass(frozen=True)
class Copies:
    """The numbers of several tensors and their positions; without numbers beyond the allowed bytes."""

    numbers: Tensor | None
    stretches: list[Stretch]

    def at(self, place: int) -> list[float]:
        """Return SHOWN numbers from a position on."""
        return [] if self.numbers is None or place < 0 else self.numbers[place : place + SHOWN].tolist()


@dataclass(eq=False)
class Sample:
    """The contents of one call on this rank."""

    op: str
    inside: str  # the module in whose forward or backward pass it was made: "1.attention", empty outside of any
    backward: bool
    shape: tuple[int, ...]  # of the first input
    inputs: "Copies"
    results: list[Tensor]  # outputs, until they are copied
    ranks: tuple[int, ...]  # of the group; of a send or receive its source and destination
    tag: int
    label: str  # of the phase around it
    start_s: float  # of `time.perf_counter`
    outputs: "Copies | None" = None
    kept: Tensor | None = None  # the part that was not sent
    calls: list[int] = field(default_factory=list)  # its messages, by their number in the step
    wait_s: tuple[float, float] | None = None  # of `time.perf_counter`
    turn: int = 0  # its number among the step's events
    at_once: bool = False  # whether the wait came before any other event


class Samples:
    """The samples of one step in order of their begin: one per call, and one per hand-written collective in place
    of its sends and receives."""

    def __init__(self, layers: Mapping[int, nn.Module], allowed_bytes: int) -> None:
        self.found: list[Sample] = []
        self._layers, self._allowed_bytes = layers, allowed_bytes
        self._stack: list[str] = []  # of modules whose forward pass runs, the outermost first
        self._backward_module = ""  # the module whose output autograd reached last
        self._works: list[tuple[Any, Sample]] = []
        self._turn = 0  # counts events
        self._by_hand: list[Sample] = []  # the hand-written collectives that are running
        self.phases: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Track modules and waits inside the block."""
        hooks = [hook for index, layer in self._layers.items() for hook in self._hooked(index, layer)]
        wait = dist.Work.wait

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            start_s, turn = time.perf_counter(), self._turn
            result = wait(work, *args, **kwargs)
            self._on_wait(work, start_s, turn)
            return result

        dist.Work.wait = waited  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()
            for _, sample in self._works:
                self._copy_outputs(sample)
            self._works.clear()
            self._layers = {}

    def _hooked(self, index: int, layer: nn.Module) -> Iterator[Any]:
        for name, module in [("", layer), *layer.named_children()]:
            path = f"{index}.{name}".rstrip(".")
            yield module.register_forward_pre_hook(lambda *_, path=path: self._enter(path))
            yield module.register_forward_hook(lambda _, __, output, path=path: self._leave(path, output))

    def _enter(self, path: str) -> None:
        self._stack.append(path)
        self._turn += 1

    def _leave(self, path: str, output: Any) -> None:
        self._turn += 1
        while self._stack and self._stack.pop() != path:  # modules that an exception left ran no hook
            pass
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._on_backward(path))

    def _on_backward(self, path: str) -> None:
        self._backward_module = path
        self._turn += 1

    def on_phase(self, phases: list[str]) -> None:
        """Record that a phase begins or ends; these are open now, the outermost first."""
        self._turn += 1
        self.phases = phases

    def begin(self, number: int, message: Any, args: Sequence[Any]) -> Sample | None:
        """Begin message `number` of the step, with its c10d operation's arguments; None if it belongs to a
        hand-written collective."""
        if self._by_hand:
            self._by_hand[-1].calls.append(number)
            return None
        op = message.op
        inputs = list(tensors_in(args[1] if op in SEPARATE_INPUT else args[0])) if op != "recv" else []
        sample = self._sample(op, inputs, [] if op == "send" else list(tensors_in(args[0])), message.ranks, message.tag)
        sample.calls.append(number)
        return sample

    def _sample(
        self, op: str, inputs: Sequence[Tensor], results: list[Tensor], ranks: tuple[int, ...], tag: int = 0
    ) -> Sample:
        backward = any(each.split()[0] in BACKWARD for each in self.phases)
        inside = self._stack[-1] if self._stack else self._backward_module if backward else ""
        shape = tuple((inputs or results)[0].shape) if inputs or results else ()
        label = self.phases[-1].partition(" ")[2] if self.phases else ""
        sample = Sample(
            op, inside, backward, shape, self._copied(inputs), results, ranks, tag, label, time.perf_counter()
        )
        self.found.append(sample)
        self._turn = sample.turn = self._turn + 1
        return sample

    def by_hand(
        self, op: str, ranks: Sequence[int], inputs: Tensor, result: Tensor, steps: Generator[Any, None, None],
        kept: Tensor | None = None,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Run the `steps` of a hand-written collective, which owns the sends between them. `kept` is what this
        rank does not send."""
        sample = self._sample(op, [inputs], [result], tuple(ranks))
        sample.kept = None if kept is None else kept.detach().reshape(-1).clone()
        begun = False
        while True:
            if begun and sample.wait_s is None:
                sample.wait_s, sample.at_once = (time.perf_counter(),) * 2, sample.turn == self._turn
            self._by_hand.append(sample)
            try:
                message = next(steps, None)
            finally:
                self._by_hand.pop()
            if message is None:
                break
            begun = True
            yield message
        self._copy_outputs(sample)
        if sample.wait_s is not None:
            sample.wait_s = (sample.wait_s[0], time.perf_counter())
        self._turn += 1

    def launched(self, sample: Sample, work: Any) -> None:
        """Record the work object that the call returned."""
        self._works.append((work, sample))

    def ended(self, work: Any) -> None:
        """Record that the call is done."""
        for index, (mine, sample) in enumerate(self._works):
            if mine is work:
                self._copy_outputs(sample)
                del self._works[index]
                return

    def _on_wait(self, work: Any, start_s: float, turn: int) -> None:
        for mine, sample in self._works:
            if mine is work:
                sample.wait_s = (start_s, time.perf_counter())
                sample.at_once = sample.turn == turn
        self.ended(work)
        self._turn += 1

    def _copy_outputs(self, sample: Sample) -> None:
        sample.outputs, sample.results = self._copied(sample.results), []

    def _copied(self, tensors: Sequence[Tensor]) -> Copies:
        nbytes = sum(each.numel() * each.element_size() for each in tensors)
        stretches = [stretch_of(each) for each in tensors]
        if not tensors or nbytes > self._allowed_bytes or any(each.is_complex() for each in tensors):
            return Copies(None, stretches)
        self._allowed_bytes -= nbytes
        return Copies(torch.cat([each.detach().reshape(-1) for each in tensors]), stretches)


def stretch_of(tensor: Tensor) -> Stretch:
    """Return its position in its storage; of a DTensor its local part's."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    storage = local.untyped_storage()
    return Stretch((int(storage._cdata), storage.nbytes()), int(local.storage_offset()), local.numel())


# The sampled numbers: the same positions on every rank, and never numbers that are 0 or 1 by construction, such as the
# gradient of an embedding's row that no sample has, or a norm's weights.


def place_of(values: Tensor, start: int = 0, length: int | None = None) -> int:
    """Return the first position in `values` [n], within `length` from `start`, with SHOWN informative numbers."""
    part = values[start : None if length is None else start + length].float()
    if part.numel() == 0:
        return start
    size = part.abs()
    finite = size.isfinite()
    informative = finite & (part != 1) & (size > FAINT * size[finite].max().item() if finite.any() else False)
    for wanted in range(min(SHOWN, part.numel()), 0, -1):
        together = informative.unfold(0, wanted, 1).all(1)
        if together.any():
            return start + min(int(together.int().argmax()), max(0, part.numel() - SHOWN))
    return start
