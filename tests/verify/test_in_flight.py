"""Microbatches that a rank holds beside what its schedule allows, of both kinds of strategies that have stages."""

from types import SimpleNamespace
from typing import Any

import pytest

from distlab.mesh.strategy import Stacked
from distlab.pipeline_parallel.strategy import Pipelined
from distlab.verify.counted import check_in_flight

pytestmark = pytest.mark.timeout(60)


def claims(kind: type, held: int | None, schedule: str, chunks: int = 1) -> list[bool]:
    """What the second of three stages, of five microbatches, claims."""
    made: list[bool] = []

    def check(_name: str, difference: float, tolerance: float, *_: str, **__: str) -> None:
        made.append(difference <= tolerance)

    mesh = SimpleNamespace(size=lambda _axis: 3, index=lambda _axis: 1)
    lab: Any = SimpleNamespace(check=check, mesh=mesh, config=SimpleNamespace(num_microbatches=5))
    strategy: Any = object.__new__(kind)
    strategy.engine = SimpleNamespace(most_in_flight=held)
    strategy.parts = SimpleNamespace(stages=[*range(chunks)])
    check_in_flight(lab, "any", strategy, schedule)
    return made


@pytest.mark.parametrize("kind", [Pipelined, Stacked])
@pytest.mark.parametrize(("schedule", "allowed"), [("1f1b", 2), ("zb_h1", 3), ("gpipe", 5)])
def test_too_many_in_flight_fail(kind: type, schedule: str, allowed: int) -> None:
    assert claims(kind, allowed, schedule) == [True]
    assert claims(kind, allowed + 1, schedule) == [False]


def test_chunks_are_those_that_the_rank_has() -> None:
    assert claims(Stacked, 8, "interleaved", chunks=2) == [True]
    assert claims(Stacked, 9, "interleaved", chunks=2) == [False]


def test_of_an_engine_that_does_not_count_nothing_is_claimed() -> None:
    assert claims(Pipelined, None, "1f1b") == []
