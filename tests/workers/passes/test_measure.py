"""The passes in their order, and when a section of rank 0's log is finished: what is known then is told, not at the
end."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.labs import TINY, lab_of
from workers.passes.measure import everything
from workers.report.records import Check, Memory, Steps, Wire
from workers.testing.calls import Ranks

pytestmark = pytest.mark.timeout(120)
SETTINGS = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LAB_VARIANT": "naive"} | TINY


def sections(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[tuple[str, set[str]]]:
    """The sections that a run finishes on this rank, and of which kinds it had written records until then."""
    lab, found = lab_of(group, settings, folder), []
    kinds = (Check, Steps, Wire, Memory)
    lab.finished = lambda name: found.append(
        (name, {kind.__name__ for kind in kinds if any(isinstance(record, kind) for record in lab.journal.records)})
    )
    everything(lab)
    return found


def test_a_section_is_finished_as_soon_as_its_numbers_are_written_on_all_ranks_alike(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, sections, SETTINGS, str(tmp_path))
    assert [name for name, _ in first] == ["proof", "times", "measured", "memory"] == [name for name, _ in second]
    assert first[0][1] == {"Check"}
    assert first[1][1] == {"Check", "Steps"}
    assert first[2][1] == {"Check", "Steps", "Wire", "Memory"}


def test_without_the_proof_there_is_no_such_section(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(2, sections, SETTINGS | {"LAB_PROOF": "0"}, str(tmp_path))
    assert [name for name, _ in first] == ["times", "measured", "memory"]
