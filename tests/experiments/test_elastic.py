"""The mode `elastic`: injected losses, and injected bugs that its checks must detect."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.experiments.elastic.checks import AGREED, COLUMNS, NEXT, event_row, result, time_faults
from distlab.experiments.elastic.recovery import (
    COMPUTED,
    TORN,
    Course,
    Event,
    Killed,
    Loss,
    LossPlan,
    Torn,
    draw_losses,
)
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.techniques.elastic import shards
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.shards import StoredVersion
from distlab.techniques.elastic.strategy import ShardedSurvivor, Survivor
from tests.labs import Runs, failed_with
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def compute_twice(right: Any) -> Any:
    """Compute each gradient twice."""

    def wrong(self: Survivor, place: int, size: int) -> torch.Tensor:
        row: torch.Tensor = right(self, place, size)
        self.at("computed")
        return row

    return wrong


def double_the_loss(right: Any) -> Any:
    """Record twice the loss."""

    def wrong(self: Survivor, place: int, size: int) -> torch.Tensor:
        row: torch.Tensor = right(self, place, size)
        row[-1] *= 2
        return row

    return wrong


def reverse_members(right: Any) -> Any:
    """Record the members in another order than the one in which samples are assigned."""

    def wrong(self: Course, *arguments: Any) -> Any:
        plan = right(self, *arguments)
        plan["record"][-1][1] = plan["record"][-1][1][::-1]
        return plan

    return wrong


def send_one_twice(right: Any) -> Any:
    """Send the first moved piece twice."""

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return [*found, *found[:1]]

    return wrong


def sum_twice(right: Any) -> Any:
    """Send the small sum of each step twice."""

    def wrong(self: Regroup, tensor: torch.Tensor) -> torch.Tensor:
        right(self, tensor.clone())
        summed: torch.Tensor = right(self, tensor)
        return summed

    return wrong


def keep_old_moments(right: Any) -> Any:
    """Keep the moments of the step before."""

    def wrong(self: ShardedSurvivor, version: StoredVersion, weights: torch.Tensor) -> None:
        before = self.versions[0]
        right(self, version, weights)
        self.versions = [version, before]

    return wrong


FAULTS = {
    "moved bytes": (shards, "moves", send_one_twice),
    "called bytes": (Regroup, "sum", sum_twice),
    "moments held": (ShardedSurvivor, "commit", keep_old_moments),
    "redone": (Survivor, "computed", compute_twice),
    "losses": (Survivor, "computed", double_the_loss),
    "record": (Course, "planned", reverse_members),
}


SMALL = {"RUN_MODE": "elastic", "LAB_STEPS": "6", "LAB_DEPTH": "1"}


@pytest.mark.parametrize("check", ["redone", "losses", "record"])
def test_a_wrong_step_fails_its_check(ranks: Ranks, tmp_path: Path, check: str) -> None:
    settings = SMALL | {"LAB_VARIANT": "join", "LAB_LOSSES": "0"}
    found = failed_with(ranks, tmp_path, "tests.experiments.test_elastic", check, **settings)
    assert check in found


def test_a_shard_sent_twice_fails_its_check(ranks: Ranks, tmp_path: Path) -> None:
    settings = SMALL | {"LAB_VARIANT": "zero1", "LAB_LOSSES": "1"}
    found = failed_with(ranks, tmp_path, "tests.experiments.test_elastic", "moved bytes", **settings)
    assert found == {"moved bytes"}


@pytest.mark.parametrize("variant", ["shrink", "zero1"])
def test_a_step_that_sends_more_fails_its_check(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    settings = SMALL | {"LAB_VARIANT": variant, "LAB_LOSSES": "0"}
    found = failed_with(ranks, tmp_path, "tests.experiments.test_elastic", "called bytes", **settings)
    assert found == {"called bytes", "wire bytes"}


def test_moments_kept_too_long_fail_their_check(ranks: Ranks, tmp_path: Path) -> None:
    settings = SMALL | {"LAB_VARIANT": "zero1", "LAB_LOSSES": "0"}
    found = failed_with(ranks, tmp_path, "tests.experiments.test_elastic", "moments held", **settings)
    assert found == {"moments held"}


@pytest.mark.parametrize("rescale", ["0", "1"])
def test_three_ranks_lose_two_in_each_variant(runs: Runs, rescale: str) -> None:
    small = {"LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "8", "LAB_SAVED_EVERY": "2", "LAB_RESCALE": rescale}
    run = runs(3, RUN_MODE="elastic", **small)
    assert run.judged["verdict"] == "pass"
    variants = {check["variant"] for check in run.judged["checks"] if check["name"] == "weights"}
    assert variants == set(load("elastic").requested(()).names)


def test_drawn_losses_leave_a_survivor_and_are_repeatable() -> None:
    losses = draw_losses(7, [0, 1, 2], 20, 5, returns=False)
    assert losses == draw_losses(7, [0, 1, 2], 20, 5, returns=False)
    assert len({loss.rank for loss in losses}) == len(losses) == 2
    assert [loss.moment for loss in losses] == [TORN, COMPUTED]
    assert len(draw_losses(7, [0, 1], 20, 5, returns=True)) == 5
    assert draw_losses(7, [0], 20, 5, returns=True) == []
    assert all(loss.step < 18 for loss in draw_losses(7, [0, 1, 2], 20, 17, returns=True))


def test_a_rank_performs_its_own_losses_once() -> None:
    losses = [Loss(3, 1, COMPUTED), Loss(5, 2, TORN, without=1)]
    plan = LossPlan(losses, rank=1)
    plan.at(3, "summed")
    with pytest.raises(Killed):
        plan.at(3, "computed")
    plan.at(3, "computed")
    with pytest.raises(Torn):
        plan.at(5, "summed")
    LossPlan(losses, rank=0).at(3, "computed")


@pytest.mark.parametrize(
    ("settings", "impossible"),
    [({"WORLD_SIZE": "1"}, {"shrink", "join", "zero1", "plain"}), ({"WORLD_SIZE": "2"}, set())],
)
def test_variants_that_need_survivors_are_excluded_on_one_rank(settings: dict[str, str], impossible: set[str]) -> None:
    config = Config.read({"RUN_MODE": "elastic", "RANK": "0", "MASTER_ADDR": "127.0.0.1"} | settings)
    assert set(load("elastic").cannot(config)) == impossible


def test_a_gpu_is_refused() -> None:
    config = Config.read({"RUN_MODE": "elastic", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "LAB_DEVICE": "cuda"})
    assert any("LAB_DEVICE='cuda'" in sentence for sentence in load("elastic").refuse(config))


CHANGE = Event("lost: rank 1", 100.0, 100.01, 100.05, 100.25, [0, 1], [0], 3, 3, False)


def test_right_times_of_a_change_pass() -> None:
    assert list(time_faults(CHANGE, [99.9, 100.25, 100.4])) == []
    assert list(time_faults(CHANGE._replace(next_step_at=0.0), [99.9])) == []  # another change came first


@pytest.mark.parametrize(
    ("event", "column", "shown_ms"),
    [
        (CHANGE, NEXT, 200.0),  # from the agreement
        (CHANGE, AGREED, 40.0),  # from the meeting
        (CHANGE._replace(began_at=100.04), "", 0.0),  # the change began after the agreement
        (CHANGE._replace(next_step_at=100.4), "", 0.0),  # not the first step after it
    ],
)
def test_times_with_a_wrong_start_fail(
    monkeypatch: pytest.MonkeyPatch, event: Event, column: str, shown_ms: float
) -> None:
    def shown_row(event: Event, first_at: float) -> list[Any]:
        cells = zip(COLUMNS[1:], event_row(event, first_at), strict=True)
        return [shown_ms if name == column else cell for name, cell in cells]

    monkeypatch.setattr("distlab.experiments.elastic.checks.event_row", shown_row)
    assert len(list(time_faults(event, [99.9, 100.25, 100.4]))) == 1


def test_a_row_without_a_next_step_has_no_times() -> None:
    assert event_row(CHANGE, 90.0)[-3:] == [50.0, 250.0, 10.25]
    assert event_row(CHANGE._replace(next_step_at=0.0), 90.0)[-3:] == [50.0, "", ""]


def test_the_result_is_one_line() -> None:
    rows = [["shrink", *event_row(CHANGE, 90.0)], ["shrink", *event_row(CHANGE._replace(next_step_at=0.0), 90.0)]]
    rows += [["join", *event_row(CHANGE._replace(why="asked", next_step_at=190.0), 90.0)]]
    assert result(rows, 6) == "2 losses: recovery 0.25 to 0.25 s; 0 of 6 variants lost a step"
    rows += [["zero1", *event_row(CHANGE._replace(applied_before=5), 90.0)]]
    assert result(rows, 6).endswith("1 of 6 variants lost a step")
    assert result(rows[2:3], 6) == "no rank was lost"
