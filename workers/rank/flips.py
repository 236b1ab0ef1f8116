"""Bits that flip within a step, by LAB_FAULTS: in a gradient once it is summed, in a weight once it is updated, in a
message on its way.

Where ranks hold copies the bit is of one of those, and the audit has to name it. Elsewhere a check of the timed steps,
or one that the mode names (`Mode.watched`), has to fail, which may allow for roundings: so unless the text names a bit
it is the highest of the exponent, of a tensor that is not all zeros.
"""

import random
from collections.abc import Callable, Container, Sequence

from torch import Tensor

from workers.config import Config
from workers.config.faults import BITS, Fault
from workers.contract import Mode
from workers.faults import bits
from workers.faults.messages import Messages, flipping
from workers.passes.corruption import alike

KINDS = {"gradient": "gradients", "weight": "weights"}
Note = Callable[[Fault, int, str, str, str], None]  # (event, step, variant, detail, outcome)


class Flips:
    """The flips of one rank; `note` writes down each as it is made."""

    def __init__(self, config: Config, mode: Mode, events: Sequence[Fault], note: Note) -> None:
        self.config, self.mode, self.events, self.note = config, mode, events, note
        self._messages: Messages | None = None
        self._num_messages: dict[str, int] = {}  # of the last step of each variant that had any
        self._made: set[tuple[int, str]] = set()  # numbers of events, by variant: a step may be done again

    def step(self, step: int, variant: str) -> None:
        """A step begins: listen for the message that is to change, one at a time."""
        if self._messages is not None:  # of a step that a loss has ended
            self._messages.close()
            self._messages = None
        left = [each for each in self.events if each.flipped == "message" and (each.number, variant) not in self._made]
        if self._shows(variant, covered=False):
            if left:
                self._listen(min(left, key=lambda each: each.step or 0), step, variant)
            return
        for event in left:
            if event.step == step:
                self._made.add((event.number, variant))
                self.note(event, step, variant, "", "unseen")

    def tensors(self, kind: str, variant: str, strategy: object, step: int, shared: Container[str]) -> None:
        """A variant's gradients or weights are there, of which those in `shared` are on other ranks too."""
        if kind == "weights" and self._messages is not None:
            self._messages.close()
            if self._messages.count:
                self._num_messages[variant] = self._messages.count
            self._messages = None
        for event in self.events:
            if event.step == step and KINDS.get(event.flipped) == kind and (event.number, variant) not in self._made:
                self._made.add((event.number, variant))
                self._flip(event, kind, variant, strategy, shared)

    def _flip(self, event: Fault, kind: str, variant: str, strategy: object, shared: Container[str]) -> None:
        covered = [(name, tensor) for name, tensor in alike(strategy, kind) if name in shared]
        candidates = covered or held(strategy, kind)
        if not candidates or not self._shows(variant, covered=bool(covered)):
            self.note(event, event.step or 0, variant, "", "unseen")
            return
        bit, draw = self._drawn(event, variant, covered=bool(covered))
        name, tensor = draw.choice(sorted(candidates, key=lambda each: each[0]))
        done = bits.flip(tensor, bit, draw)
        self.note(event, event.step or 0, variant, f"{kind}.{name}{done}", "named" if covered else "seen")

    def _shows(self, variant: str, *, covered: bool) -> bool:
        """Whether a check could see it: a copy on another rank, or one process that computes the same."""
        return covered or bool(self.mode.watched) or (self.config.proof and variant not in self.mode.by_torch)

    def _listen(self, event: Fault, step: int, variant: str) -> None:
        """Count the messages of each step, and from the event's step on flip a bit of the last one: all of it is used,
        where of the first one, the embedding, no sample may need the row. A step may have none: then one that has."""
        assert event.step is not None

        def told(op: str, done: bits.Flip) -> None:
            self._made.add((event.number, variant))
            self.note(event, step, variant, f"{op}{done}", "")

        known = self._num_messages.get(variant, 0)
        now = step >= event.step and known
        change = flipping(*self._drawn(event, variant, covered=False), told) if now else None
        self._messages = Messages(known, change)

    def _drawn(self, event: Fault, variant: str, *, covered: bool) -> tuple[str, random.Random]:
        """The kind of bit, and what draws the rest."""
        draw = draw_of(event, self.config.seed, variant)
        drawn = draw.choice(BITS)
        return event.bits or (drawn if covered else bits.HIGHEST), draw


def draw_of(event: Fault, seed: int, variant: str = "") -> random.Random:
    """What draws all that the text of an event leaves out."""
    return random.Random(f"{seed} {event.number} {variant}")


def held(strategy: object, kind: str) -> list[tuple[str, Tensor]]:
    """What this rank holds of `kind` and trains on, whole or in part, and is not all zeros; nothing of gradients that
    its update does not read. A strategy may say it by a method `own`, else its optimizer's parameters do."""
    own = getattr(strategy, "own", None)
    if own is not None:
        return [(name, tensor) for name, tensor in own(kind) if tensor.any()]
    optimizer = getattr(strategy, "optimizer", None)
    if kind == "gradients" and not getattr(strategy, "steps", True):
        return []
    groups = optimizer.param_groups if optimizer is not None else []
    parameters = [parameter for group in groups for parameter in group["params"]]
    found = [each.detach() if kind == "weights" else each.grad for each in parameters]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found if tensor is not None]
    return [(f"part {index}", tensor) for index, tensor in enumerate(local) if tensor.any()]
