"""The comm lesson: its parts on real ranks with a lab that only records calls, and the whole mode once."""

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments import comm
from distlab.experiments.comm import benchmark, checks
from distlab.experiments.comm import primitives as gradients
from distlab.experiments.comm.bugs import Wrapper
from distlab.lab.config import Config, ConfigError
from distlab.lab.lab import RunHooks
from distlab.lab.rank.preflight import refuse
from distlab.lab.report.progress import Work
from distlab.lab.verify.records import Drawn
from distlab.techniques.collectives.by_hand import ALGORITHMS, Collective
from distlab.techniques.collectives.costs import all_reduce_bytes, all_reduce_seconds
from distlab.techniques.collectives.point_to_point import Peers, Steps
from distlab.tools.plan.calibration import calibrate
from tests.lab.test_lab import held as holding
from tests.lab.test_lab import lab_alone
from tests.labs import Runs
from tests.warm_ranks import Ranks


class RecordingLab:
    """A lab that records checks, tables and lines; it exchanges values over the process group."""

    def __init__(self, group: dist.ProcessGroup, bug: str | None) -> None:
        self.config = Config.read(
            {"RUN_MODE": "comm", "WORLD_SIZE": str(group.size()), "LAB_SWEEP_MIB": "0.25"}
            | ({"LAB_BUG": bug} if bug else {})
        )
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.device = torch.device("cpu")
        self.exchange, self.mode, self.hooks = self, comm.MODE, RunHooks(secret=b"the key of the run")
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.tables: dict[str, list[list[Any]]] = {}
        self.lines: list[str] = []
        self.work = Work()

    def check(self, name: str, max_abs_diff: float, tolerance: float, *_: Any, **__: Any) -> None:
        (self.passed if max_abs_diff <= tolerance else self.failed).add(name)

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in rows)
        self.tables[title] = rows

    def say(self, text: str, *_: Any, **__: Any) -> None:
        self.lines.append(text)

    def note(self, _heading: str, text: str) -> None:
        self.lines.append(text)

    def gather(self, _: str, value: Any) -> list[Any] | None:
        everyone = self.everyone("", value)
        return everyone if self.rank == 0 else None

    def wants(self, variant: str) -> bool:
        return variant in comm.MODE.names

    def at(self, step: int, phase: str) -> None:
        pass

    def finished(self, section: str) -> None:
        assert section == "proof"

    def everyone(self, _: str, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values


def check_contents_only(lab: Any, collectives: dict[str, Collective], _: int) -> None:
    benchmark.check_contents(lab, {}, collectives)


def run_lesson(
    group: dist.ProcessGroup, bug: str | None
) -> tuple[set[str], set[str], dict[str, list[list[Any]]], list[str]]:
    lab: Any = RecordingLab(group, bug)
    # The measurements and the drawing take long, and have their own tests below.
    with patch.object(benchmark, "run", check_contents_only), patch.object(comm, "draw_all"):
        run = comm.MODE.mistaken(bug).run
        assert run is not None
        run(lab)
    return lab.passed - lab.failed, lab.failed, lab.tables, lab.lines


Lessons = Callable[[int], list[tuple[set[str], set[str], dict[str, list[list[Any]]], list[str]]]]


@pytest.fixture(scope="module")
def lessons(ranks: Ranks) -> Lessons:
    """Return what each of `world_size` ranks recorded in the lesson without a bug, which runs once per size."""
    return cache(lambda world_size: ranks(world_size, run_lesson, None))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_check_passes(lessons: Lessons, world_size: int) -> None:
    for passed, failed, _, _ in lessons(world_size):
        assert failed == set()
        assert passed == {"forward", "gradients", "no autograd", "demo", "sum", "ring", "contents"}


# Other checks that fail with a broken algorithm, because its sums are wrong too.
ALSO_FAILS = {"skipped_round": {"sum", "contents"}}


@pytest.mark.parametrize("bug", sorted(comm.MODE.mistakes))
def test_each_bug_fails_its_own_check(ranks: Ranks, bug: str) -> None:
    failed = set.union(*(failed for _, failed, _, _ in ranks(3, run_lesson, bug)))
    assert failed == {comm.MODE.mistakes[bug].check} | ALSO_FAILS.get(bug, set())


def failed_with_wrong_all_gather(group: dist.ProcessGroup) -> set[str]:
    """Return the failed checks if `all_gather` leaves the last row unchanged."""

    def wrong_all_gather(rows: list[Tensor], x: Tensor, **how: Any) -> None:
        last = rows[-1].clone()
        correct(rows, x, **how)
        rows[-1].copy_(last)

    correct = dist.all_gather
    with patch.object(dist, "all_gather", wrong_all_gather), patch.object(Collective, "all_gather", lambda *_: None):
        return run_lesson(group, None)[1]


def test_a_wrong_all_gather_is_detected(ranks: Ranks) -> None:
    assert set.intersection(*ranks(3, failed_with_wrong_all_gather)) >= {"forward", "demo"}


def failed_with_differentiable_gather(group: dist.ProcessGroup) -> set[str]:
    def differentiable_gather(parts: list[Tensor], x: Tensor, **_: Any) -> None:
        parts[:] = [part + x for part in parts]

    with patch.object(dist, "all_gather", differentiable_gather):
        lab: Any = RecordingLab(group, None)
        gradients.nothing_recorded(lab)
    return lab.failed  # type: ignore[no-any-return]


def test_a_gather_with_a_gradient_is_detected(ranks: Ranks) -> None:
    assert ranks(2, failed_with_differentiable_gather) == [{"no autograd"}] * 2


def largest_difference(group: dist.ProcessGroup, name: str, op: str, change: str) -> float:
    """Return the largest error of `op` if its output was changed on rank 1."""
    correct = ALGORITHMS[name]

    class Wrong(Wrapper):
        def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
            yield from self.correct.all_reduce(peers, tensor)
            spoil(tensor)

        def all_gather(self, peers: Peers, tensor: Tensor) -> Steps:
            yield from self.correct.all_gather(peers, tensor)
            spoil(tensor)

    def spoil(tensor: Tensor) -> None:
        if group.rank() == 1 and change == "last" and tensor.numel():
            tensor.view(-1)[-1] += 1
        if group.rank() == 1 and change == "shifted":
            tensor.copy_(tensor.roll(1))

    return checks.uneven(Collective(group, name, {name: Wrong(correct)}), op, torch.device("cpu"))


@pytest.mark.parametrize("change", ["", "last", "shifted"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_a_wrong_or_shifted_element_is_detected(ranks: Ranks, op: str, change: str) -> None:
    differences = ranks(3, largest_difference, "tree", op, change)
    assert differences[0] == differences[2] == 0
    assert bool(differences[1]) == bool(change)


@pytest.mark.parametrize("world_size", [3, 5])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithms_are_exact_at_uneven_sizes(ranks: Ranks, world_size: int, name: str) -> None:
    for op in benchmark.BYTES:
        assert ranks(world_size, largest_difference, name, op, "") == [0.0] * world_size


def test_inputs_differ_by_rank_position_and_repeat() -> None:
    device = torch.device("cpu")
    rows = torch.stack([checks.numbers(rank, repeat, device) for rank in range(8) for repeat in range(3)])
    assert [row.unique().numel() for row in rows] == [checks.PERIOD] * 24
    assert (rows.unsqueeze(0) == rows[:4].unsqueeze(1)).sum(2).fill_diagonal_(0).max() <= 1
    assert float(checks.total(8, 1, device).max()) < 2**24


def reduce_to_rank_0(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """A wrong all_reduce: only rank 0 gets the sum."""
    dist.reduce(tensor, group=group, group_dst=0)


def failed_with_sum_on_rank_0_only(group: dist.ProcessGroup) -> set[str]:
    with patch.object(comm, "one_by_one", reduce_to_rank_0):
        return run_lesson(group, None)[1]


def test_a_sum_on_rank_0_only_is_detected(ranks: Ranks) -> None:
    assert ranks(3, failed_with_sum_on_rank_0_only) == [set(), {"sum"}, {"sum"}]


def naive_equals_torchs(group: dist.ProcessGroup) -> bool:
    naive = torch.arange(5.0) * (group.rank() + 1)
    torchs = naive.clone()
    comm.one_by_one(naive, group)
    dist.all_reduce(torchs, group=group)
    return torch.equal(naive, torchs)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_naive_all_reduce_equals_torchs(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size, naive_equals_torchs) == [True] * world_size


def test_the_lessons_printed_run(lessons: Lessons) -> None:
    first, second = (lines for _, _, _, lines in lessons(2))
    assert "rank 0 full data: [37, 38, 39, 40]" in first
    assert "rank 1 received data: [39.0, 40.0]" in second
    assert "rank 1 local result: [78.0, 80.0], shape [2]" in second
    assert "rank 0 final gathered result: [37.0, 38.0, 78.0, 80.0]" in first
    lines = lessons(3)[2][3]
    assert "rank 2 final gathered result: [37.0, 38.0, 78.0, 120.0]" in lines, "the remainder of 4 / 3 is lost"


def table(lessons: Lessons, world_size: int, title: str) -> list[list[Any]]:
    """Return the rows of a table that rank 0 recorded."""
    return next(rows for each, rows in lessons(world_size)[0][2].items() if each.startswith(title))


def test_where_the_lessons_table_is_wrong(lessons: Lessons) -> None:
    rows = table(lessons, 2, "The gradient of x on rank 0")
    wrong = {(row[0], row[1]) for row in rows if str(row[6]).startswith("WRONG")}
    assert wrong == {("broadcast", "replicated"), ("all_gather", "own"), ("all_reduce", "replicated")}
    assert all(row[3] == row[4] for row in rows)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_rings_rounds(lessons: Lessons, world_size: int) -> None:
    first, *rounds = table(lessons, world_size, "A ring all_reduce")
    assert [action for _, action, _, _ in rounds] == ["add"] * (world_size - 1) + ["copy"] * (world_size - 1)
    assert first[3] == " ".join(str(chunk) for chunk in range(1, world_size + 1)), "the first chunks of rank 0"
    if world_size == 4:  # "worker 0 sends chunk 0 to worker 1, worker 1 sends chunk 1 to worker 2, and so on"
        assert rounds[0][2] == "0 -> 1: 1, 1 -> 2: 20, 2 -> 3: 300, 3 -> 0: 4000"
        assert rounds[1][2] == "0 -> 1: 4004, 1 -> 2: 11, 2 -> 3: 220, 3 -> 0: 3300"
        assert rounds[-1][3] == "1111 2222 3333 4444"


@pytest.mark.parametrize("name", comm.MODE.names)
def test_the_fit_recovers_latency_and_bandwidth(name: str) -> None:
    times = {nbytes: all_reduce_seconds(name, 4, nbytes, 5e-4, 2e9) for nbytes in benchmark.SIZES}
    latency_s, bytes_per_s, error = benchmark.fit(name, 4, times)
    assert latency_s == pytest.approx(5e-4)
    assert bytes_per_s == pytest.approx(2e9)
    assert error < 1e-6


def test_refusals_and_predictions() -> None:
    for bug in sorted(comm.MODE.mistakes):
        alone = Config.model_validate({"run_mode": "comm", "world_size": 1, "bug": bug})
        with pytest.raises(ConfigError, match=r"it takes [23] ranks"):
            refuse(alone, comm.MODE)
        refuse(alone.model_copy(update={"bug": None}), comm.MODE)
        refuse(alone.model_copy(update={"world_size": 3, "proof": False}), comm.MODE)
    predictions = {
        entry.variant: entry
        for entry in comm.MODE.predict(Config.model_validate({"run_mode": "comm", "world_size": 4}))
    }
    assert tuple(predictions) == comm.MODE.names
    assert predictions["ring"].value == (1.5 * (4 << 20),) * 4
    assert predictions["server"].value == (3.0 * (4 << 20), *[float(4 << 20)] * 3)


def test_the_whole_mode(runs: Runs) -> None:
    judged, _, folder = runs(2, RUN_MODE="comm", LAB_VARIANT="gloo,direct", LAB_SWEEP_MIB="4", LAB_LOG="full")
    assert judged["verdict"] == "pass"
    compared = {(entry["variant"], entry["name"]) for entry in judged["comparisons"]}
    if compared:  # the kernel counts what its sockets sent
        assert ("direct", "wire bytes all_reduce 4 MiB") in compared
        assert {variant for variant, _ in compared} == {"gloo", "direct"}
    assert "gathers    rank 1 final gathered result: [37.0, 38.0, 78.0, 80.0]" in (folder / "rank1.log").read_text()
    link = calibrate(folder).link  # `python -m distlab plan` uses it
    assert link is not None
    assert 0 <= link.latency_s < 0.1 and 1e7 < link.bytes_per_s < 1e12


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.02, False), (0.5, False)])
def test_wrong_byte_counts_fail_the_sweep(factor: float, holds: bool) -> None:
    lab, nbytes = lab_alone(), 4 * benchmark.MIB
    predicted = benchmark.BYTES["all_reduce"]("ring", lab.world_size, nbytes, 0)
    benchmark.compare(lab, {("all_reduce", nbytes, "ring"): benchmark.Cost(wire_bytes=factor * predicted)})
    assert holding(lab) == {"wire bytes all_reduce 4 MiB": holds}


def test_small_calls_are_shown_in_megabytes_per_second() -> None:
    assert benchmark.speed_cell(benchmark.KIB, benchmark.KIB / 0.01) == "0.102 MB/s"
    assert benchmark.speed_cell(4 * benchmark.MIB, 4 * benchmark.MIB / 0.01) == "0.419 GB/s"
    assert benchmark.speed_cell(64 * benchmark.KIB, 64 * benchmark.KIB / 0.01) == "0.007 GB/s"


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (0.98, False)])
def test_missing_messages_in_the_drawing_fail(factor: float, holds: bool) -> None:
    lab: Any = lab_alone()
    lab.config, lab.device = Config.read({"RUN_MODE": "comm", "WORLD_SIZE": "2"}), torch.device("cpu")
    sent = {name: Drawn(factor * all_reduce_bytes(name, 2, comm.PREDICTED_BYTES), 2) for name in ("ring", "server")}
    with patch.object(comm, "draw", lambda *_: sent):
        comm.draw_all(lab, {})
    assert holding(lab) == {"drawn bytes": holds}
