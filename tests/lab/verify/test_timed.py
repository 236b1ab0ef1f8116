"""Seconds are held to identities: whatever is left out, begun elsewhere, added up or averaged wrong, is told."""

import hashlib
import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from distlab.lab.measure.timeline import Lap, profile
from distlab.lab.report.records import Digest, Losses, Steps
from distlab.lab.verify.timed import Stopwatch, Timed, check_seconds, rotated, write_digests, write_losses
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


def right() -> Timed:
    kept = LENGTHS_S[2:]
    laps = [lap(10.0 * step, length, length / 4) for step, length in enumerate(LENGTHS_S)]
    around = [lap(10.0 * step - 1, length + 1, length / 2) for step, length in enumerate(LENGTHS_S)]
    median = {"data": 0.25, "forward": 0.875, "backward": 1.0, "communication": 0.125, "optimizer": 0.0, "waiting": 0.0}
    return Timed(
        laps,
        around,
        [(step, marks(step)) for step in range(2, 5)],
        Steps("flat", list(kept), [each / 4 for each in kept]),
        median,
    )


def checked(timed: Timed) -> tuple[float, str]:
    found: list[Any] = []
    lab: Any = SimpleNamespace(check=lambda *claim, **words: found.append((*claim, words)))
    check_seconds(lab, {"flat": timed})
    ((name, faults, tolerance, words),) = found
    assert (name, tolerance) == ("timed seconds", 0)
    return faults, words["detail"]


def test_seconds_that_are_right_hold() -> None:
    assert checked(right()) == (0, "3 steps")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": Steps("flat", [*LENGTHS_S], [*LENGTHS_S])}, "5 and 5 seconds of 5 steps, of which 2 are left out"),
        (
            {"steps": Steps("flat", [1.0, 3.0, 2.0], [0.25, 0.75])},
            "3 and 2 seconds of 5 steps, of which 2 are left out",
        ),
        (
            {"steps": Steps("flat", [1.0, 3.0], [0.25, 0.75, 0.5])},
            "2 and 3 seconds of 5 steps, of which 2 are left out",
        ),
        (
            {"steps": Steps("flat", [1.0, 3.0, 0.0], [0.25, 0.75, 0.5]), "marked": []},
            "a step of 0 s and 0.5 CPU s, in 3",
        ),
        ({"steps": Steps("flat", [1.0, 4.5, 2.0], [0.25, 0.75, 0.5])}, "a step of 4.5 s and 0.75 CPU s, in 4 and 1.5"),
        ({"steps": Steps("flat", [1.0, 3.0, 2.0], [0.25, 1.75, 0.5])}, "a step of 3 s and 1.75 CPU s, in 4 and 1.5"),
        ({"steps": Steps("flat", [1.0, 3.0, 2.0], [0.25, -0.5, 0.5])}, "a step of 3 s and -0.5 CPU s, in 4 and 1.5"),
        (
            {"steps": Steps("flat", [0.999999, 3.0, 2.0], [0.25, 0.75, 0.5])},
            "a step of 0.999999 s in which 1 s are marked",
        ),
        ({"marked": [(2, [*marks(2), Span("wait", "", 19.999, 20.0)])]}, "marks that are not in their step of 1 s"),
        ({"marked": [(2, [*marks(2), Span("wait", "", 21.0, 21.001)])]}, "marks that are not in their step of 1 s"),
        ({"marked": [(2, [*marks(2), Span("data", "", 20.25, 20.5)])]}, "data is fetched while the step is timed"),
        (
            {"profile": {**right().profile, "backward": 0.5}, "marked": [(step, marks(step)) for step in (3, 4)]},
            "0.5 s of backward are no median of 2 steps",
        ),
        ({"steps": Steps("flat", [*LENGTHS_S[:3]], [each / 4 for each in LENGTHS_S[:3]])}, "a step of 9 s"),
        ({"steps": Steps("flat", [*LENGTHS_S[2:]], [100.0, 101.0, 102.0])}, "100 CPU s"),
        ({"steps": Steps("flat", [math.nan] * 3, [each / 4 for each in LENGTHS_S[2:]])}, "a step of nan s"),
        ({"marked": [(2, [*marks(2)[1:], Span("data", "", 20.0, 20.5)])]}, "data is fetched while the step is timed"),
        ({"marked": [(2, marks(2)[1:])]}, "or unmarked"),
        ({"laps": right().around}, "data is fetched while the step is timed"),  # the watch began before
        ({"laps": [lap(10.0 * step, 0.5, 0.1) for step in range(5)]}, "marks that are not in their step of 0.5 s"),
        ({"profile": {**right().profile, "backward": 1.5}}, "1.5 s of backward are no median of 3 steps"),
    ],
)
def test_seconds_that_are_wrong_fail(changes: dict[str, Any], told: str) -> None:
    faults, detail = checked(right()._replace(**changes))
    assert faults > 0
    assert told in detail


