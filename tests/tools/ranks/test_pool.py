"""TaskMonitor waits for the result of every rank."""

import os
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.tools.ranks.pool import TaskMonitor
from distlab.tools.ranks.rank import RankResult


class LateRank:
    """A rank that reports its end at once, and sends its result 0.6 s later, after the coordinator's next evaluation."""

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
def test_the_result_of_a_rank_that_has_ended_is_waited_for() -> None:
    ranks: Any = [LateRank(), LateRank()]
    outcome = TaskMonitor(ranks, 10).follow_to_end()
    assert [outcome.ended[rank].text for rank in (0, 1)] == ["late", "late"]
    assert not outcome.is_bad
