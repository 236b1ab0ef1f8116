"""Which weights of a rank are held against those of others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.collectives.sharded_tensor import LocalShard
from distlab.verify.audit import check_alike

pytestmark = pytest.mark.timeout(30)


def differing(first: float, second: float, offset: int = 0) -> float:
    """What the check finds of two replicas of a slice whose last number is `first` here and `second` there."""
    found: dict[str, float] = {}
    summed: list[dict[str, str]] = []

    def gather(_: str, mine: dict[str, str]) -> list[dict[str, str]]:
        summed.append(mine)
        return summed

    def check(name: str, difference: float, *_: Any, **__: Any) -> None:
        found[name] = difference

    lab: Any = SimpleNamespace(
        config=SimpleNamespace(steps=1), mode=SimpleNamespace(unsaved=""), at=lambda *_: None,
        exchange=SimpleNamespace(gather=gather), check=check,
    )  # fmt: skip
    for value, begin in ((first, 0), (second, offset)):
        box = torch.tensor([1.0, value])
        state = {"weights.w": LocalShard(torch.Size([4]), [((begin,), box)]), "optimizer.step.w": torch.tensor(value)}
        check_alike(lab, "1f1b", SimpleNamespace(state_dict=lambda state=state: state))
    return found["timed replicas"]


def test_replicas_of_a_slice_hold_the_same() -> None:
    assert differing(2.0, 2.0) == 0
    assert differing(2.0, 3.0) == 1


def test_other_parts_of_a_weight_are_not_compared() -> None:
    assert differing(2.0, 3.0, offset=2) == 0
