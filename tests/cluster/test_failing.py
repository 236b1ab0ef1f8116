"""What a rank that raised ends with, and what it tells the others."""

import errno
import os
from pathlib import Path

import pytest

from distlab.cluster import ClusterError
from distlab.cluster.heartbeat import RunPosition
from distlab.cluster.lost_ranks import Verdict
from distlab.cluster.shutdown import failed
from distlab.config import ConfigError
from distlab.report.records import Said
from distlab.report.run_folder import Journal, Unwritable


def codes(error: BaseException) -> tuple[int, int]:
    """Its own and that of the others."""
    own, told = failed(1, RunPosition(step=3, phase="flat"), error, [])
    assert own.sentence == told.sentence
    assert own.sentence.startswith("rank 1 failed at step 3 in flat: ")
    return own.exit_code, told.exit_code


def test_a_failure_is_a_loss_to_the_others() -> None:
    assert codes(ValueError("a made-up failure")) == (1, 3)
    assert codes(ClusterError("a port")) == (3, 3)
    assert codes(PermissionError(errno.EACCES, os.strerror(errno.EACCES))) == (1, 3)


def test_a_refusal_is_one_sentence_of_all_ranks() -> None:
    verdicts = [failed(rank, RunPosition(step=rank), ConfigError(["one", "two"]), []) for rank in (0, 1)]
    assert {verdict for each in verdicts for verdict in each} == {Verdict(2, "refused    one; two")}


def test_a_disk_that_is_full_ends_all_ranks_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that wait; by the error that the journal raises, and by the kernel's own."""
    journal = Journal()
    journal.open(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unwritable) as raised:
        journal.write(Said("a", "b"))
    assert codes(raised.value) == (1, 1)
    assert codes(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == (1, 1)
