"""The proof under AdamW: two steps, of which the weights are compared too."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Worst
from distlab.lab.rank.mode_loader import load
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.verdict import judge
from distlab.lab.verify.proof import (
    WrittenBuffers,
    against,
    buffer_hashes,
    changed,
    check_replicas,
    check_same,
    check_samples,
    summed_losses,
    write_checks,
)
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.reference import Snapshot
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica, draw_and_broadcast
from distlab.techniques.mesh.grid import Mesh
from tests.lab.verify.test_audit import ADAMW, SIZES
from tests.labs import TINY, failed, failed_with, lab_of, one_rank
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


class WithoutDecay(Replica):
    """Moments are right after a step, and the weights are not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.config.optimizer == "adamw":
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


def flat(model: Model, mesh: Mesh, config: Config) -> Strategy:
    draw_and_broadcast(model, mesh.group, config)
    return WithoutDecay(model, config, GradientBuckets(model.parameters(), mesh.group, float("inf"), overlap=False))


def trained(group: dist.ProcessGroup, settings: dict[str, str], folder: str, build: Any = flat) -> list[str]:
    return one_rank(group, settings, folder, Mode(variants=(Variant("flat", build),)))


def test_weights_under_adamw_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | SIZES | ADAMW
    found = failed(run_of(ranks(2, trained, settings, str(tmp_path))))
    assert found >= {"weights after two steps", "audited weights"}
    assert not found & {"losses", "gradients", "weights"}


def run_of(lines: list[list[str]]) -> dict[str, Any]:
    return judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})


def of_the_first_step(right: Any) -> Any:
    """Compared only at the first step."""

    def compare(self: Worst, kind: str, found: Any, wanted: Any, **options: Any) -> None:
        right(self, kind, found, None if self.times[kind] else wanted, **options)

    return compare


