"""A hang is reported as one, whatever caused it: its sentence, timeline and lines, and what is no hang."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.report import records
from distlab.lab.report.records import Check
from distlab.lab.report.sentences import UNTIL_ENDED, WHEN_FAILED, claim_name
from distlab.lab.report.verdict import as_entries
from distlab.tools.check.judge.coordinator import SURE_S, Coordinator
from distlab.tools.check.judge.rank_state import CHECKS, HANG, LOADERS, MATCH, CallPlace
from distlab.tools.check.judge.report import log_lines, records_of
from distlab.tools.check.judge.source_lines import MOST_BYTES, branch_of, source_line
from tests.tools.check.cases import SCRIPTS, check, coordinator_of, first_call, lines_of

MINE = Path(__file__).parents[4] / "mine"
IN_TORCH = ["/site-packages/torch/autograd/graph.py", 5, "_engine_run_backward"]
IN_WAIT = ["/lab/distlab/tools/check/watch/handles.py", 95, "wait"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_barrier_under_rank_0_is_a_hang(world_size: int, tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path / "checkpoint.pt"))
    checked = check(MINE / "resume_rank_0.py", world_size, tmp_path, *words, LAB_HANG_AFTER_S="2")
    assert checked.code == 1, checked.output
    hang, match = checked.run["findings"]
    assert (hang["check"], match["check"]) == (HANG, MATCH)
    assert hang["ranks"] == list(range(world_size))
    passed = next(line for line in checked.output.splitlines() if "passed" in line)
    assert HANG not in passed and "until the run was ended" in passed
    assert checked.output.splitlines()[-3].endswith("calls do not match, ranks hang")
    source = (MINE / "resume_rank_0.py").read_text().splitlines()
    for code in ("dist.barrier()  # wrong: all ranks must call it, and only one does", "loss.backward()"):
        number = next(number for number, line in enumerate(source, 1) if line.strip() == code)
        where = (
            rf"where rank \d resume_rank_0.py:{number}\b(?:(?!where).)*code {re.escape(' '.join(code.split())[:36])}"
        )
        assert re.search(where, checked.one_line)
    assert "let all ranks make the barrier at" in match["sentence"]
    assert "it is under `if dist.get_rank() == 0` (resume_rank_0.py:" in match["sentence"]
    assert_drawn_to_one_edge(next(tmp_path.glob("resume_rank_0-*")), world_size)


def assert_drawn_to_one_edge(folder: Path, world_size: int) -> None:
    """Each rank's last span ends with the run, and none is longer."""
    edges = set()
    for rank in range(world_size):
        lines = map(json.loads, (folder / f"rank{rank}.jsonl").read_text().splitlines())
        (spans,) = (line["spans"] for line in lines if line["record"] == "timeline")
        kind, label, start_s, end_s = spans[-1]
        assert kind == "wait" and label.endswith("until the run was ended")
        assert end_s - start_s > 2
        assert end_s == max(span[3] for span in spans)
        edges.add(round(end_s, 3))
    assert len(edges) == 1


def test_wrong_sums_are_no_hang(tmp_path: Path) -> None:
    """The control: mismatched calls that end."""
    checked = check(SCRIPTS / "faults" / "dims.py", 2, tmp_path, LAB_HANG_AFTER_S="2")
    assert {each["check"] for each in checked.run["findings"]} == {MATCH}
    assert f"passed until the run was ended: {HANG}" in checked.output
    assert "use tensors of one shape on all ranks" in checked.output


def test_a_run_that_ends_by_itself_passes_without_a_condition(tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / "by_hand.py", 2, tmp_path)
    assert f"passed: {MATCH}, {HANG}" in checked.output
    assert "until" not in checked.output


def stuck(frames: list[list[list[Any]]], cpu_s: list[float], look_at: float, starved_s: float = 0.0) -> Coordinator:
    """A coordinator of ranks in a barrier, the last one in an all_reduce. Each is in a frame, and has used processor
    time, or waited for a core, in the last half second."""
    reports = []
    for rank, (stack, used_s) in enumerate(zip(frames, cpu_s, strict=True)):
        op = "all_reduce" if rank == len(frames) - 1 else "barrier"
        looks = ["look", "S", 0.0, 0, 0.0, 1.0], ["look", "S", used_s, 0, starved_s, 1.5], ["stacks", {"7": stack}]
        reports.append([*first_call(op, f"train.py:{rank + 1}", range(len(frames))), ["wait", 1, 7, 0.0], *looks])
    coordinator = coordinator_of(*reports, hang_after_s=2.0)
    coordinator.evaluate(look_at)
    return coordinator


STUCK = [[IN_WAIT], [IN_WAIT], [IN_TORCH]]


def test_ranks_in_mismatched_calls_hang() -> None:
    coordinator = stuck(STUCK, [0.0, 0.0, 0.0], SURE_S)
    assert coordinator.over
    hang, _ = coordinator.findings
    assert (hang.check, hang.ranks) == (HANG, (0, 1, 2))
    assert "ranks 0 and 1 wait in barrier #0 of all ranks at train.py:1" not in hang.sentence  # their lines differ
    assert "rank 2 waits in all_reduce #0 of all ranks at train.py:3: the calls do not match" in hang.sentence
    assert not stuck(STUCK, [0.0, 0.0, 0.0], SURE_S - 0.5).over  # not sure yet


