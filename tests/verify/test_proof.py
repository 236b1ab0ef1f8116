"""The proof under AdamW: two steps, of which the weights are compared too."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distlab.config import Config
from distlab.contract import Mode, Strategy, Variant
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica, begin_alike
from distlab.measure.tensors import Worst
from distlab.mesh.grid import Mesh
from distlab.report.reading import from_line
from distlab.report.verdict import judge
from distlab.testing.warm_ranks import Ranks
from distlab.workload.data import Batches
from distlab.workload.model import Model
from tests.labs import failed, failed_with, one_rank
from tests.verify.test_audit import ADAMW, SIZES

pytestmark = pytest.mark.timeout(120)


class WithoutDecay(Replica):
    """Moments are right after a step, and the weights are not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.config.optimizer == "adamw":
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


def flat(model: Model, mesh: Mesh, config: Config) -> Strategy:
    begin_alike(model, mesh.group, config)
    return WithoutDecay(model, config, GradientBuckets(model.parameters(), mesh.group, float("inf"), overlap=False))


def trained(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    return one_rank(group, settings, folder, Mode(variants=(Variant("flat", flat),)))


def test_weights_under_adamw_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | SIZES | ADAMW
    lines = ranks(2, trained, settings, str(tmp_path))
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert failed(run) >= {"weights after two steps", "audited weights"}
    assert not failed(run) & {"losses", "gradients", "weights"}


def of_the_first_step(right: Any) -> Any:
    """Compared at the first step alone."""

    def compare(self: Worst, kind: str, found: Any, wanted: Any, **given: Any) -> None:
        right(self, kind, found, None if self.times[kind] else wanted, **given)

    return compare


def one_step(right: Any) -> Any:
    def begin(self: Batches, *args: Any, **given: Any) -> None:
        right(self, *args, **given)
        self.proof_steps = 1

    return begin


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "compared at one step": (Worst, "compare", of_the_first_step),
    "proven by one step": (Batches, "__init__", one_step),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_proof_that_leaves_a_step_out_is_seen(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    assert failed_with(ranks, tmp_path, __name__, fault, LAB_VARIANT="flat") == {"proof steps"}
