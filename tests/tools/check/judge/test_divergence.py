"""Why two ranks diverged, from their progress alone, without a script."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.tools.check.judge.divergence import Divergence, explain_divergence, questions
from distlab.tools.check.judge.progress import History
from distlab.tools.check.judge.rank_state import Call, CallPlace, GroupKey, Kind, RankState
from distlab.tools.check.judge.source_lines import branch_of

Lines = Callable[[int], CallPlace]

SCRIPT = """\
for epoch in range(2):
    for batch in loader:
        train(batch)
    validate()
"""


def history(
    place: CallPlace, drawn: int, *, ended: bool = False, skipped: int | None = None, package: str = ""
) -> History:
    """The history of a rank that trained on these batches of one pass."""
    result = History(package=package)
    result.begin_pass(0, place.line, place.file)
    backwards = 0
    for index in range(drawn):
        result.read_batch(0, index + 1)
        backwards += index != skipped
        result.set_backwards(backwards)
    if ended:
        result.end_pass(0)
    return result


def divergence_of(*sides: tuple[History, CallPlace]) -> Divergence:
    """The divergence of rank 0, which waits, and rank 1."""
    cases = [RankState(rank, 2, history=of_rank) for rank, (of_rank, _) in enumerate(sides)]
    group, kind = GroupKey((0, 1)), Kind("all_reduce")
    calls = {
        rank: Call(rank, place, group, kind, 0, 1, 0.0, reached=of_rank.now)
        for rank, (of_rank, place) in enumerate(sides)
    }
    return explain_divergence(cases, 0, 1, calls)


@pytest.fixture
def line(tmp_path: Path) -> Lines:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return lambda number: CallPlace(f"train.py:{number}", "", str(script))


PASS = "pass 0 over the DataLoader at train.py:2"


@pytest.mark.parametrize(
    ("ended", "at", "says"),
    [
        (True, 4, f"{PASS} has 3 batches on rank 1 and more on rank 0: uneven data"),
        (False, 4, f"rank 1 read 3 batches of {PASS}, which has more: a stop"),
    ],
)
def test_uneven_data_and_a_loop_that_a_rank_left(ended: bool, at: int, says: str, line: Lines) -> None:
    found = divergence_of((history(line(2), 4), line(3)), (history(line(2), 3, ended=ended), line(at)))
    assert says in found.text
    assert "the same number of batches" in found.remedy
    both_inside = divergence_of((history(line(2), 4), line(3)), (history(line(2), 3), line(3)))
    assert "a stop" not in both_inside.text


def test_a_batch_that_was_skipped_is_found_by_the_backward_passes(line: Lines) -> None:
    one, other = (history(line(2), 8, ended=True, skipped=skipped, package="accelerate") for skipped in (None, 3))
    found = divergence_of((one, line(3)), (other, line(4)))
    assert "rank 1 skipped a batch: before batch 4 of pass 0" in found.text
    assert "called backward 3 times, and rank 0 4" in found.text
    assert "accelerator.backward(0 * loss)" in found.remedy
    (question,) = questions([one, other])
    assert "rank 1 skipped a batch" in question and "is that intended?" in question
    assert not list(questions([one, one]))


def test_a_step_without_a_backward_pass_is_a_skipped_batch(line: Lines) -> None:
    one, other = history(line(2), 4), history(line(2), 4)
    for number in (1, 2):
        one.set_backwards(4 + number)
        for each in (one, other):
            each.step(number, "", "")
    found = divergence_of((one, line(3)), (other, line(3)))
    assert "rank 1 skipped a batch: it made 1 step without calling backward" in found.text


def test_uneven_pipeline_stages_are_no_question(line: Lines) -> None:
    """Stages of a pipeline that call backward twice per batch, or never."""
    one, twice = history(line(2), 8, ended=True), history(line(2), 8, ended=True)
    for each in (twice.passes[0],):
        each.backwards = [2 * made for made in each.backwards]
    twice.set_backwards(16)
    never = history(line(2), 8, ended=True)
    never.passes[0].backwards = [0] * 9
    never.set_backwards(0)
    assert not list(questions([one, twice]))
    assert not list(questions([one, never]))


def test_a_divergence_inside_a_framework_call_names_steps_and_batches() -> None:
    train = CallPlace("train.py:9", "x", "", "Trainer.train", package="transformers")
    one, other = history(train, 8, package="transformers"), history(train, 6, package="transformers")
    for each in (one, other):
        each.step(3, "Trainer.train", "transformers")
    found = divergence_of((one, train), (other, train))
    now = "after 3 optimizer steps / 6 batches of its DataLoader and rank 0 after 3"
    assert f"in Trainer.train rank 1 is {now}" in found.text
    assert "rank 1 read 6 batches" in found.text
    assert "EarlyStoppingCallback" in found.remedy
    evaluated = divergence_of((one, train), (one, train._replace(typed="Trainer.evaluate")))
    then = "ended after 3 optimizer steps / 8 batches of its DataLoader, rank 0 is at 3"
    assert f"rank 1's loop in Trainer.train {then}" in evaluated.text


def test_ranks_without_progress_have_no_divergence() -> None:
    assert divergence_of((History(), CallPlace()), (History(), CallPlace())) == Divergence()


BRANCHES = """\
def evaluate():
    gather()


def on_main():
    if not accelerator.is_main_process:
        return
    gather()


@rank_zero_only
def save():
    barrier()


def main():
    if trainer.is_world_process_zero():
        evaluate()
    evaluate()
"""


@pytest.mark.parametrize(
    ("number", "callers", "branch"),
    [
        (2, "train.py:18 from train.py:30", "is under `if trainer.is_world_process_zero()` (train.py:17)"),
        (2, "train.py:19", ""),
        (8, "", "comes after `if not accelerator.is_main_process: return` (train.py:6)"),
        (13, "", "is under `@rank_zero_only` (train.py:12)"),
    ],
)
def test_the_condition_of_a_caller_a_return_and_a_decorator(
    number: int, callers: str, branch: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BRANCHES)
    assert branch_of(CallPlace(f"train.py:{number}", "", str(script), callers=callers)) == branch