@pytest.mark.parametrize(
    ("frames", "cpu_s"),
    [
        (STUCK, [0.0, 0.0, 0.4]),  # rank 2 computes
        ([[IN_WAIT], [IN_WAIT], [["/home/me/train.py", 9, "train"]]], [0.0] * 3),  # rank 2 has gone on
        ([[IN_WAIT], [IN_WAIT], [[f"/site-packages/{LOADERS}loader.py", 9, "next"]]], [0.0] * 3),
        ([[IN_WAIT], [IN_WAIT], []], [0.0] * 3),  # the position of rank 2 is unknown
        (STUCK, None),  # no rank has a core
    ],
)
def test_no_hang_if_a_rank_may_continue(frames: list[list[list[Any]]], cpu_s: list[float] | None) -> None:
    coordinator = stuck(frames, cpu_s or [0.0] * 3, SURE_S, starved_s=0.0 if cpu_s else 0.45)
    assert coordinator.over
    assert {finding.check for finding in coordinator.findings} == {MATCH}


def test_a_new_stack_request_does_not_cancel_a_hang() -> None:
    """A stack arrives after it was requested: an evaluation between the two changes nothing."""
    coordinator = stuck(STUCK, [0.0, 0.0, 0.0], SURE_S - 0.5)
    coordinator.receive(2, lines_of(["look", "S", 0.0, 0, 0.0, 2.0], ["stacks", {}]), SURE_S - 0.4)
    coordinator.evaluate(SURE_S)
    assert coordinator.over
    assert {finding.check for finding in coordinator.findings} == {HANG, MATCH}


def test_the_verdict_waits_for_a_late_stack() -> None:
    coordinator = stuck([[IN_WAIT], [IN_WAIT], []], [0.0] * 3, SURE_S - 0.5)
    assert not coordinator.over
    coordinator.receive(2, lines_of(["stacks", {"7": [IN_TORCH]}]), SURE_S - 0.4)
    coordinator.evaluate(SURE_S)
    assert {finding.check for finding in coordinator.findings} == {HANG, MATCH}


def test_undecided_checks_say_until_when_they_passed() -> None:
    coordinator = stuck(STUCK, [0.0, 0.0, 0.0], SURE_S)
    checks = {each.name: each for each in records_of(coordinator) if isinstance(each, records.Check)}
    assert [name for name, each in checks.items() if each.detail != UNTIL_ENDED] == [MATCH, HANG]
    assert any(line.startswith("where") and "train.py:3" in line for line in log_lines(coordinator))


def test_a_failed_check_is_named_by_its_fault() -> None:
    assert set(CHECKS) <= set(WHEN_FAILED)
    for name in CHECKS:
        (failed,) = as_entries([Check("", name, 1, 0, unit="findings")])
        (passed,) = as_entries([Check("", name, 0, 0, unit="findings")])
        assert (claim_name(failed), claim_name(passed)) == (WHEN_FAILED[name], name)
        assert failed["name"] == name  # run.json keeps it
    (other,) = as_entries([Check("naive", "buffers", 1, 0)])
    assert claim_name(other) == "naive buffers"


SCRIPT = """def save(rank):
    if rank == 0:
        for _ in range(2):
            if True:
                barrier()
    else:
        barrier()
    barrier()
if rank == 0: barrier()
if (
    rank == 0
    and agreed(all_reduce(loss))
):
    barrier()
"""
BRANCHES = {
    5: "is under `if rank == 0` (train.py:2)",
    7: "is in the other branch of `if rank == 0` (train.py:2)",
    8: "",
    9: "is under `if rank == 0` (train.py:9)",  # a branch may be on one line
    12: "",  # and its condition on several
    14: "is under `if rank == 0 and agreed(all_reduce(loss))` (train.py:10)",
}


@pytest.mark.parametrize("number", BRANCHES)
def test_the_text_and_the_branch_of_a_line(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    place = CallPlace(f"train.py:{number}", "", str(tmp_path / "train.py"))
    assert source_line(place) == SCRIPT.splitlines()[number - 1].strip()
    assert branch_of(place) == BRANCHES[number]


def test_unreadable_lines_have_no_text(tmp_path: Path) -> None:
    """A script may report any file; a device or a directory must not be read."""
    (tmp_path / "large.py").write_bytes(b"#" * (MOST_BYTES + 1))
    (tmp_path / "broken.py").write_text("if rank == 0:\n")
    for file in ("/dev/zero", str(tmp_path), "", "a\0.py", str(tmp_path / "none.py"), str(tmp_path / "large.py")):
        place = CallPlace("train.py:1", "", file)
        assert source_line(place) == branch_of(place) == ""
    for line in ("train.py", "train.py:0", "train.py:99", "train.py:-1", "train.py:" + "9" * 5000, ""):
        assert source_line(CallPlace(line, "", str(tmp_path / "broken.py"))) == ""
    assert branch_of(CallPlace("train.py:1", "", str(tmp_path / "broken.py"))) == ""
