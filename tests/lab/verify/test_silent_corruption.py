"""Silent corruption is named by rank, tensor and step; and an audit that leaves something out does not hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.lab.measure.tensors import hash_of
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.verdict import judge
from distlab.lab.verify import silent_corruption
from distlab.lab.verify.run_all import everything
from distlab.lab.verify.silent_corruption import Corruption, compare_hashes, outliers
from distlab.techniques.data_parallel.strategy import Replica
from tests.labs import TINY, disconnect, failed, lab_of
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
SETTINGS = TINY | {"RUN_MODE": "dp", "LAB_MODEL": "mlp", "MASTER_ADDR": "127.0.0.1"}
CULPRIT = 1


class Own:
    """A strategy of three tensors, equal on all ranks until one is changed."""

    def __init__(self) -> None:
        self.weights = {name: torch.arange(5.0) for name in ("a", "b", "c")}
        self.gradients = {name: torch.ones(5) for name in self.weights}

    def alike(self, kind: str) -> list[tuple[str, torch.Tensor]]:
        return list((self.weights if kind == "weights" else self.gradients).items())


def nothing(own: Own, step: int) -> None:
    """All tensors stay equal."""


def a_gradient(own: Own, step: int) -> None:
    if step == 2 and dist.get_rank() == CULPRIT:
        own.gradients["b"][3] = -1.0
        own.weights["b"][3] = 9.0


def a_weight(own: Own, step: int) -> None:
    if step == 2 and dist.get_rank() == CULPRIT:
        own.weights["c"][0] = -0.0


def audited(
    group: dist.ProcessGroup, folder: str, change: Callable[[Own, int], None], every: int, unhashed: str
) -> list[str]:
    """Five steps, in the third of which something may change; one rank may leave a tensor unhashed."""
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    own: Any = Own()
    found = Corruption(lab, {"own": own}, every)
    if unhashed and dist.get_rank() == CULPRIT:
        del own.weights[unhashed]
    for step in range(5):
        for kind in silent_corruption.KINDS:
            if kind == "weights":
                change(own, step)
            found.hash(kind, "own", own, step)
        found.compare("own", step)
    found.decide()
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


def run(ranks: Ranks, world_size: int, folder: Path, change: Any, every: int = 1, unhashed: str = "") -> Any:
    lines = ranks(world_size, audited, str(folder), change, every, unhashed)
    by_rank = {rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)}
    named = [record for record in by_rank[0] if isinstance(record, records.Corrupted)]
    return failed(judge(by_rank)), named


def test_of_three_the_outlier_is_named_with_the_first_tensor_and_the_step(ranks: Ranks, tmp_path: Path) -> None:
    fails, named = run(ranks, 3, tmp_path, a_weight)
    assert fails == {"audited replicas"}
    assert named == [records.Corrupted("own", 2, "weights.c", [CULPRIT], True, 0)]


def test_of_two_it_is_known_that_they_differ(ranks: Ranks, tmp_path: Path) -> None:
    _, named = run(ranks, 2, tmp_path, a_weight)
    assert named == [records.Corrupted("own", 2, "weights.c", [0, 1], False, 0)]


def test_every_second_step_it_is_named_a_step_later(ranks: Ranks, tmp_path: Path) -> None:
    _, named = run(ranks, 3, tmp_path, a_weight, every=2)
    assert [(each.step, each.tensor) for each in named] == [(3, "weights.c")]


def test_a_gradient_is_named_before_the_weight_that_it_made(ranks: Ranks, tmp_path: Path) -> None:
    _, named = run(ranks, 3, tmp_path, a_gradient, every=2)
    assert [(each.tensor, each.ranks, each.others) for each in named] == [("gradients.b", [CULPRIT], 1)]


def test_equal_replicas_pass(ranks: Ranks, tmp_path: Path) -> None:
    assert run(ranks, 3, tmp_path, nothing) == (set(), [])


def test_a_tensor_that_one_rank_never_hashes_is_missed(ranks: Ranks, tmp_path: Path) -> None:
    fails, named = run(ranks, 3, tmp_path, nothing, unhashed="b")
    assert fails == {"audited replicas"}
    assert named == []


def trained(group: dist.ProcessGroup, settings: dict[str, str], folder: str, culprit: int) -> list[str]:
    """The training of a mode; the culprit's hashes are those of other tensors."""
    lab = lab_of(group, settings | {"WORLD_SIZE": str(group.size())}, folder)
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == culprit:
            patch.setattr(silent_corruption, "hash_of", lambda tensor: hash_of(tensor) + 1)
        if lab.mode.run is not None and not lab.mode.timed:
            lab.mode.run(lab)
        else:  # what a lesson checks of its own takes longer
            lab.mode = replace(lab.mode, run=None, predict=lambda config: [])
            everything(lab)
    disconnect()
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


