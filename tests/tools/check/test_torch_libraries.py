"""torch.distributed's checkpoint, pipelining and tensor: a right job of each, and six classic faults planted into it."""

from pathlib import Path

import pytest

from tests.tools.check.cases import SCRIPTS, check
from tests.tools.check.torch_jobs import FAULTS


@pytest.mark.parametrize(("job", "fault"), FAULTS, ids=[" ".join(each) for each in FAULTS])
def test_a_fault_is_reported_with_line_call_and_remedy(job: str, fault: str, tmp_path: Path) -> None:
    old, new, says = FAULTS[job, fault]
    text = (SCRIPTS / "right" / f"{job}.py").read_text()
    assert text.count(old) == 1
    (tmp_path / f"{job}.py").write_text(text.replace(old, new))
    checked = check(tmp_path / f"{job}.py", 2, tmp_path, LAB_HANG_AFTER_S="2")
    assert checked.code == 1, checked.output
    found = " ".join(checked.sentences)
    assert not [each for each in says if each not in found], found
