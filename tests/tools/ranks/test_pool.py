"""The watch over a task on warm ranks: how it ended on each is waited for."""

import os
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.tools.ranks.pool import Watching
from distlab.tools.ranks.rank import Ended


class LateRank:
    """It has told the doctor of its end, and sends how it was 0.6 s later: after the next look."""

    def __init__(self) -> None:
        self.control, self._other = Pipe()
        self._never, self._kept = os.pipe()
        self.bedside = SimpleNamespace(process=SimpleNamespace(sentinel=self._never))
        self._lines = [b'["ended",0,1.0]\n']
        threading.Timer(0.6, lambda: self._other.send(Ended("passed", "late"))).start()
        self.hearing = SimpleNamespace(lines=self._told)

    def _told(self, _timeout_s: float) -> list[bytes]:
        told, self._lines = self._lines, []
        return told

    def starved_s(self) -> float:
        return 0.0

    def printed(self) -> str:
        return ""


@pytest.mark.timeout(30)
def test_a_rank_that_the_doctor_has_seen_end_is_still_asked_how_it_ended() -> None:
    ranks: Any = [LateRank(), LateRank()]
    outcome = Watching(ranks, 10).until_the_end()
    assert [outcome.ended[rank].text for rank in (0, 1)] == ["late", "late"]
    assert not outcome.is_bad