OWN = {"LAB_DEPTH": "1", "LAB_LOSSES": "0"}
TRAININGS: list[tuple[str, str, int, dict[str, str], list[int]]] = [
    ("dp", "flat", 3, {}, [1]),
    ("dp", "ring", 2, {"LAB_DTYPE": "bfloat16"}, [0, 1]),
    ("tp", "megatron", 3, {}, [1]),
    ("fsdp", "zero1", 3, {}, [1]),
    ("pp", "gpipe", 3, {"LAB_DEPTH": "3", "LAB_TIE": "1"}, [0, 2]),  # the holders of the tied weight
    ("compress", "powersgd", 3, {}, [1]),
    ("precision", "bf16_master", 3, {}, [1]),
    ("cp", "ring", 3, {}, [1]),
    ("moe", "ep", 3, {}, [1]),
    ("mesh", "1f1b", 4, {}, [1]),
    ("elastic", "shrink", 3, OWN, [1]),
    ("elastic", "shrink", 3, OWN | {"LAB_LOSSES": "1", "LAB_STEPS": "6"}, [1, 2]),  # of those who are left
    ("elastic", "zero1", 3, OWN, [1]),
    ("largebatch", "linear", 3, {}, [1]),
]


@pytest.mark.parametrize(("mode", "variant", "world_size", "more", "named"), TRAININGS)
def test_a_rank_that_differs_is_named_in_every_mode_that_trains(
    ranks: Ranks, tmp_path: Path, mode: str, variant: str, world_size: int, more: dict[str, str], named: list[int]
) -> None:
    settings = TINY | {"MASTER_ADDR": "127.0.0.1", "LAB_STEPS": "4", "LAB_AUDIT_EVERY": "1", "LAB_PROOF": "0"}
    settings |= {"RUN_MODE": mode, "LAB_VARIANT": variant} | more
    lines = ranks(world_size, trained, settings, str(tmp_path), named[-1])
    found = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert "audited replicas" in failed(found)
    all_lines = [from_line(line) for of_rank in lines for line in of_rank]
    assert [each.ranks for each in all_lines if isinstance(each, records.Corrupted)][-1] == named


def test_nothing_is_named_if_ranks_rejoin_equal(ranks: Ranks, tmp_path: Path) -> None:
    settings = TINY | {"MASTER_ADDR": "127.0.0.1", "LAB_AUDIT_EVERY": "1", "RUN_MODE": "elastic", "LAB_VARIANT": "join"}
    lines = ranks(3, trained, settings | OWN | {"LAB_LOSSES": "1", "LAB_STEPS": "6"}, str(tmp_path), -1)
    found = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert not failed(found)
    assert "audited replicas" in {check["name"] for check in found["checks"]}


def test_a_strategy_that_declares_no_replicas_is_not_compared() -> None:
    assert silent_corruption.replicated(object(), "weights") == []
    assert hasattr(Replica, "alike")


@pytest.mark.parametrize(
    ("hashes", "named"),
    [
        ({0: 7, 1: 7, 2: 7}, None),
        ({0: 7, 1: 8, 2: 7}, ([1], True)),
        ({0: 8, 1: 7, 2: 7, 3: 9}, ([0, 1, 2, 3], False)),  # half is no majority
        ({0: 8, 1: 7, 2: 7, 3: 9, 4: 7}, ([0, 3], True)),
        ({0: 8, 1: 7}, ([0, 1], False)),
        ({4: 7}, None),
        ({}, None),
    ],
)
def test_outliers_by_majority(hashes: dict[int, int], named: tuple[list[int], bool] | None) -> None:
    assert outliers(hashes) == named


def test_only_ranks_with_a_parameter_must_hash_it() -> None:
    holders = {"tied": [0, 2]}
    assert compare_hashes([{"weights.tied": 1}, {}, {"weights.tied": 1}], holders) == ([], 0)
    assert compare_hashes([{"weights.tied": 1}, {}, {}], holders) == ([], 1)
    assert compare_hashes([{}, {}, {}], holders) == ([], 2)
    both = {"weights.tied": 1, "gradients.tied": 3}
    assert compare_hashes([both, {}, {"weights.tied": 1}], holders) == ([], 1)
