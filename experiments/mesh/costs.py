"""What sending costs a rank: bytes, calls and messages, that add up over whatever is sent."""

from typing import NamedTuple

from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages


class Cost(NamedTuple):
    """What a rank sends."""

    nbytes: float = 0.0
    calls: int = 0
    messages: int = 0

    def times(self, number: int) -> "Cost":
        return Cost(number * self.nbytes, number * self.calls, number * self.messages)


def total(costs: list[Cost]) -> Cost:
    """All of them together."""
    return Cost(*(sum(parts) for parts in zip(Cost(), *costs, strict=True)))


def summed(ranks: int, nbytes: int) -> Cost:
    """An all_reduce of gloo's."""
    return Cost(all_reduce_bytes("gloo", ranks, nbytes), 1, gloo_all_reduce_messages(ranks, nbytes))
