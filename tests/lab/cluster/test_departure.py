"""The exit code and sentence of a failed rank, and which survivor writes run.json."""

import errno
import os
import time
from pathlib import Path

import pytest

from distlab.lab.cluster import ClusterError, departure
from distlab.lab.cluster.departure import Succession, error_verdicts, may_be_a_loss
from distlab.lab.cluster.messages import Place, Verdict
from distlab.lab.config import ConfigError
from distlab.lab.report.records import Said
from distlab.lab.report.run_folder import Journal, Unwritable


def codes(error: BaseException) -> tuple[int, int]:
    """Return the exit codes of the failed rank and of the others."""
    own, for_others = error_verdicts(1, Place(step=3, phase="flat"), error, [])
    assert own.sentence == for_others.sentence
    assert own.sentence.startswith("rank 1 failed at step 3 in flat: ")
    return own.exit_code, for_others.exit_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a made-up failure"), (1, 3)),
        (ClusterError("a port"), (3, 3)),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), (1, 3)),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), (1, 1)),
    ],
)
def test_others_end_with_3_after_a_failure_and_with_1_on_a_full_disk(
    error: BaseException, expected: tuple[int, int]
) -> None:
    assert codes(error) == expected


def test_an_error_of_the_journal_counts_as_one_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    journal.open(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unwritable) as raised:
        journal.write(Said("a", "b"))
    assert codes(raised.value) == (1, 1)


def test_a_refusal_has_the_same_sentence_on_all_ranks() -> None:
    verdicts = [error_verdicts(rank, Place(step=rank), ConfigError(["one", "two"]), []) for rank in (0, 1)]
    assert {verdict for each in verdicts for verdict in each} == {Verdict(2, "refused    one; two")}


def test_the_sentence_names_the_ranks_that_it_waited_for() -> None:
    own, for_others = error_verdicts(
        1, Place(step=3, phase="flat"), RuntimeError("gloo timed out"), ["rank 2 (at step 1)"]
    )
    assert own.sentence.endswith("RuntimeError: gloo timed out; it waited for rank 2 (at step 1)")
    assert [(entry.rank, entry.step) for entry in for_others.lost] == [(1, 3)]


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (ConnectionResetError(), True), (RuntimeError("Connection closed by peer"), True), (OSError("broken pipe"), True),
        (RuntimeError("a shape"), False), (ValueError("gloo"), False),
    ],
)  # fmt: skip
def test_which_errors_a_lost_rank_may_cause(error: BaseException, may: bool) -> None:
    assert may_be_a_loss(error) == may
    outer = ValueError("outer")
    outer.__cause__ = error
    assert may_be_a_loss(outer) == may


@pytest.mark.parametrize(
    ("rank", "written_after_s", "writes", "at_s"),
    [(1, None, True, 0.0), (2, None, True, 0.2), (3, None, True, 0.3), (2, 0.1, False, 0.1), (0, None, False, 0.0)],
)
def test_the_lowest_survivor_writes_or_else_the_next(
    monkeypatch: pytest.MonkeyPatch, rank: int, written_after_s: float | None, writes: bool, at_s: float
) -> None:
    """Rank 0 is lost; each of the others waits longer than the one before it."""
    monkeypatch.setattr(departure, "WRITING_S", 0.2)
    monkeypatch.setattr(departure, "NEXT_S", 0.1)
    monkeypatch.setattr(departure, "POLL_S", 0.01)
    began = time.monotonic()

    def written() -> bool:
        return written_after_s is not None and time.monotonic() - began >= written_after_s

    assert Succession(rank, [3, 1, 2]).is_my_turn(written) == writes
    assert at_s <= time.monotonic() - began < at_s + 0.1
    assert not Succession(rank, [1, 2, 3], declared_dead=True).is_my_turn(written)