def one_step(right: Any) -> Any:
    def begin(self: Batches, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.proof_steps = 1

    return begin


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "compared at one step": (Worst, "compare", of_the_first_step),
    "proven by one step": (Batches, "__init__", one_step),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_proof_that_leaves_a_step_out_is_seen(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    assert failed_with(ranks, tmp_path, __name__, fault, LAB_VARIANT="flat") == {"proof steps"}


# What the passes hold can fail: variants, samples and replicas that are wrong on purpose, each seen by name.

SMALL = TINY | {"RUN_MODE": "dp", "LAB_MODEL": "mlp", "LAB_STEPS": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class Wrong(Replica):
    """A replica whose loss, gradient or update is not what one process has."""

    what = ""

    def backward(self, microbatches: list[Microbatch]) -> Any:
        loss = super().backward(microbatches)
        if self.what == "gradients":
            next(self.model.parameters()).grad.mul_(2)  # type: ignore[union-attr]
        return loss * 1.01 if self.what == "losses" else loss

    def update(self) -> None:
        if self.what != "weights":
            super().update()


def wrong(what: str, model: Model, mesh: Mesh, config: Config) -> Wrong:
    strategy = Wrong(model, config, GradientBuckets(model.parameters(), mesh.group, bucket_bytes=1 << 40))
    strategy.what = what
    return strategy


@pytest.mark.parametrize("what", ["losses", "gradients", "weights", ""])
def test_a_wrong_variant_fails_by_name(ranks: Ranks, tmp_path: Path, what: str) -> None:
    found = failed(run_of(ranks(2, trained, SMALL, str(tmp_path), partial(wrong, what))))
    assert what in found if what else not found


class DealtTwice(Batches):
    """Rank 1 works on what rank 0 has, too."""

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        return super().sample_ids(step, 0 if shard == 1 else shard, num_shards)


def claimed(group: dist.ProcessGroup, folder: str, claim: Callable[[Lab], None], batches: type[Batches]) -> list[str]:
    """The records of a rank that makes one claim."""
    lab = lab_of(group, SMALL, folder, replace(load("dp"), batches=batches))
    claim(lab)
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


def test_a_sample_dealt_twice_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    assert failed(run_of(ranks(2, claimed, str(tmp_path / "twice"), check_samples, DealtTwice))) == {"samples"}
    assert failed(run_of(ranks(2, claimed, str(tmp_path / "once"), check_samples, Batches))) == set()


def check_drifted(drift: float, lab: Lab) -> None:
    strategy = wrong("", lab.model(torch.float32), lab.mesh, lab.config)
    next(strategy.model.parameters()).data[0] += drift * lab.rank
    check_replicas(lab, "wrong", strategy)


@pytest.mark.parametrize("drift", [0.0, 1e-6, float("nan")])
def test_a_replica_of_its_own_is_seen(ranks: Ranks, tmp_path: Path, drift: float) -> None:
    assert failed(run_of(ranks(2, claimed, str(tmp_path), partial(check_drifted, drift), Batches))) == (
        {"replicas"} if drift else set()
    )


# What is written of them, of made-up differences: each bound and each sum by hand.


def lab_that_notes(**options: Any) -> tuple[Any, list[Any]]:
    written: list[Any] = []
    note: Any = lambda *claim, **_: written.append(claim)  # noqa: E731
    return SimpleNamespace(check=note, rank=1, world_size=2, group=None, **options), written


@pytest.mark.parametrize(
    ("rate", "times", "claims"),
    [
        (0.01, {"gradients": 3, "weights": 3}, [1e-11, 0]), (0.0001, {"gradients": 3, "weights": 2}, [1e-12, 1]),
        (0.001, {"gradients": 4, "weights": 1}, [1e-12, 3]),
    ],
)  # fmt: skip
def test_a_proof_allows_rounding_and_counts_its_comparisons(
    rate: float, times: dict[str, int], claims: list[float]
) -> None:
    """1e-12, of weights under adamw as much more as the rate is above 0.001; each comparison three times."""
    lab, written = lab_that_notes(config=SimpleNamespace(learning_rate=rate))
    found = Worst(["gradients", "weights after two steps"])
    found.note("gradients", 2e-12, where="step 1")
    found.note("weights after two steps", 3e-12, where="step 2")
    found.times.clear()
    found.times.update(times)
    write_checks(lab, "flat", found, {"gradients": 3, "weights": 3})
    assert written == [
        ("gradients", 2e-12, 1e-12, "flat", "step 1"),
        ("weights after two steps", 3e-12, pytest.approx(claims[0], abs=0.0), "flat", "step 2"),
        ("proof steps", claims[1], 0),
    ]


class Told:
    """A strategy of one parameter, which an update takes from its gradient's step to the next; loses 3 and 2."""

    step, updates = -1, 0

    def backward(self, _microbatches: object) -> torch.Tensor:
        self.step += 1
        return torch.tensor((3.0, 2.0)[self.step])

    def update(self) -> None:
        self.updates += 1

    def full(self, kind: str) -> Any:
        base = {"gradients": 10.0, "weights": 20.0, "optimizer": 30.0}[kind]
        yield "w", torch.tensor([base + (self.step if kind == "gradients" else self.updates)])


def snapshot(loss: float, gradient: float, weight: float, state: float = 0.0) -> Snapshot:
    first, second, third = ({"w": torch.tensor([each])} for each in (gradient, weight, state))
    return Snapshot(loss, first, second, third, 0.0)


def lab_that_steps() -> Any:
    return SimpleNamespace(
        rank=0, at=lambda *_: None, microbatches=lambda *_: [], stepped=lambda: None,
        exchange=SimpleNamespace(gather=lambda _, loss_parts: [loss_parts]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dense", "worst"),
    [
        ([snapshot(3.0, 10.0, 21.0), snapshot(2.0, 11.0, 22.0)], (0.0, 0.0, 0.0)),
        ([snapshot(3.5, 10.0, 21.0), snapshot(2.25, 11.0, 22.0)], (0.5, 0.0, 0.0)),  # ours are lower
        ([snapshot(2.875, 10.0, 21.0), snapshot(1.75, 11.0, 22.0)], (0.25, 0.0, 0.0)),
        ([snapshot(3.0, 10.5, 21.0), snapshot(2.0, 11.25, 21.0)], (0.0, 0.5, 1.0)),
    ],
)  # fmt: skip
def test_each_step_is_compared_with_that_of_one_process(
    dense: list[Snapshot], worst: tuple[float, float, float]
) -> None:
    lab = lab_that_steps()
    batches: Any = SimpleNamespace(proof_steps=2)
    found, strategy = Worst(), Told()
    against(lab, strategy, "flat", batches, dense, found)  # type: ignore[arg-type]
    assert tuple(found.found[kind].value for kind in ("losses", "gradients", "weights")) == worst
    assert found.times == {"losses": 2, "gradients": 2, "weights": 2}
    lab.rank = 1  # which has nothing to compare with, and takes part
    others = Worst()
    lab.exchange = SimpleNamespace(gather=lambda *_: None)
    against(lab, Told(), "flat", batches, [], others)  # type: ignore[arg-type]
    assert others.times == {}


def test_two_tuned_steps_are_compared_in_gradients_state_and_weights() -> None:
    lab = lab_that_steps()
    batches: Any = SimpleNamespace(proof_steps=3)
    dense = [snapshot(0.0, 10.0, 21.0, 31.0), snapshot(0.0, 11.5, 22.25, 32.125)]
    found = Worst()
    against(lab, Told(), "flat", batches, dense, found, tuned=True)  # type: ignore[arg-type]
    assert {kind: (off.value, found.times[kind]) for kind, off in found.found.items()} == {
        "clipped gradients": (0.5, 2), "optimizer state": (0.125, 2), "weights after two steps": (0.25, 2),
    }  # fmt: skip


def test_losses_are_the_sum_of_what_all_ranks_saw_of_a_step() -> None:
    loss_parts = [[0.25, None, 1.5], None, [1.0, 0.0, -0.25]]
    lab: Any = SimpleNamespace(exchange=SimpleNamespace(gather=lambda *_: loss_parts))
    assert summed_losses(lab, []) == [1.25, 0.0, 1.25]
    nothing: Any = SimpleNamespace(exchange=SimpleNamespace(gather=lambda *_: None))
    assert summed_losses(nothing, []) == []


def test_what_a_step_wrote_has_another_hash() -> None:
    assert changed({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == {"b", "c"}


@pytest.mark.parametrize(
    ("mask", "seen", "moved", "detail"),
    [(1.0, 1.0, 0, "1 of 2, which one process does not change"), (1.0, 5.0, 0, "1 of 2, which"), (2.0, 5.0, 1, "mask")],
)
def test_a_buffer_that_one_process_leaves_alone_may_not_move(mask: float, seen: float, moved: int, detail: str) -> None:
    """Of the two one process writes `seen`."""
    model = nn.Module()
    for name in ("mask", "seen"):
        model.register_buffer(name, torch.tensor(1.0))
    buffers: WrittenBuffers = object.__new__(WrittenBuffers)
    written: list[Any] = []
    note: Any = lambda *claim, **words: written.append((*claim, words["variant"], words["detail"]))  # noqa: E731
    buffers.lab, buffers.start, buffers.written = SimpleNamespace(check=note), buffer_hashes(model), {"seen"}  # type: ignore[assignment]
    model.mask, model.seen = torch.tensor(mask), torch.tensor(seen)
    buffers.check("flat", model)
    ((name, off, tolerance, variant, found),) = written
    assert (name, off, tolerance, variant) == ("buffers", moved, 0, "flat")
    assert found.startswith(detail)


class Shards:
    """Five steps of the samples 10 s to 10 s + 3, as two ranks read them; `of_rank_1` replaces those of rank 1."""

    proof_steps = 5

    def __init__(self, of_rank_1: dict[int, list[int]]) -> None:
        self.of_rank_1 = of_rank_1

    def sample_ids(self, step: int, shard: int, _shards: int) -> list[int]:
        right = [10 * step + 2 * shard, 10 * step + 2 * shard + 1]
        return self.of_rank_1.get(step, right) if shard else right

    def full_ids(self, step: int) -> list[int]:
        return [10 * step + index for index in range(4)]


@pytest.mark.parametrize(
    ("of_rank_1", "off"),
    [
        ({}, 0), ({0: [2, 2, 3]}, 1), ({2: [22]}, 1), ({1: [12, 13, 12, 12]}, 2), ({0: [2, 3, 99, 99]}, 2),
        ({0: [2, 2, 2, 3], 1: [12]}, 2), ({3: []}, 0),  # of a long proof the first three steps are looked at
    ],
)  # fmt: skip
def test_each_sample_must_be_assigned_once(of_rank_1: dict[int, list[int]], off: int) -> None:
    batches = Shards(of_rank_1)

    def gather(_name: str, mine: list[list[int]]) -> list[list[list[int]]]:
        return [[batches.sample_ids(step, 0, 2) for step in range(len(mine))], mine]

    lab, written = lab_that_notes(batches=lambda *_, **__: batches, exchange=SimpleNamespace(gather=gather))
    check_samples(lab)
    assert written == [("samples", off, 0)]


@pytest.mark.parametrize(
    ("mine", "differs"), [([1.0, -2.0, 3.0], 0.0), ([1.0, -2.0, 2.5], 0.5), ([1.0, 2.0, 3.25], 4.0), ([-0.0, -2.0, 3.0], 1.0)]
)  # fmt: skip
def test_replicas_are_compared_with_rank_0s(mine: list[float], differs: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[int] = []

    def broadcast(tensor: torch.Tensor, group: object, group_src: int) -> None:  # noqa: ARG001
        sources.append(group_src)
        tensor.copy_(torch.tensor([1.0, -2.0, 3.0]))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    lab, written = lab_that_notes()
    check_same(lab, "flat", [torch.tensor(mine[:1]), torch.tensor([mine[1:]])])
    assert (written, sources) == ([("replicas", differs, 0.0)], [0])
