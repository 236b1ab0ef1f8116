"""The lab's own runs in the planner: the known variants, their layouts, and the planned times in reports."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from distlab.lab.report.reading import BrokenRecord
from distlab.lab.report.records import Load, Placed, Profile, Ranks, Record, Start, Table
from distlab.techniques.collectives.costs import FITTED, LATENCY, RATE
from distlab.tools.plan.calibration import Measured, calibrate
from distlab.tools.plan.job import Link
from distlab.tools.plan.own_runs import planned, planned_variants, priced
from tests.lab.report.made_up import written

pytestmark = pytest.mark.timeout(60)

WIDTH, DEPTH, SEQ, BATCH = 32, 6, 24, 12
RATE_BYTES, FLOPS = 1e6, 1e9
MEASURED = Measured(Link(0.0, RATE_BYTES), FLOPS, "made up", crowded=True)
CONFIG = {
    "LAB_MODEL": "gpt", "LAB_WIDTH": WIDTH, "LAB_DEPTH": DEPTH, "LAB_HEADS": 4, "LAB_SEQ": SEQ, "LAB_BATCH": BATCH,
    "LAB_DTYPE": "float32", "LAB_OPTIMIZER": "sgd", "LAB_BACKEND": "gloo", "LAB_DEVICE": "cpu", "LAB_TIE": False,
    "LAB_RECOMPUTE": False, "LAB_CHUNKS": 2, "LAB_MICROBATCHES": None, "LAB_THREADS": 1,
}  # fmt: skip
PARAMETERS = 12 * WIDTH**2 * DEPTH + 13 * WIDTH * DEPTH + 2 * WIDTH + (2 * 256 + SEQ) * WIDTH


def run(mode: str, axes: dict[str, int], *more: Record, **settings: object) -> Ranks:
    """Records of a run with a mesh of these axes."""
    world_size = 1
    for size in axes.values():
        world_size *= size
    placed = Placed("127.0.0.1", "cpu", {name: [0, size] for name, size in axes.items()}, {})
    start = Start(0, "made-up", mode, world_size, "host", CONFIG | settings, {}, {}, "gpt, 0.1M parameters", ["ddp"])
    return {0: [start, placed, *more]}


def load(cores: int) -> Load:
    return Load("start", "machine", cores, "processor", None, None, None, 0.0)


def fitted(*settings: tuple[str, object], world_size: int = 3) -> Ranks:
    table = Table(FITTED, ["variant", "rounds", LATENCY, RATE, "typically off by"], [["gloo", 4, 250.0, 0.5, "9%"]])
    return run("comm", {"dp": world_size}, table, **dict(settings))


def test_each_variant_has_its_layout() -> None:
    found = planned_variants(run("mesh", {"dp": 3, "pp": 2, "tp": 2, "cp": 1}, LAB_MICROBATCHES=2), [MEASURED])
    layouts = {name: layout.name for name, (_, _, layout) in found.items()}
    assert layouts["1f1b"] == layouts["sequence"] == "tp 2 x pp 2 x dp 3"
    assert layouts["interleaved"] == "tp 2 x pp 2 x dp 3 x 2 chunks"
    assert layouts["zero3"] == "tp 2 x pp 2 x zero3 3"
    way, job, _ = found["zero1"]
    assert (job.samples, job.global_samples, job.num_parameters) == (2, BATCH, PARAMETERS)
    assert way.sequence
    assert job.sequence_parallel
    assert not planned_variants(run("dp", {"dp": 5}), [MEASURED])  # five ranks do not divide twelve samples
    assert set(planned_variants(run("mesh", {"tp": 2}), [MEASURED])) == {"1f1b", "sequence"}  # ZeRO needs replicas


@pytest.mark.parametrize(
    "settings", [{"LAB_MODEL": "mlp"}, {"LAB_SLOW_RANK": "1:0.5"}, {"LAB_SLEEP_MS": 3.0}, {"LAB_DTYPE": "float16"}]
)
def test_unsupported_settings_are_not_planned(settings: dict[str, object]) -> None:
    assert planned_variants(run("dp", {"dp": 3}), [MEASURED])
    assert not planned_variants(run("dp", {"dp": 3}, **settings), [MEASURED])
    assert not planned_variants(run("moe", {"dp": 3}), [MEASURED])
    assert not planned_variants(run("mesh", {"dp": 3, "cp": 2}), [MEASURED])


def test_no_overlap_where_ranks_fill_their_cores() -> None:
    records = run("dp", {"dp": 3})
    sum_s = 4 / 3 * 4 * PARAMETERS / RATE_BYTES
    parts = priced(records, [MEASURED])["flat"].parts
    assert parts["data"] == pytest.approx(sum_s)
    hidden_s = sum(parts[name] for name in ("products", "attention", "elementwise", "vocabulary")) * 2 / 3
    overlapped = priced(records, [replace(MEASURED, crowded=False)])["flat"].parts["data"]
    assert overlapped == pytest.approx(max(0.0, sum_s - hidden_s))
    assert overlapped < parts["data"]


def test_a_pipeline_without_overlap_waits_every_turn() -> None:
    records = run("pp", {"pp": 3}, LAB_MICROBATCHES=4)
    boundary_s = BATCH / 4 * SEQ * WIDTH * 4 / RATE_BYTES
    waits = [
        priced(records, [replace(MEASURED, crowded=crowded)])["1f1b"].parts["pipeline"] for crowded in (True, False)
    ]
    assert waits == [pytest.approx(2 * turns * boundary_s) for turns in (4 + 3 - 1, 3)]


def test_gradients_outside_buckets_replace_activations() -> None:
    fsdp = priced(run("fsdp", {"dp": 3}), [MEASURED])
    assert fsdp["zero1"].memory["gradients"] == 4 * PARAMETERS
    assert fsdp["zero2"].memory["gradients"] == 0  # smaller than the activations that they replace
    twice = priced(run("fsdp", {"dp": 3}, LAB_MICROBATCHES=2), [MEASURED])
    assert twice["zero2"].memory["gradients"] == pytest.approx(4 * PARAMETERS / 3)
    tp = priced(run("tp", {"tp": 2}), [MEASURED])
    whole = BATCH * SEQ * WIDTH * 4
    saved = DEPTH * whole * (4 * 4 + 2) / 4 / 2  # inputs of norms and blocks: each rank keeps its own rows
    kept = DEPTH * 2 * whole / 2  # gathered inputs of two slices per layer
    assert tp["megatron"].memory["activations"] - tp["sequence"].memory["activations"] == pytest.approx(saved - kept)


def test_flops_come_from_the_fastest_handwritten_variant(tmp_path: Path) -> None:
    seconds = {"flat": 0.3, "bucketed": 0.2, "ddp": 0.1}
    profiles = [Profile(name, {"forward": total_s / 2, "backward": total_s / 2}) for name, total_s in seconds.items()]
    crowded = calibrate(written(tmp_path / "dp", run("dp", {"dp": 3}, load(1), *profiles)))
    embedded = 256 * WIDTH
    flops = 6 * (PARAMETERS - embedded) + 7 * SEQ * WIDTH * DEPTH
    assert crowded.flops == pytest.approx(flops * BATCH * SEQ / 3 / 0.2)
    assert crowded.crowded
    assert "no message is hidden" in crowded.source
    assert not calibrate(written(tmp_path / "free", run("dp", {"dp": 3}, load(2), *profiles))).crowded
    with pytest.raises(BrokenRecord, match="of dp or fsdp with LAB_MODEL=gpt for FLOP/s"):
        calibrate(written(tmp_path / "mlp", run("dp", {"dp": 3}, load(2), *profiles, LAB_MODEL="mlp")))


def test_all_reduce_halves_cost_the_measured_time(tmp_path: Path) -> None:
    def swept(title: str, *rows: tuple[str, str, str]) -> Table:
        return Table(title, ["size", "variant", "us"], [list(row) for row in rows])

    records = fitted()
    records[0] += [
        swept("all_reduce", ("4 KiB", "gloo", "1"), ("1 MiB", "gloo", "100"), ("4 MiB", "gloo", "400")),
        swept("reduce_scatter", ("4 KiB", "direct", "9"), ("1 MiB", "direct", "90"), ("4 MiB", "direct", "300")),
        swept("all_gather", ("4 KiB", "direct", "9"), ("1 MiB", "direct", "80"), ("4 MiB", "gloo", "1")),
    ]
    link = calibrate(written(tmp_path / "comm", records)).link
    assert link is not None
    assert link.halves == pytest.approx(1.7)  # at the only large size that all three tables have
    plain = calibrate(written(tmp_path / "plain", fitted())).link
    assert plain is not None
    assert plain.halves == 1
    slow = replace(MEASURED, link=replace(Link(0.0, RATE_BYTES), halves=1.7))
    fsdp, tp = run("fsdp", {"dp": 3}), run("tp", {"tp": 2})
    for records, name, axis, factor in ((fsdp, "dp", "data", 1), (fsdp, "zero2", "data", 1.7), (tp, "megatron", "tensor", 1), (tp, "sequence", "tensor", 1.7)):  # fmt: skip
        before = priced(records, [MEASURED])[name].parts[axis]
        assert priced(records, [slow])[name].parts[axis] == pytest.approx(factor * before)


def test_report_uses_a_link_of_equal_world_size(tmp_path: Path) -> None:
    profile = Profile("megatron", {"forward": 0.1, "backward": 0.2})
    records = run("tp", {"tp": 3}, profile, LAB_HEADS=3, LAB_WIDTH=33)
    folder = written(tmp_path / "tp", records)
    none = planned(folder, records)
    assert none is not None
    assert not none.costs
    assert "RUN_MODE=comm WORLD_SIZE=3" in none.sources[0]

    written(tmp_path / "other-ranks", fitted(world_size=2))
    written(tmp_path / "slower", fitted(("LAB_NET_RATE", "10mbit")))
    written(tmp_path / "cut-short", run("comm", {"dp": 3}))
    assert planned(folder, records) == none

    written(tmp_path / "comm", fitted())
    os.utime(tmp_path / "comm" / "rank0.jsonl", (1e9, 1e9))  # the oldest, and the only suitable one
    found = planned(folder, records)
    assert found is not None
    assert set(found.costs) == {"megatron", "sequence"}
    assert [sentence for sentence in found.sources if "from comm (gloo)" in sentence]


def test_a_run_without_steps_gives_the_reason(tmp_path: Path) -> None:
    untimed = planned(tmp_path, run("dp", {"dp": 3}))
    assert untimed is not None
    assert not untimed.costs
    assert "no step was timed" in untimed.sources[0]
    slowed = planned(tmp_path, run("dp", {"dp": 3}, LAB_SLOW_RANK="1:0.5"))
    assert slowed is not None
    assert "without added delays" in slowed.sources[0]
    assert planned(tmp_path, run("moe", {"dp": 3})) is None
