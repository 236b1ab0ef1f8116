"""Which steps count, in which order variants take them, and what is written of them."""

import hashlib
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from distlab.lab.measure.timeline import Lap
from distlab.lab.report.records import Digest, Losses, Steps
from distlab.lab.verify.timed import Stopwatch, rotated, write_digests, write_losses
from distlab.techniques.collectives.phases import Span

LENGTHS_S = (9.0, 5.0, 1.0, 3.0, 2.0)  # of five steps, which begin 10 s after each other


def lap(began_s: float, wall_s: float, cpu_s: float) -> Lap:
    return cast(Lap, SimpleNamespace(began_s=began_s, ended_s=began_s + wall_s, wall_s=wall_s, cpu_s=cpu_s))


def marks(step: int) -> list[Span]:
    """Of a step: data before it, and half of it forward, with a message in its midst, and half backward."""
    began, length = 10.0 * step, LENGTHS_S[step]
    return [
        Span("data", "", began - 0.5, began - 0.25),
        Span("forward", "0", began, began + length / 2),
        Span("all_reduce", "", began + 0.125, began + 0.25),
        Span("backward", "0", began + length / 2, began + length),
    ]


@pytest.mark.parametrize(("step", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc")])
def test_every_variant_is_first_in_turn(step: int, order: str) -> None:
    assert rotated(["a", "b", "c"], step) == list(order)
    assert rotated([], step) == []


def written_by(rank: int, write: Callable[[Any], object], **lab: Any) -> list[Any]:
    """The records that a rank writes."""
    found: list[Any] = []
    write(SimpleNamespace(rank=rank, speaks=rank == 0, journal=SimpleNamespace(write=found.append), at=lambda *_: None,
                          say=lambda *_: None, config=SimpleNamespace(steps=1), **lab))  # fmt: skip
    return found


def test_a_curve_is_the_checkpoints_losses_and_the_sum_of_all_parts() -> None:
    loss_parts: Any = [{"flat": [0.5, None]}, {"flat": [0.25, 2.0, None]}]
    position: Any = SimpleNamespace(losses={"flat": [9.0]})
    curves: list[Any] = []

    def write(lab: Any) -> None:
        curves.append(write_losses(lab, {"one process": [8.0]}, position, {"flat": []}))

    found = written_by(0, write, exchange=SimpleNamespace(everyone=lambda *_: loss_parts))
    assert found == [Losses("one process", [8.0]), Losses("flat", [9.0, 0.75, 2.0, 0.0])]
    assert curves == [{"flat": [9.0, 0.75, 2.0, 0.0]}]


def test_a_digest_is_of_names_and_bytes_on_rank_0() -> None:
    weights = [("w", torch.tensor([1.5, -2.0])), ("b", torch.tensor([3], dtype=torch.int64))]
    strategies: Any = {"flat": SimpleNamespace(full=lambda _kind: iter(weights))}
    expected = hashlib.sha256(b"w" + struct.pack("<2f", 1.5, -2.0) + b"b" + struct.pack("<q", 3)).hexdigest()
    assert written_by(0, lambda lab: write_digests(lab, strategies)) == [Digest("flat", expected)]
    assert written_by(1, lambda lab: write_digests(lab, strategies)) == []


@pytest.mark.parametrize(("done", "kept"), [(1, [9.0]), (2, [9.0, 5.0]), (3, [1.0]), (5, [1.0, 3.0, 2.0])])
def test_where_there_are_more_steps_the_two_that_warm_up_are_left_out(done: int, kept: list[float]) -> None:
    watch = Stopwatch(["flat"], cast(Any, None))
    for step, length in enumerate(LENGTHS_S[:done]):
        watch.laps["flat"].append(lap(10.0 * step, length, length / 4))
        watch.chronicle.add("flat", step, marks(step))
    steps, _ = written_by(0, watch.write)
    assert steps == Steps("flat", kept, [each / 4 for each in kept])
