"""What a rank that failed ends with, and which survivor writes what became of the run."""

import errno
import os
import time
from pathlib import Path

import pytest

from distlab.lab.cluster import ClusterError, departure
from distlab.lab.cluster.departure import Succession, failed, may_be_a_loss
from distlab.lab.cluster.messages import Place, Verdict
from distlab.lab.config import ConfigError
from distlab.lab.report.records import Said
from distlab.lab.report.run_folder import Journal, Unwritable


def codes(error: BaseException) -> tuple[int, int]:
    """Its own and that of the others."""
    own, told = failed(1, Place(step=3, phase="flat"), error, [])
    assert own.sentence == told.sentence
    assert own.sentence.startswith("rank 1 failed at step 3 in flat: ")
    return own.exit_code, told.exit_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a made-up failure"), (1, 3)),
        (ClusterError("a port"), (3, 3)),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), (1, 3)),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), (1, 1)),
    ],
)
def test_a_failure_is_a_loss_to_the_others_and_a_full_disk_ends_all_alike(
    error: BaseException, expected: tuple[int, int]
) -> None:
    assert codes(error) == expected


def test_the_error_of_a_full_journal_is_that_of_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    journal.open(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unwritable) as raised:
        journal.write(Said("a", "b"))
    assert codes(raised.value) == (1, 1)


def test_a_refusal_is_one_sentence_of_all_ranks() -> None:
    verdicts = [failed(rank, Place(step=rank), ConfigError(["one", "two"]), []) for rank in (0, 1)]
    assert {verdict for each in verdicts for verdict in each} == {Verdict(2, "refused    one; two")}


def test_whom_it_waited_for_stands_in_its_sentence() -> None:
    own, told = failed(1, Place(step=3, phase="flat"), RuntimeError("gloo timed out"), ["rank 2 (at step 1)"])
    assert own.sentence.endswith("RuntimeError: gloo timed out; it waited for rank 2 (at step 1)")
    assert [(entry.rank, entry.step) for entry in told.lost] == [(1, 3)]


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (ConnectionResetError(), True), (RuntimeError("Connection closed by peer"), True), (OSError("broken pipe"), True),
        (RuntimeError("a shape"), False), (ValueError("gloo"), False),
    ],
)  # fmt: skip
def test_behind_which_errors_a_lost_rank_may_stand(error: BaseException, may: bool) -> None:
    assert may_be_a_loss(error) == may
    outer = ValueError("outer")
    outer.__cause__ = error
    assert may_be_a_loss(outer) == may


@pytest.mark.parametrize(
    ("rank", "written_after_s", "writes", "at_s"),
    [(1, None, True, 0.0), (2, None, True, 0.2), (3, None, True, 0.3), (2, 0.1, False, 0.1), (0, None, False, 0.0)],
)
def test_the_lowest_survivor_writes_and_the_next_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, rank: int, written_after_s: float | None, writes: bool, at_s: float
) -> None:
    """Rank 0 is lost; of the others each waits so much longer for the ones before it."""
    monkeypatch.setattr(departure, "WRITING_S", 0.2)
    monkeypatch.setattr(departure, "NEXT_S", 0.1)
    monkeypatch.setattr(departure, "LOOK_S", 0.01)
    began = time.monotonic()

    def written() -> bool:
        return written_after_s is not None and time.monotonic() - began >= written_after_s

    assert Succession(rank, [3, 1, 2]).turn(written) == writes
    assert at_s <= time.monotonic() - began < at_s + 0.1
    assert not Succession(rank, [1, 2, 3], given_up=True).turn(written)
