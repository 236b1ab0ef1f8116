"""Every meter is tried before it is believed: known cases hold, and each way of measuring wrong is seen by name."""

import time
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from distlab.measure import activations, memory, timeline
from distlab.rank import meter_self_test
from distlab.rank.meter_self_test import check_meters
from distlab.report import verdict
from distlab.report.records import Check
from distlab.testing.warm_ranks import Ranks
from tests.labs import TINY, lab_of

SETTINGS = TINY | {"RUN_MODE": "dp", "MASTER_ADDR": "127.0.0.1"}


class NoGradients(memory.Owners):
    """Gradients count as activations."""

    def _held(self) -> Any:
        return ((tensor, label) for tensor, label in super()._held() if label != "gradients")


class SinceTheStart(timeline.Lap):
    """CPU seconds of the whole process."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.cpu_s = 1e3 + time.process_time()


FAULTS: dict[str, Any] = {
    "": (meter_self_test, "LENGTH_S", meter_self_test.LENGTH_S),
    "gradients": (memory, "Owners", NoGradients),
    "communication": (memory, "_STRONGEST_FIRST", ("parameters", "optimizer", "gradients", memory.SAVED)),
    "saved": (activations, "max", lambda *_: 0),
    "cpu": (meter_self_test, "Lap", SinceTheStart),
    "spans": (timeline, "CLASSES", timeline.CLASSES | {"all_reduce": "forward"}),
    "median": (verdict, "median", mean),
    "slowest": (meter_self_test, "slowest", lambda seconds: seconds[0]),
}


def checked(group: dist.ProcessGroup, folder: str, fault: str) -> tuple[float, str]:
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    where, name, instead = FAULTS[fault]
    with patch.object(where, name, instead, create=True):
        check_meters(lab)
    (entry,) = (entry for entry in lab.journal.records if isinstance(entry, Check))
    assert (entry.name, entry.tolerance) == ("meters", 0)
    return entry.max_abs_diff, entry.detail


@pytest.mark.parametrize("world_size", [1, 3])
def test_meters_that_are_right_hold(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    assert (
        ranks(world_size, checked, str(tmp_path), "")
        == [(0, "memory, seconds, spans and ranks of known cases")] * world_size
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("gradients", "bytes at rest"),
        ("communication", "bytes at the peak"),
        ("saved", "bytes saved for the backward pass"),
        ("cpu", "computing"),
        ("spans", "seconds by class"),
        ("median", "the median step of each rank"),
        ("slowest", "the slowest rank's step"),
    ],
)
def test_a_meter_that_is_wrong_is_seen(ranks: Ranks, tmp_path: Path, fault: str, told: str) -> None:
    for faults, detail in ranks(2, checked, str(tmp_path), fault):
        assert faults > 0
        assert told in detail
