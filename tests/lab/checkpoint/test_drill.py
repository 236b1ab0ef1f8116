"""A resume that does not restore all state fails its check."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from distlab.lab.checkpoint import manifest, resume
from distlab.lab.checkpoint.resume import prove_resume
from distlab.lab.config import Config
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.verdict import judge
from distlab.lab.workload.model import Model
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.mesh.grid import Mesh
from tests.labs import TINY, failed, lab_of
from tests.warm_ranks import Ranks

SMALL = TINY | {
    "RUN_MODE": "dp", "LAB_MODEL": "mlp", "LAB_STEPS": "4", "LAB_CHECKPOINT_EVERY": "2", "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


class Forgetful(Replica):
    """A replica that does not save its last parameter."""

    def state_dict(self) -> dict[str, Any]:
        return dict(list(super().state_dict().items())[:-1])


def checked_resume(group: dist.ProcessGroup, folder: str, kind: type[Replica], broken: str = "") -> list[str]:
    def build(model: Model, mesh: Mesh, config: Config) -> Replica:
        return kind(model, config, GradientBuckets(model.parameters(), mesh.group, bucket_bytes=1 << 40))

    lab = lab_of(group, SMALL, folder)
    assert lab.hooks.side_group is not None
    module = manifest if broken == "set_generators" else resume
    with patch.object(module, broken, lambda *_: None) if broken else nullcontext():
        prove_resume(lab, "flat", build, [lab.config.untimed()], lab.hooks.side_group)
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


def test_state_that_is_not_restored_fails(ranks: Ranks, tmp_path: Path) -> None:
    for kind, fails in ((Forgetful, {"resume"}), (Replica, set())):
        lines = ranks(2, checked_resume, str(tmp_path / kind.__name__), kind)
        run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
        assert failed(run) == fails


@pytest.mark.parametrize("broken", ["restore_generators", "set_generators"])
def test_generators_that_are_not_restored_fail(ranks: Ranks, tmp_path: Path, broken: str) -> None:
    lines = ranks(2, checked_resume, str(tmp_path), Replica, broken)
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert failed(run) == {"resumed generators"}
