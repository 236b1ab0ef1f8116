"""A card as measured by `python -m benchmarks.gpu`, and the time of a GPT's step on it as the sum of its parts.

One share of the peak for all products is wrong by a third between models: a product of 1024 columns reaches half
the rate of one of 8192, norms and scores are bound by memory, and attention by neither. So a card is a table of
products by size, of attention by length, and of seconds per number for memory-bound operations; a step is

    products    each linear layer's three, forward and for the gradients of its input and its weight
    attention   4·s·h operations per token, causal half of them, and 2.5 times as many backward (Dao et al. 2022)
    memory      norms, activation functions, sums of the residual stream, copies between them
    loss        scores of the vocabulary in float32, their softmax and its gradient
    update      AdamW of masters, from gradients and to weights of 16 bits

and nothing overlaps: one card has one queue.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distlab.lab.report.reading import BrokenRecord, from_json

NEAREST = 4  # products from which one of another size is estimated
BACKWARD_ATTENTION = 2.5
FAULT = "is no card that benchmarks.gpu has measured"


class Product(NamedTuple):
    """FLOP/s of the product [rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int
    flops: float


class Attention(NamedTuple):
    """FLOP/s of causal attention over this many positions."""

    positions: int
    forward: float
    backward: float


class Card(NamedTuple):
    """The measurements; `number_s` are seconds per number of norm, gelu, add, copy, loss (forward and backward) and
    update, `peak` FLOP/s by the data sheet."""

    name: str
    peak: float
    products: list[Product]
    attention: list[Attention]
    number_s: dict[str, float]
    memory: float  # bytes per second, read and written

    def product_s(self, rows: int, inner: int, columns: int) -> float:
        """Return the seconds of one product, by the FLOP/s of products of similar size."""
        place = [math.log2(size) for size in (rows, inner, columns)]
        distances = sorted(
            (math.dist(place, [math.log2(size) for size in each[:3]]), each.flops) for each in self.products
        )
        if not distances[0][0]:
            return 2 * rows * inner * columns / distances[0][1]
        weights = [1 / distance**2 for distance, _ in distances[:NEAREST]]
        flops = sum(weight * flops for weight, (_, flops) in zip(weights, distances, strict=False)) / sum(weights)
        return 2 * rows * inner * columns / flops

    def linear_s(self, tokens: int, inputs: int, outputs: int) -> float:
        """Return the seconds of forward, input gradient and weight gradient."""
        forward, back = self.product_s(tokens, inputs, outputs), self.product_s(tokens, outputs, inputs)
        return forward + back + self.product_s(outputs, tokens, inputs)

    def attention_s(self, tokens: int, positions: int, width: int) -> float:
        flops = 2 * tokens * positions * width
        near = min(self.attention, key=lambda each: abs(math.log2(each.positions / positions)))
        return flops / near.forward + BACKWARD_ATTENTION * flops / near.backward

    def step_s(self, layers: int, width: int, positions: int, samples: int, vocabulary: int) -> float:
        """Return the seconds of a GPT's step in 16 bits with master weights, without recomputation."""
        return sum(seconds for _, seconds in self.parts(layers, width, positions, samples, vocabulary))

    def parts(
        self, layers: int, width: int, positions: int, samples: int, vocabulary: int
    ) -> Iterator[tuple[str, float]]:
        tokens, stream = samples * positions, samples * positions * width
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        yield "products", layers * sum(self.linear_s(tokens, *shape) for shape in shapes)
        yield "scores", self.linear_s(tokens, width, vocabulary)
        yield "attention", layers * self.attention_s(tokens, positions, width)
        # Per layer: two norms, an activation of 4h, four sums (two of gradients), and copies: attention's inputs and
        # outputs in another order, and half a copy per bias gradient, which is a sum that is only read.
        of_layer = {"norm": 2.0, "gelu": 4.0, "add": 4.0, "copy": 5.0 + 9 / 2}
        yield "memory", layers * stream * sum(self.number_s[kind] * count for kind, count in of_layer.items())
        yield "loss", tokens * vocabulary * self.number_s["loss"]
        numbers = 12 * layers * width**2 + (2 * vocabulary + positions) * width
        yield "update", numbers * self.number_s["update"]


def read_card(path: Path) -> Card:
    """Return the card in a file that benchmarks.gpu wrote; raises BrokenRecord."""
    try:
        card = from_json(path.read_bytes())["card"]
        products = [Product(int(m), int(k), int(n), positive(flops)) for m, k, n, flops in card["products"]]
        attention = [Attention(int(each[0]), positive(each[1]), positive(each[2])) for each in card["attention"]]
        number_s = {
            kind: positive(card["number_s"][kind]) for kind in ("norm", "gelu", "add", "copy", "loss", "update")
        }
        found = Card(str(card["name"]), positive(card["peak"]), products, attention, number_s, positive(card["memory"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BrokenRecord(f"{path} {FAULT}: {type(error).__name__}: {error}") from None
    if not (products and attention):
        raise BrokenRecord(f"{path} {FAULT}: it has no product or no attention")
    return found


def positive(value: Any) -> float:
    number = float(value)
    if not (0 < number < math.inf):
        raise ValueError(f"{number:g} where a measured number belongs")
    return number
