"""The timed pass is checked: what only float32 does, or only the timed strategies, fails by the name of its check.

Each fault spares float64, so that the proof sees none of them.
"""

from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from distlab.contract import Held, Instead, Mistake, Mode, Strategy, Variant, replaced
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.report.reading import from_line
from distlab.lab.report.verdict import judge
from distlab.lab.verify import timed
from distlab.lab.verify.audit import (
    sampled,
)  # fmt: skip
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import make_optimizer
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica, draw_and_broadcast
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.sharded import flat_parameter
from distlab.techniques.sharded.flat_parameter import FlatParameter, Sharded
from distlab.techniques.sharded.zero import Zero
from tests.labs import one_rank
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
SIZES = {"LAB_MODEL": "mlp", "LAB_WIDTH": "8", "LAB_DEPTH": "2", "LAB_STEPS": "6", "LAB_BATCH": "7"}
ADAMW = {"LAB_OPTIMIZER": "adamw", "LAB_LR": "0.01"}

Run: TypeAlias = dict[str, Any]


Faulty = Replica  # a fault takes its place


def flat(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Data parallelism with one bucket, in a class that may be faulty where it does not compute in float64."""
    draw_and_broadcast(model, mesh.group, config)
    buckets = GradientBuckets(model.parameters(), mesh.group, float("inf"), overlap=False)
    exact = next(model.parameters()).dtype == torch.float64
    return (Replica if exact else Faulty)(model, config, buckets)


class NeverUpdates(Replica):
    def update(self) -> None:
        """Leave the weights as they are."""


class AdamWAnew(Replica):
    def update(self) -> None:
        super().update()
        self.optimizer = make_optimizer(self.model.parameters(), self.config)


class TwiceTheRate(Replica):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer.param_groups[0] |= {"lr": 2 * self.config.learning_rate, "weight_decay": 0.0}


class WithoutDecay(Replica):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer.param_groups[0]["weight_decay"] = 0.0


class SumsTwice(Replica):
    def backward(self, microbatches: list[Microbatch]) -> torch.Tensor:
        loss = super().backward(microbatches)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        return loss


class ForgetsMoments(Replica):
    def update(self) -> None:
        super().update()
        if dist.get_rank() == 1:
            self.optimizer.state.clear()


class Drifts(Replica):
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            weight = next(self.model.parameters())
            weight.view(-1)[0] += 1e-6 * dist.get_rank()  # too little for any loss to show


class SkipsOneUpdate(Replica):
    steps_done = 0

    def update(self) -> None:
        self.steps_done += 1
        if self.steps_done != 2:  # a step that is not audited
            super().update()


class FirstBatch(Batches):
    def microbatches(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        return super().microbatches(step if self.dtype == torch.float64 else 0, shard, num_shards)


class Unpublished(FlatParameter):
    def refresh(self) -> None:
        """Keep what was stepped to itself."""


def never_publishes(*args: Any, right: type[Zero] = Zero, **kwargs: Any) -> Zero:
    with replaced(vars(flat_parameter), {"FlatParameter": Unpublished}):
        return right(*args, **kwargs)


def zero2(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Float32 masters where the weights are of 16 bits."""
    return Sharded(model, Zero(model, list(model.layers), mesh.group, stage=2), mesh.group, config)


def without_step_3(names: list[str], step: int) -> list[str]:
    return [] if step == 3 else names


# What is wrong, the settings that it takes, and the check that sees it.
KIND: dict[str, tuple[type[Replica], dict[str, str], str]] = {
    "never_updates": (NeverUpdates, {}, "audited weights"),
    "adamw_anew": (AdamWAnew, ADAMW, "audited optimizer"),
    "twice_the_rate": (TwiceTheRate, ADAMW, "audited weights"),
    "without_decay": (WithoutDecay, ADAMW, "audited weights"),
    "sums_twice": (SumsTwice, {}, "audited weights"),
    "sums_twice_under_adamw": (SumsTwice, ADAMW, "audited optimizer"),
    "forgets_moments_on_one_rank": (ForgetsMoments, ADAMW, "timed replicas"),
    "one_rank_drifts": (Drifts, {}, "timed replicas"),
    "leaves_one_update_out": (SkipsOneUpdate, {}, "timed losses"),
    "never_updates_in_bfloat16": (NeverUpdates, {"LAB_DTYPE": "bfloat16"}, "timed losses"),
}
FAULTS = {
    name: (Instead(("flat",), {"Faulty": kind}), settings, check) for name, (kind, settings, check) in KIND.items()
} | {
    "stays_at_batch_0": (Instead(batches=FirstBatch), {}, "timed losses"),
    "masters_never_reach_16_bits": (
        Instead(("zero2",), {"Zero": never_publishes}),
        {"LAB_DTYPE": "bfloat16"},
        "timed losses",
    ),
    "leaves_a_step_out": (Instead(), {}, "timed steps"),
}


def mode(fault: str | None, references: dict[str, Held] | None = None) -> Mode:
    """Two variants, one of them made with the fault."""

    def run(lab: Lab) -> None:
        proofs = {name: lambda name, build: None for name in references or {}}
        measure(lab, proofs=proofs, references=references)

    made = {fault: Mistake("", "", FAULTS[fault][0])} if fault else {}
    return Mode(variants=(Variant("flat", flat), Variant("zero2", zero2)), run=run, mistakes=made).mistaken(fault)


def checks_of(
    group: dist.ProcessGroup,
    settings: dict[str, str],
    folder: str,
    fault: str | None,
    references: dict[str, Held] | None,
) -> list[str]:
    rotated = timed.rotated
    timed.rotated = without_step_3 if fault == "leaves_a_step_out" else rotated
    try:
        return one_rank(group, settings, folder, mode(fault, references))
    finally:
        timed.rotated = rotated


def ran(
    ranks: Ranks, folder: Path, fault: str | None, extra: dict[str, str], references: dict[str, Held] | None = None
) -> Run:
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | SIZES | extra
    lines = ranks(2, checks_of, settings, str(folder), fault, references)
    return judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})


