"""Samples: the numbers that a step's messages carried, before and after each, and where in the model each was made.

    watch = Samples(strategy.layers, allowed_bytes)
    messages = Messages(watch)

What goes in is copied when a call begins, and what comes out when it was waited for, before the program goes on. Copies
are of whole tensors, since which places are told is decided after the step (`place_of`), when every rank has the same
result to decide by. They cost a pass over the memory that the call sends, and end where `allowed_bytes` are kept.
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

TOLD = 3  # numbers of a sample
FAINT = 1e-3  # of the largest number: what is smaller would be printed as zeros

# In a c10d operation's arguments: where what goes in stands, if it is not also what comes out, the first one.
BACKWARD = ("backward", "input", "weight")
GIVEN_APART = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")


class Stretch(NamedTuple):
    """Where a tensor lies in its storage."""

    storage: tuple[int, int]  # its key, and its bytes: memory given back and taken again has others as a rule
    offset: int  # in numbers
    numel: int


@dataclass(frozen=True)
class Copies:
    """The numbers of some tensors in a row, and where each of these lay; no numbers where no more may be kept."""

    numbers: Tensor | None
    stretches: list[Stretch]

    def at(self, place: int) -> list[float]:
        """TOLD numbers from a place on."""
        return [] if self.numbers is None or place < 0 else self.numbers[place : place + TOLD].tolist()


@dataclass(eq=False)
class Sample:
    """What one call carried on this rank."""

    op: str
    inside: str  # the module in whose forward or backward pass it was made: "1.attention", empty outside of any
    backward: bool
    shape: tuple[int, ...]  # of the first tensor that goes in
    given: "Copies"  # what goes in
    results: list[Tensor]  # what comes out, live until it was copied
    ranks: tuple[int, ...]  # of the group; of a send or receive from whom to whom
    tag: int
    label: str  # of the phase around it
    start_s: float  # of `time.perf_counter`
    taken: "Copies | None" = None  # what came out
    left: Tensor | None = None  # what was not sent of it, and is kept
    calls: list[int] = field(default_factory=list)  # the messages that it is made of, by their number in the step
    wait_s: tuple[float, float] | None = None  # of `time.perf_counter`
    turn: int = 0  # of all that happened in the step
    at_once: bool = False  # whether it was waited for before anything else happened


class Samples:
    """The samples of one step, in the order in which they began: one of each call, and one of each collective by hand
    in place of the sends and receives that it is made of."""

    def __init__(self, layers: Mapping[int, nn.Module], allowed_bytes: int) -> None:
        self.found: list[Sample] = []
        self._layers, self._left_bytes = layers, allowed_bytes
        self._stack: list[str] = []  # of modules whose forward pass runs, the outermost first
        self._returned = ""  # the module whose output autograd came to last
        self._works: list[tuple[Any, Sample]] = []
        self._turn = 0  # grows with everything that happens
        self._by_hand: list[Sample] = []  # the collectives by hand that the program is in the midst of
        self.phases: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hear of modules and of waits inside the block."""
        hooks = [hook for index, layer in self._layers.items() for hook in self._hooked(index, layer)]
        wait = dist.Work.wait

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            start_s, turn = time.perf_counter(), self._turn
            result = wait(work, *args, **kwargs)
            self._waited(work, start_s, turn)
            return result

        dist.Work.wait = waited  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()
            for _, sample in self._works:
                self._take(sample)
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
        while self._stack and self._stack.pop() != path:  # those that ended by an exception told nothing
            pass
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._come_to(path))

    def _come_to(self, path: str) -> None:
        self._returned = path
        self._turn += 1

    def happened(self, phases: list[str]) -> None:
        """A phase begins or ends; these are open now, the outermost first."""
        self._turn += 1
        self.phases = phases

    def begin(self, number: int, message: Any, args: Sequence[Any]) -> Sample | None:
        """Message `number` of the step begins, with these arguments of its c10d operation; None where it belongs to a
        collective by hand."""
        if self._by_hand:
            self._by_hand[-1].calls.append(number)
            return None
        op = message.op
        given = list(tensors_in(args[1] if op in GIVEN_APART else args[0])) if op != "recv" else []
        sample = self._sample(op, given, [] if op == "send" else list(tensors_in(args[0])), message.ranks, message.tag)
        sample.calls.append(number)
        return sample

    def _sample(
        self, op: str, given: Sequence[Tensor], results: list[Tensor], ranks: tuple[int, ...], tag: int = 0
    ) -> Sample:
        backward = any(each.split()[0] in BACKWARD for each in self.phases)
        inside = self._stack[-1] if self._stack else self._returned if backward else ""
        shape = tuple((given or results)[0].shape) if given or results else ()
        label = self.phases[-1].partition(" ")[2] if self.phases else ""
        sample = Sample(
            op, inside, backward, shape, self._copied(given), results, ranks, tag, label, time.perf_counter()
        )
        self.found.append(sample)
        self._turn = sample.turn = self._turn + 1
        return sample

    def by_hand(
        self, op: str, ranks: Sequence[int], given: Tensor, result: Tensor, steps: Generator[Any, None, None],
        left: Tensor | None = None,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """The `steps` of a collective by hand: what it sends between two of them belongs to it. `left` is what this
        rank does not send."""
        sample = self._sample(op, [given], [result], tuple(ranks))
        sample.left = None if left is None else left.detach().reshape(-1).clone()
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
        self._take(sample)
        if sample.wait_s is not None:
            sample.wait_s = (sample.wait_s[0], time.perf_counter())
        self._turn += 1

    def launched(self, sample: Sample, work: Any) -> None:
        """The call has returned what is to be waited for."""
        self._works.append((work, sample))

    def ended(self, work: Any) -> None:
        """It is known that the call is over."""
        for index, (mine, sample) in enumerate(self._works):
            if mine is work:
                self._take(sample)
                del self._works[index]
                return

    def _waited(self, work: Any, start_s: float, turn: int) -> None:
        for mine, sample in self._works:
            if mine is work:
                sample.wait_s = (start_s, time.perf_counter())
                sample.at_once = sample.turn == turn
        self.ended(work)
        self._turn += 1

    def _take(self, sample: Sample) -> None:
        sample.taken, sample.results = self._copied(sample.results), []

    def _copied(self, tensors: Sequence[Tensor]) -> Copies:
        nbytes = sum(each.numel() * each.element_size() for each in tensors)
        stretches = [stretch_of(each) for each in tensors]
        if not tensors or nbytes > self._left_bytes or any(each.is_complex() for each in tensors):
            return Copies(None, stretches)
        self._left_bytes -= nbytes
        return Copies(torch.cat([each.detach().reshape(-1) for each in tensors]), stretches)


def stretch_of(tensor: Tensor) -> Stretch:
    """Where it lies; of a DTensor its local part."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    storage = local.untyped_storage()
    return Stretch((int(storage._cdata), storage.nbytes()), int(local.storage_offset()), local.numel())


# Which numbers are told: the same places on every rank, and never numbers that are 0 or 1 by construction, such as the
# gradient of an embedding's row that no sample has, or a norm's weights.


def place_of(values: Tensor, start: int = 0, length: int | None = None) -> int:
    """The first place in `values` [n], from `start` on for `length` numbers, at which TOLD numbers tell something."""
    part = values[start : None if length is None else start + length].float()
    if part.numel() == 0:
        return start
    size = part.abs()
    tells = size.isfinite() & (size > FAINT * size[size.isfinite()].max().item() if size.isfinite().any() else False)
    tells &= part != 1
    for wanted in range(min(TOLD, part.numel()), 0, -1):
        together = tells.unfold(0, wanted, 1).all(1)
        if together.any():
            return start + min(int(together.int().argmax()), max(0, part.numel() - TOLD))
    return start
