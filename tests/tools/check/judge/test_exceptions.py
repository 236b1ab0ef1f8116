"""Sentences about exceptions: one fault of several ranks is one finding that says what happened and what to change."""

import json

import pytest

from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.exceptions import describe_exception, failure_key, first_informative_line, shorten
from distlab.tools.check.judge.rank_state import Raised
from distlab.tools.check.watch.script_error import describe_error
from tests.tools.check.cases import coordinator_of

OF_A_CHILD = (
    "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  ...\nValueError: no\n"
)
UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates more. "
    "\nParameter indices which did not receive grad for rank 1: 2 3\n In addition"
)


def raised_on(*texts: str) -> Coordinator:
    raised = ([["raised", "ValueError", text, "", "train.py:3", 1.0 + rank]] for rank, text in enumerate(texts))
    return coordinator_of(*raised, gather_s=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "not of <torch.distributed.ProcessGroup object at 0x7f{rank}a>", "no store at 127.0.0.1:2950{rank}",
        "lost the worker with pid 4{rank}7", "no gradient for rank {rank}: a.weight", "invalid device cuda:{rank}",
    ],
)  # fmt: skip
def test_one_fault_on_several_ranks_is_one_finding(text: str) -> None:
    (finding,) = raised_on(*(text.format(rank=rank) for rank in range(3))).findings
    assert finding.ranks == (0, 1, 2)
    assert finding.sentence.startswith("ranks 0, 1 and 2 raised ValueError: ")
    assert finding.sentence.endswith("at train.py:3")


def test_two_faults_stay_two() -> None:
    assert len(raised_on("label 11 is out of range", "label 12 is out of range").findings) == 2
    assert failure_key("rank 1 and rank 2", 1) != failure_key("rank 1 and rank 2", 2)


def test_the_first_informative_line_is_used() -> None:
    assert first_informative_line("\n\n  shapes differ\nmore") == "shapes differ"
    assert first_informative_line(OF_A_CHILD) == "process 1 raised ValueError: no"
    assert first_informative_line("") == ""


def test_words_are_not_cut_in_two() -> None:
    text = "word " * 100
    assert shorten(text, 50) == f"{'word ' * 9}..."
    assert shorten("x" * 60, 50) == "x" * 46 + " ..."
    assert len(shorten(text)) <= 400


def test_the_remedy_is_in_the_sentence() -> None:
    sentence = describe_exception(Raised("RuntimeError", UNUSED, "", "", 0.0), "train.py:9")
    assert sentence == (
        "raised RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one at"
        " train.py:9: parameters 2, 3 of the module got no gradient on rank 1: use each parameter in the loss"
        " on each rank, or pass find_unused_parameters=True to DistributedDataParallel"
    )
    assert describe_exception(Raised("SystemExit", "3", "", "", 0.0), "") == "called sys.exit with 3"


def test_frames_of_libraries_are_counted_and_not_shown() -> None:
    try:
        try:
            json.loads("{")
        except ValueError as inner:
            raise KeyError("settings") from inner
    except KeyError as error:
        kind, text, trace, _ = describe_error(error, lambda file: "user" if file == __file__ else "library")
    assert (kind, text) == ("KeyError", "'settings'")
    assert trace.count("Traceback (most recent call last):") == 2
    assert "  ... 2 lines of libraries ...\n" in trace
    assert "in raw_decode" in trace  # where it was raised
    assert "in decode\n" not in trace
    assert "This was the direct cause of the following exception:" in trace
