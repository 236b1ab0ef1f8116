"""Predictions of bytes on the wire and in memory, rounds, bubbles and seconds, as in the papers.

The functions are pure, in one file per part of the lab. N is `world_size`, S is `nbytes`. The modes are checked
against them, and `distlab plan` adds them up for models too large for a laptop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PYTORCHS = "PyTorch's own variant, for comparison"


@dataclass(frozen=True)
class Prediction:
    """A variant's expected measurement per step: a value per rank, in `unit`, by `formula`, in `calls` calls per rank.

    `messages` is the number that each rank sends, or receives if that is larger
    (distlab/techniques/collectives/costs.py); by default each call counts as one of gloo's short all_reduces.
    """

    variant: str
    name: str  # as in the comparison: "wire bytes", "called bytes", ...
    unit: str
    formula: str
    value: tuple[float, ...]
    calls: int
    shown: str = ""  # why it is informational; empty if it is a check
    messages: tuple[float, ...] = ()

    def messages_of(self, rank: int) -> float:
        """Return the messages that `rank` sends."""
        return self.messages[rank] if self.messages else 4 * (len(self.value) - 1) * self.calls


def of_a_step(
    variant: str, formula: str, costs: Sequence[tuple[float, int, float]], shown: str = "", of_calls: str = ""
) -> list[Prediction]:
    """Predict each rank's (bytes, calls, messages) per step; calls decide if they have a formula."""
    nbytes, calls, messages = zip(*costs, strict=True)
    most = max(calls)
    found = [Prediction(variant, "wire bytes", "B", formula, nbytes, most, shown, messages if any(messages) else ())]
    if of_calls:
        found.append(Prediction(variant, "calls", "calls", of_calls, tuple(map(float, calls)), most))
    return found