def test_a_step_may_be_as_long_as_the_second_watch_and_take_nothing_of_the_processor() -> None:
    around = [lap(10.0 * step, length, 0.0) for step, length in enumerate(LENGTHS_S)]
    assert checked(right()._replace(around=around, steps=Steps("flat", [1.0, 3.0, 2.0], [0.0] * 3))) == (0, "3 steps")


def test_every_fault_of_every_variant_counts_and_the_first_is_told() -> None:
    late = Steps("flat", [1.0, 4.5, 5.5], [0.25, 0.75, 0.5])
    faults, detail = checked(right()._replace(steps=late))
    assert (faults, detail) == (2, "flat: a step of 4.5 s and 0.75 CPU s, in 4 and 1.5")


@pytest.mark.parametrize(("step", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc")])
def test_every_variant_is_first_in_turn(step: int, order: str) -> None:
    assert rotated(["a", "b", "c"], step) == list(order)
    assert rotated([], step) == []


def written_by(rank: int, write: Callable[[Any], object], **lab: Any) -> list[Any]:
    """The records that a rank writes."""
    found: list[Any] = []
    write(SimpleNamespace(rank=rank, journal=SimpleNamespace(write=found.append), at=lambda *_: None,
                          say=lambda *_: None, config=SimpleNamespace(steps=1), **lab))  # fmt: skip
    return found


def test_a_curve_is_what_a_checkpoint_held_and_the_sum_of_all_shares() -> None:
    shares: Any = [{"flat": [0.5, None]}, {"flat": [0.25, 2.0, None]}]
    course: Any = SimpleNamespace(losses={"flat": [9.0]})
    curves: list[Any] = []

    def write(lab: Any) -> None:
        curves.append(write_losses(lab, {"one process": [8.0]}, course, {"flat": []}))

    found = written_by(0, write, exchange=SimpleNamespace(gather=lambda *_: shares))
    assert found == [Losses("one process", [8.0]), Losses("flat", [9.0, 0.75, 2.0, 0.0])]
    assert curves == [{"flat": [9.0, 0.75, 2.0, 0.0]}]


def test_a_digest_is_of_names_and_bytes_on_rank_0() -> None:
    weights = [("w", torch.tensor([1.5, -2.0])), ("b", torch.tensor([3], dtype=torch.int64))]
    strategies: Any = {"flat": SimpleNamespace(full=lambda _kind: iter(weights))}
    told = hashlib.sha256(b"w" + struct.pack("<2f", 1.5, -2.0) + b"b" + struct.pack("<q", 3)).hexdigest()
    assert written_by(0, lambda lab: write_digests(lab, strategies)) == [Digest("flat", told)]
    assert written_by(1, lambda lab: write_digests(lab, strategies)) == []


@pytest.mark.parametrize(("done", "kept"), [(1, [9.0]), (2, [9.0, 5.0]), (3, [1.0]), (5, [1.0, 3.0, 2.0])])
def test_where_there_are_more_steps_the_two_that_warm_up_are_left_out(done: int, kept: list[float]) -> None:
    watch = Stopwatch(["flat"], cast(Any, None))
    for step, length in enumerate(LENGTHS_S[:done]):
        watch.laps["flat"].append(lap(10.0 * step, length, length / 4))
        watch.around["flat"].append(lap(10.0 * step, length, length / 4))
        watch.chronicle.add("flat", step, marks(step))
    steps, _ = written_by(0, watch.write, check=lambda *_, **__: None)
    assert steps == Steps("flat", kept, [each / 4 for each in kept])


def test_how_far_a_rank_is_are_its_last_step_and_the_loss_that_all_heard_of_it() -> None:
    """Steps 4 to 6 were done; the last loss of `ring` is not heard yet."""
    watch, told = Stopwatch(["flat", "ring", "none"], cast(Any, None)), list[Any]()
    for name in ("flat", "ring"):
        for step, length in enumerate(LENGTHS_S[:3]):
            watch.laps[name].append(lap(0.0, length if name == "flat" else 2 * length, 0.0))
            watch.chronicle.add(name, step, marks(step))
    course: Any = SimpleNamespace(first=4, heard={"flat": [0.5, 0.25, 0.125], "ring": [3.0, 2.0], "none": []})
    watch.tell(cast(Any, SimpleNamespace(after=lambda *given: told.append(given))), course, 6)
    assert told == [(6, {"flat": 1.0, "ring": 2.0}, {"flat": marks(2), "ring": marks(2)}, {"flat": 0.125})]


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_marks_that_count_too_little_or_twice_fail(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right_s = profile
    monkeypatch.setattr(
        "distlab.lab.verify.timed.profile", lambda spans: {kind: times * of for kind, of in right_s(spans).items()}
    )
    off = {0.5: 0.625, 2.0: 1.25}[times]  # half of, or as much as, the 1.25 s that are marked
    assert f"classes that add up to {off} s more or less" in checked(right()._replace(profile={}))[1]


def test_of_two_steps_none_is_left_out() -> None:
    few = right()._replace(around=right().around[:2], marked=[], steps=Steps("flat", [9.0, 5.0], [1.0, 1.0]))
    assert checked(few) == (0, "2 steps")
