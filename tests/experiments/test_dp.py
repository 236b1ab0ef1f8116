"""Data parallelism: wrong assignment of samples, stored bytes, a slow link and a slow rank."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.contract import Instead, Mistake
from distlab.experiments import dp
from distlab.experiments.dp.checks import MeansOfShards, NoSampler, NoSetEpoch
from distlab.experiments.dp.predictions import gradient_bytes, predict
from distlab.lab.config import Config
from distlab.lab.measure.memory import MemoryLedger
from distlab.lab.measure.traffic import Calls
from distlab.lab.report.reading import from_line
from distlab.lab.report.records import Profile, Said
from distlab.lab.report.verdict import judge
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model, outline
from distlab.techniques.data_parallel.buckets import GradientBuckets
from tests.experiments.test_proofs import SMALL
from tests.labs import TINY, built, failed, one_rank, run_experiment
from tests.trained import differences, microbatches_of
from tests.warm_ranks import Ranks

VARIANTS = ("per_parameter", "flat", "bucketed", "ring", "ddp")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL["dp"] | {"WORLD_SIZE": str(world_size)} | settings)


def batches_by(kind: type[Batches]) -> Batches:
    """Return 16 samples of 5 bytes, assigned by `kind`."""
    config = Config.read({"LAB_WIDTH": "8", "LAB_SEQ": "5"})
    return kind(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)


def test_means_of_shards_weigh_samples_unequally() -> None:
    batches = batches_by(MeansOfShards)
    parts = [part for shard in range(4) for part in batches.microbatches(0, shard, 4)]
    assert sum(part.share * part.targets.numel() for part in parts) == pytest.approx(1.0)
    assert len({part.share for part in parts}) > 1
    assert len({part.share for shard in range(4) for part in batches_by(Batches).microbatches(0, shard, 4)}) == 1


def test_no_sampler_repeats_samples_in_every_shard() -> None:
    batches = batches_by(NoSampler)
    times = Counter(sample for shard in range(4) for sample in batches.sample_ids(0, shard, 4))
    assert max(times.values()) == 4
    assert len(times) < 16


def test_no_set_epoch_repeats_the_first_epoch() -> None:
    batches = batches_by(NoSetEpoch)
    assert batches.sample_ids(2, 0, 2) == batches.sample_ids(0, 0, 2)
    assert batches_by(Batches).sample_ids(2, 0, 2) != batches_by(Batches).sample_ids(0, 0, 2)


def test_hook_race_gives_repeatable_errors(ranks: Ranks) -> None:
    config = config_of(3, LAB_BUG="hook_race")
    first, second = (ranks(3, differences, config, ("bucketed",)) for _ in range(2))
    assert first == second


def test_collectives_per_step_equal_parameters_or_buckets() -> None:
    config = config_of(2, LAB_DTYPE="float64")
    predicted = {p.variant: p.calls for p in predict(config) if p.name == "wire bytes"}
    assert predicted["per_parameter"] == len(list(outline(config).parameters()))
    assert predicted["flat"] == 1 < predicted["bucketed"] < predicted["per_parameter"]


def test_predicted_bytes_stay_under_twice_the_gradients() -> None:
    for world_size in range(1, 9):
        config = config_of(world_size)
        size = gradient_bytes(config)
        for prediction in (prediction for prediction in predict(config) if prediction.name == "wire bytes"):
            assert len(prediction.value) == world_size
            assert sum(prediction.value) == pytest.approx(2 * (world_size - 1) * size, rel=1e-12)
            assert max(prediction.value) <= 2 * size


# --- stored bytes ---


def stored_bytes(group: dist.ProcessGroup, config: Config) -> dict[str, dict[str, int]]:
    """Return the stored bytes by class of each variant, after three steps."""
    dtype, found = getattr(torch, config.dtype), {}
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=dtype)
    for name in VARIANTS:
        with MemoryLedger() as memory:
            strategy = built(dp.MODE, name, build_model(config, 1).to(dtype), group, config)
            for step in range(3):
                with memory.step() if step == 2 else nullcontext():
                    strategy.backward(batches.microbatches(step, group.rank(), group.size()))
                    strategy.update()
            del strategy
        found[name] = memory.rest
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (3, {"LAB_OPTIMIZER": "adamw"}),
        (2, {"LAB_DTYPE": "bfloat16", "LAB_OPTIMIZER": "adamw", "LAB_MICROBATCHES": "2"}),
        (2, {"LAB_CLIP": "0.1", "LAB_TIE": "1"}),
    ],
)
def test_stored_bytes_equal_the_formula(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    config = config_of(world_size, **settings)
    predicted = {p.variant: p.value for p in predict(config) if p.name == "rest bytes"}
    gradients = gradient_bytes(config)
    for rank, of_rank in enumerate(ranks(world_size, stored_bytes, config)):
        for name, stored in of_rank.items():
            assert (stored["parameters"], stored["gradients"]) == (gradients, gradients), name
            assert stored["activations"] == 0, name
            assert sum(stored.values()) - stored["communication"] == predicted[name][rank], name
        communication = {name: stored["communication"] for name, stored in of_rank.items() if stored["communication"]}
        assert set(communication) == {"ring", "ddp"}  # scratch memory, and DDP's buckets next to the gradients
        assert communication["ddp"] == gradients


class LeakyBuckets(GradientBuckets):
    """Buckets that keep a copy of the previous gradients."""

    def finish(self) -> None:
        super().finish()
        self.kept = [bucket.flat.clone() for bucket in self.buckets]


def run_leaky_rank(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    """Run `flat` with such buckets on one rank."""
    leak = Mistake("gradients are kept", "rest bytes", Instead(("flat",), {"GradientBuckets": LeakyBuckets}))
    return one_rank(
        group, settings, folder, replace(dp.MODE, mistakes={**dp.MODE.mistakes, "leak": leak}).mistaken("leak")
    )


def test_leaked_gradients_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "dp", "LAB_VARIANT": "flat", "LAB_PROOF": "0", "LAB_OPTIMIZER": "adamw"}
    run, _ = run_experiment(ranks, 2, tmp_path / "good", **settings)
    assert (run["verdict"], failed(run)) == ("pass", set())
    assert "rest bytes" in {entry["name"] for entry in run["comparisons"] if entry["decides"]}
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | TINY | settings
    lines = ranks(2, run_leaky_rank, settings, str(tmp_path / "leaking"))
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert (run["verdict"], failed(run)) == ("fail", {"rest bytes", "peak bytes"})
    assert run["variants"][0]["rest_by_class"][0]["activations"] > 0


# --- on a slow link ---


def calls_of_a_step(group: dist.ProcessGroup, rate: str | None) -> list[tuple[str, float]]:
    """Return the calls that `bucketed` makes in a step on a link of this rate."""
    config = config_of(group.size(), LAB_DTYPE="float64", **({"LAB_NET_RATE": rate} if rate else {}))
    strategy = built(dp.MODE, "bucketed", build_model(config, 1).double(), group, config)
    with Calls() as calls:
        strategy.backward(microbatches_of(config, group, 0))
    return [(op.op, op.calls) for op in calls.ops()]


def test_only_two_ranks_on_slow_links_swap_buckets(ranks: Ranks) -> None:
    predicted = {size: predict(config_of(size, LAB_DTYPE="float64")) for size in (2, 3)}
    buckets = {size: next(p.calls for p in of_size if p.variant == "bucketed") for size, of_size in predicted.items()}
    assert ranks(2, calls_of_a_step, "500mbit") == [[("send", buckets[2])]] * 2
    assert ranks(2, calls_of_a_step, None) == [[("all_reduce", buckets[2])]] * 2
    assert ranks(3, calls_of_a_step, "500mbit") == [[("all_reduce", buckets[3])]] * 3


def test_swapped_buckets_are_proven_and_counted(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"LAB_VARIANT": "bucketed,ddp", "LAB_NET_RATE": "1gbit", "LAB_BATCH": "9", "LAB_BUCKET_MIB": "0.02"}
    run, _ = run_experiment(ranks, 2, tmp_path, RUN_MODE="dp", **settings)
    assert (run["verdict"], failed(run)) == ("pass", set())
    names = {claim["name"] for claim in run["checks"] + run["comparisons"] if claim["variant"] == "bucketed"}
    assert {"gradients", "weights", "replicas", "wire bytes", "calls"} <= names


def test_a_slow_rank_is_slower_and_named(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 runs at a fiftieth of its speed, which is more than the noise of a shared machine."""
    settings = {"RUN_MODE": "dp", "LAB_VARIANT": "flat", "LAB_PROOF": "0", "LAB_SLOW_RANK": "1:0.02"}
    run, by_rank = run_experiment(ranks, 2, tmp_path, **settings)
    assert run["verdict"] == "pass"
    (message,) = [each.text for each in by_rank[0] if isinstance(each, Said) and each.heading == "slowed"]
    assert message.startswith("rank 1 runs at 0.02 of its speed")
    # Seconds by kind of phase.
    quick, slow = (next(each.seconds for each in by_rank[rank] if isinstance(each, Profile)) for rank in (0, 1))
    assert all(slow[kind] > 5 * quick[kind] for kind in ("forward", "backward"))
