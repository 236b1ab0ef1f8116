"""Dropout in a proof: it drops nothing, and which rank would have drawn what is compared along the axes of the mesh.

N ranks cannot draw what one process draws, so no tensor could be compared. What can be said is who has to draw alike:
ranks that hold the same activations (tensor parallelism's, where they are not cut), and who has to draw anew: ranks
with other samples, or other parts of the activations.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.cluster import name_ranks
from workers.measure.hashing import hash_of
from workers.prove.held import plain_name

FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LOADED = "scaled_dot_product_attention"


class Draw(NamedTuple):
    """One dropout of one rank's first step."""

    module: str
    turn: int  # how often this module had drawn before
    state: int  # of the random generator
    given: int  # checksum of what it drops from


class Draws:
    """Stands in for torch's dropouts; `watch` names the modules that draw."""

    def __init__(self) -> None:
        self.drawn: list[Draw] = []
        self.any = False
        self._inside: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Drop nothing meanwhile; the generator goes on as it would."""
        place: Any = F
        before = {name: getattr(F, name) for name in (*FUNCTIONS, LOADED)}
        for name in FUNCTIONS:
            setattr(place, name, self._instead(before[name]))
        setattr(place, LOADED, self._attention(before[LOADED]))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(place, name, function)

    def watch(self, model: nn.Module) -> None:
        """Note the draws of this rank's model from here on."""
        self.drawn = []
        for name, module in model.named_modules():
            shown = plain_name(f"{name}.").rstrip(".")
            module.register_forward_pre_hook(lambda *_, shown=shown: self._inside.append(shown))
            module.register_forward_hook(lambda *_: self._left(), always_call=True)

    def _left(self) -> None:
        self._inside.pop()

    def _note(self, given: Tensor) -> None:
        self.any = True
        name = next((each for each in reversed(self._inside) if each), "the model")
        turn = Counter(each.module for each in self.drawn)[name]
        local = getattr(given, "_local_tensor", given)
        self.drawn.append(Draw(name, turn, hash_of(torch.get_rng_state()), hash_of(local)))

    def _instead(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        function = getattr(function, "__wrapped__", function)  # without who else watches

        def instead(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
            if training and p > 0:
                self._note(given)
                function(given.detach(), p, True)  # so that the generator goes on
            return given

        return instead

    def _attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            *args: Any, **named: Any,
        ) -> Tensor:  # fmt: skip
            if dropout_p > 0:
                self._note(query)
                torch.rand(1)  # the generator goes on
            return function(query, key, value, attn_mask, 0.0, *args, **named)

        return attention


def wrong(
    by_rank: Sequence[Sequence[Draw]], neighbours: Callable[[int], Mapping[str, Sequence[int]]]
) -> Iterator[tuple[str, list[int]]]:
    """A sentence for each axis along which ranks draw alike where they must not, or not where they must; and which."""
    faults: dict[str, tuple[str, list[int], list[str]]] = {}
    for rank, draws in enumerate(by_rank):
        for axis, ranks in neighbours(rank).items():
            for other in ranks:
                if other <= rank:
                    continue
                for one, two in pairs(draws, by_rank[other]):
                    fault = fault_of(axis, one, two)
                    if fault:
                        faults.setdefault(axis, (fault, [rank, other], []))[2].append(one.module)
    for axis, (fault, odd, modules) in faults.items():
        others = len(set(modules)) - 1
        which = f"dropout {modules[0]}" + (f" and {others} more" if others else "")
        yield f"{which} on {name_ranks(odd)}, side by side on {axis}: {fault}", odd


def pairs(one: Sequence[Draw], other: Sequence[Draw]) -> Iterator[tuple[Draw, Draw]]:
    """Draws of the same dropout on two ranks."""
    theirs = {(each.module, each.turn): each for each in other}
    for each in one:
        if (each.module, each.turn) in theirs:
            yield each, theirs[each.module, each.turn]


def fault_of(axis: str, one: Draw, two: Draw) -> str:
    """What is wrong between two ranks; empty if nothing."""
    same_draw, same_given = one.state == two.state, one.given == two.given
    if axis == "dp":
        return "they draw the same numbers for other samples; seed each rank of dp by its own" if same_draw else ""
    if same_given and not same_draw:
        return f"they hold the same activations and draw other numbers, so they part; seed the ranks of {axis} alike"
    if same_draw and not same_given:
        return (
            f"they hold other parts of the activations and draw the same numbers; seed each rank of {axis} by its own"
        )
    return ""
