"""The watch over a task on warm ranks: how it ended on each is waited for."""

import os
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.tools.ranks.pool import TaskMonitor
from distlab.tools.ranks.rank import RankResult


class LateRank:
    """It has told the doctor of its end, and sends how it was 0.6 s later: after the next look."""

    def __init__(self) -> None:
        self.control, self._other = Pipe()
        self._never, self._kept = os.pipe()
        self.channel = SimpleNamespace(process=SimpleNamespace(sentinel=self._never))
        self._lines = [b'["ended",0,1.0]\n']
        threading.Timer(0.6, lambda: self._other.send(RankResult("passed", "late"))).start()
        self.monitor = SimpleNamespace(lines=self._take_lines)

    def _take_lines(self, _timeout_s: float) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines

    def starved_s(self) -> float:
        return 0.0

    def printed(self) -> str:
        return ""


@pytest.mark.timeout(30)
def test_a_rank_that_the_doctor_has_seen_end_is_still_asked_how_it_ended() -> None:
    ranks: Any = [LateRank(), LateRank()]
    outcome = TaskMonitor(ranks, 10).follow_to_end()
    assert [outcome.ended[rank].text for rank in (0, 1)] == ["late", "late"]
    assert not outcome.is_bad
