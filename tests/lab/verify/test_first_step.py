"""The logged step: for which rank a rank waited, and which parameters are in the memory that it sends."""

import pytest
import torch

from distlab.lab.measure.samples import stretch_of
from distlab.lab.report import records
from distlab.lab.verify.first_step import last_to_enter, parameter_record, without_interval
from distlab.lab.verify.logged_step import allowed_bytes, keys_of, parts_of_storages
from distlab.techniques.collectives.sharded_tensor import LocalShard
from tests.labs import Runs

CALLS = [
    [["all_reduce", [0, 1, 2], 0, 1.0], ["send", [0, 1], 7, 2.0]],
    [["all_reduce", [0, 1, 2], 0, 1.5], ["recv", [0, 1], 7, 1.6]],
    [["all_reduce", [0, 1, 2], 0, 4.0]],
]


def last(calls: list[list[list[object]]], me: int) -> list[tuple[int, float]]:
    return last_to_enter(calls, [keys_of(of_rank) for of_rank in calls], me)


def test_the_last_rank_of_a_collective_and_the_sender_of_a_message() -> None:
    assert last(CALLS, 1) == [(2, 4.0), (0, 2.0)]
    assert last(CALLS, 2) == [(2, 4.0)], "the last rank waits for no other"
    assert last(CALLS, 0) == [(2, 4.0), (0, 2.0)], "a send waits for no rank"


def test_the_second_collective_of_a_group_is_the_second_of_each_rank() -> None:
    twice = [[["all_reduce", [0, 1], 0, start_s] for start_s in starts] for starts in ([1.0, 5.0], [2.0, 3.0])]
    assert last(twice, 0) == [(1, 2.0), (0, 5.0)]
    assert last(twice, 1) == [(1, 2.0), (0, 5.0)]


def test_no_rank_waits_for_a_rank_that_has_left() -> None:
    assert last([CALLS[0], CALLS[1], []], 1)[0] == (1, 1.5)


def test_each_idle_moment_counts_for_one_call() -> None:
    left, seconds = without_interval([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.5)
    assert (left, seconds) == ([(0.0, 1.0), (3.5, 4.0)], 1.5)
    assert without_interval(left, 1.0, 3.5) == (left, 0.0)


def test_what_a_rank_has_of_a_parameter() -> None:
    part = LocalShard(torch.Size((6, 2)), [((2, 0), torch.zeros(3, 2))])
    assert parameter_record("w", part) == ("w", [3, 2], [6, 2], [[2, 4]], 24)
    assert parameter_record("w", torch.zeros(6, 2)) == ("w", [6, 2], [6, 2], [], 48)


class Holder:
    """A strategy of one parameter with a gradient."""

    def __init__(self) -> None:
        self.weight, self.gradient = torch.zeros(4), torch.zeros(4)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weights.w": self.weight, "optimizer.step.w": torch.tensor(0.0)}

    def held(self, kind: str) -> list[tuple[str, torch.Tensor]]:
        return [("w", self.gradient)] if kind == "gradients" else []


def test_memory_is_named_by_what_lies_in_it() -> None:
    holder = Holder()
    parts = parts_of_storages(holder)  # type: ignore[arg-type]
    weight, gradient = (parts[stretch_of(each).storage] for each in (holder.weight, holder.gradient[1:]))
    assert [(part.name, part.offset, part.numel) for part in weight] == [("w", 0, 4)]
    assert [part.name for part in gradient] == ["gradient of w"]
    assert stretch_of(torch.zeros(2, 3)).storage not in parts


@pytest.mark.timeout(110)
def test_the_others_wait_for_a_rank_that_is_slow(runs: Runs) -> None:
    slow = {"LAB_SLOW_RANK": "2:0.05", "LAB_VARIANT": "flat", "LAB_PROOF": "0", "LAB_WIDTH": "64"}
    ran = runs(3, RUN_MODE="dp", **slow)
    waited = {rank: records_of(ran.records[rank]) for rank in range(3)}
    assert waited[0].keys() == waited[1].keys() == {2}
    assert waited[2].get(0, 0.0) + waited[2].get(1, 0.0) < min(waited[0][2], waited[1][2])


def records_of(found: list[records.Record]) -> dict[int, float]:
    """Seconds that were waited in the first step, by rank."""
    (step,) = [record for record in found if isinstance(record, records.FirstStep)]
    waited: dict[int, float] = {}
    for call in step.calls:
        if call[9] >= 0:
            waited[call[9]] = waited.get(call[9], 0.0) + call[8]
    return waited


@pytest.mark.parametrize(
    ("limit_bytes", "allowed"), [(None, 256 << 20), (1 << 50, 256 << 20), (320 << 20, 10 << 20)]
)  # fmt: skip
def test_copies_take_a_small_part_of_a_containers_memory(limit_bytes: int | None, allowed: int) -> None:
    assert allowed_bytes(limit_bytes) == allowed