def failed(run: Run) -> set[str]:
    return {check["name"] for check in run["checks"] if not check["passed"]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_float32_alone_is_seen_by_name(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    where, extra, check = FAULTS[fault]
    run = ran(ranks, tmp_path, fault, extra)
    assert check in failed(run)
    assert not failed(run) & {"losses", "gradients", "weights", "optimizer state"}, "the proof in float64 saw it too"
    wrong = {entry["variant"] for entry in run["checks"] if not entry["passed"]}
    assert wrong == (set(where.variants) or {"flat", "zero2"}), "the right variant is checked too"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        ADAMW | {"LAB_CLIP": "0.05"},
        {"LAB_DTYPE": "bfloat16", "LAB_MICROBATCHES": "2"} | ADAMW,
        {"LAB_DTYPE": "float64", "LAB_MODEL": "line", "LAB_STEPS": "3"},
        {"LAB_STEPS": "1", "LAB_RECOMPUTE": "1"},
        {"LAB_LR": "1000"},
    ],
    ids=["sgd", "adamw clipped", "bfloat16 in microbatches", "line in float64", "one step", "losses without end"],
)
def test_right_variants_pass(ranks: Ranks, tmp_path: Path, extra: dict[str, str]) -> None:
    run = ran(ranks, tmp_path, None, extra)
    assert not failed(run)
    names = {check["name"] for check in run["checks"] if check["variant"] == "zero2"}
    assert names >= {"timed losses", "audited loss", "audited weights", "timed steps", "timed replicas"}


def test_variants_unlike_one_process_are_informational_or_have_a_reference(ranks: Ranks, tmp_path: Path) -> None:
    run = ran(ranks, tmp_path, "sums_twice", {}, {"flat": Held(why="sums twice on purpose")})
    assert failed(run) == set()
    (shown,) = [each for each in run["comparisons"] if each["name"] == "last timed loss"]
    assert (shown["variant"], shown["decides"]) == ("flat", False)


def test_without_the_proof_only_steps_and_replicas_are_checked(ranks: Ranks, tmp_path: Path) -> None:
    run = ran(ranks, tmp_path, "never_updates", {"LAB_PROOF": "0"})
    assert {check["name"] for check in run["checks"]} == {"timed steps", "timed replicas"}
    assert not run["proven"]


def test_the_first_step_the_last_and_one_between_are_audited() -> None:
    assert sampled(range(1), 7) == [0]
    assert sampled(range(4, 6), 7) == [4, 5]
    assert sampled(range(5, 5), 7) == []
    for seed in range(20):
        first, between, last = sampled(range(3, 20), seed)
        assert (first, last) == (3, 19)
        assert 3 < between < 19
    assert len({sampled(range(20), seed)[1] for seed in range(20)}) > 5
