"""A verdict names the error: which tensor on which rank, by which factor, which call, which bound."""

from collections.abc import Sequence

import pytest
import torch

from distlab.tools.puzzle.judge import difference, judge
from distlab.tools.puzzle.task import MESSAGES, Bound, CallRecord, Report, Task, Tensors, numbers

SIZE = 12
UNBOUNDED = Bound()


def task(bound: Bound = UNBOUNDED, allowed: frozenset[str] = MESSAGES, fault: str = "") -> Task:
    """Return a task: the sum of the ranks' numbers on each rank."""

    def expected(world_size: int) -> list[Tensors]:
        return [{"total": own(0) + own(1)}] * world_size

    def suspects(world_size: int) -> dict[str, list[Tensors]]:
        return {"its own part": [{"total": own(rank)} for rank in range(world_size)]}

    return Task(
        number=1, name="sum", title="", idea="", stub="", hints=(), allowed=allowed, limits="", play=lambda answer, bench: {},
        expected=expected, suspects=suspects, bound=lambda world_size: bound, inspect=lambda world_size, reports: fault,
    )  # fmt: skip


def own(rank: int) -> torch.Tensor:
    return numbers(rank, SIZE)


def reports(
    change: torch.Tensor | None = None, calls: Sequence[CallRecord] = (), wire_bytes: int | None = None
) -> list[Report]:
    """Return the reports of two ranks; the second has `change` instead of the sum."""
    right = own(0) + own(1)
    return [Report({"total": each}, calls, wire_bytes, 500) for each in (right, right if change is None else change)]


def test_right_numbers_within_the_bounds_pass() -> None:
    sent = [CallRecord("send", 96, "a.py:1")]
    assert judge(task(Bound(96, 192, 1, 0, 500)), 2, reports(own(0) + own(1) + 1e-13, sent, 150)) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (2 * (own(0) + own(1)), "it is 2 times what it should be (the number of ranks)"),
        (0.5 * (own(0) + own(1)), "it is 0.5 times what it should be (1 / the number of ranks)"),
        (own(1), "it is its own part"),
        (torch.zeros(SIZE, dtype=torch.float64), "it is 0 times what it should be (nothing was written)"),
        (torch.ones(3), "its shape is [3], expected [12]"),
        (torch.ones(SIZE), "its type is torch.float32, expected torch.float64"),
        (own(0) + own(1) + torch.eye(SIZE, dtype=torch.float64)[7], "in 1 of 12 numbers, those from 7 to 7"),
        (torch.full((SIZE,), torch.nan, dtype=torch.float64), "by nan"),
    ],
)
def test_a_tensor_that_differs_is_named_with_its_rank_and_why(change: torch.Tensor, words: str) -> None:
    sentence = judge(task(), 2, reports(change))
    assert sentence.startswith("total on rank 1 differs from one process: ")
    assert words in sentence


def test_a_result_that_is_no_tensor_is_named() -> None:
    assert judge(task(), 2, [Report({"total": None})] * 2).endswith("it is None, not a tensor")  # type: ignore[dict-item]
    assert difference(own(0), own(0)) == ""


@pytest.mark.parametrize(
    ("bound", "sentence"),
    [
        (Bound(rank_bytes=94), "96 bytes are sent on rank 0 with 2 ranks, allowed 94"),
        (Bound(all_bytes=190), "all ranks together send 192 bytes with 2 ranks, allowed 190"),
        (Bound(messages=0), "1 messages are sent on rank 0 with 2 ranks, allowed 0"),
        (Bound(peak_bytes=499), "500 bytes of tensors are kept at one time on rank 0 with 2 ranks, allowed 499"),
    ],
)
def test_an_exceeded_bound_is_named(bound: Bound, sentence: str) -> None:
    assert judge(task(bound), 2, reports(calls=[CallRecord("send", 96, "a.py:1")])) == sentence


def test_the_number_of_collectives_is_bounded() -> None:
    made = [CallRecord("all_reduce", 96, "a.py:1")] * 2
    sentence = judge(task(Bound(calls=1), frozenset({"all_reduce"})), 2, reports(calls=made))
    assert sentence == "2 collectives are called on rank 0 with 2 ranks, allowed 1"


def test_a_call_that_is_not_allowed_is_named_with_its_line() -> None:
    sentence = judge(task(), 2, reports(calls=[CallRecord("all_reduce", 96, "02_all_reduce.py:7")]))
    assert sentence == "all_reduce is called at 02_all_reduce.py:7 on rank 0; allowed here: recv, send"


def test_bytes_that_no_call_explains_are_found_at_the_sockets() -> None:
    sentence = judge(task(Bound(rank_bytes=96)), 2, reports(calls=[CallRecord("send", 96, "a.py:1")], wire_bytes=9000))
    assert sentence == "rank 0: its sockets sent 9,000 bytes, but its messages contain only 96"


def test_other_requirements_are_checked_before_the_bounds() -> None:
    assert (
        judge(task(Bound(rank_bytes=0), fault="too late"), 2, reports(calls=[CallRecord("send", 96, "a.py:1")]))
        == "too late"
    )
