"""The lab's own runs as rows of the planner: a hand-written variant as a job and a layout, with its cost.

Sizes come from the run's first record, axes from its ranks' records. FLOP/s are those of its own forward and backward
passes, or of another run (`--calibrate`); the link comes from a `comm` run with as many ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from distlab.lab.report.reading import BrokenRecord, from_line, read_run
from distlab.lab.report.records import Placed, Ranks, Start, select
from distlab.tools.plan.calibration import Measured, lab_parameters, link_of, measured_card, reached, shape_of
from distlab.tools.plan.costs import Cost, cost
from distlab.tools.plan.gpu import gpu_named
from distlab.tools.plan.job import Job, Link, Weights
from distlab.tools.plan.layout import Layout, faults_of
from distlab.tools.plan.memory import boundary_bytes, flying, layers, memory_by_class, microbatches
from distlab.tools.plan.step_time import SLICES


class Training(NamedTuple):
    """How a variant trains: its ZeRO stage, whether persistent buckets store whole gradients, whether activations
    between slices are split over ranks (sequence parallelism), and whether a rank has several stages."""

    stage: int = 0
    buckets: bool = True
    sequence: bool = False
    chunks: bool = False


# By mode the hand-written variants whose messages and memory the planner models: one sum or gather per layer, 1F1B.
TRAININGS = {
    "dp": {"flat": Training(), "bucketed": Training()},
    "fsdp": {"dp": Training(), "zero1": Training(1), "zero2": Training(2, False), "zero3": Training(3, False)},
    "tp": {"megatron": Training(buckets=False), "sequence": Training(buckets=False, sequence=True)},
    "pp": {"1f1b": Training(buckets=False), "interleaved": Training(buckets=False, chunks=True)},
    "mesh": {
        "1f1b": Training(), "interleaved": Training(chunks=True), "sequence": Training(sequence=True), "zero1": Training(1, True, True),
        "zero2": Training(2, False, True), "zero3": Training(3, False, True),
    },
}  # fmt: skip
ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2}
# Settings that change a link's rate and latency: a `comm` run with others does not describe this run's messages.
LINK_SETTINGS = ("LAB_BACKEND", "LAB_DEVICE", "LAB_NET_RATE", "LAB_NET_DELAY")
MOST_LINE_BYTES = 1 << 20  # of a first record
CHANGED = ("LAB_SLOW_RANK", "LAB_SLEEP_MS", "LAB_FAULTS", "LAB_OFFLOAD")  # these make steps longer


class Planned(NamedTuple):
    """Seconds per step and peak bytes of each variant that the planner models, with their source, or why there are
    none."""

    costs: dict[str, Cost]
    sources: list[str]


def priced(records: Ranks, measured: Sequence[Measured]) -> dict[str, Cost]:
    """Return the planner's costs of the variants that it models, with these runs in place of data sheets."""
    return {
        name: replace(cost(job, layout), memory=peak_memory(job, layout, training))
        for name, (training, job, layout) in planned_variants(records, measured).items()
    }


def planned_variants(records: Ranks, measured: Sequence[Measured]) -> dict[str, tuple[Training, Job, Layout]]:
    """Return the variants that the planner models, each as a job and a possible layout."""
    start = next((start for _, start in select(records, Start)), None)
    axes = next((placed.axes for _, placed in select(records, Placed)), {})
    sizes = {name: size for name, (_, size) in axes.items() if size > 1}
    if start is None or not plannable(start, sizes):
        return {}
    found = {
        name: (training, job_of(start, sizes, training, measured), layout_of(start, sizes, training))
        for name, training in TRAININGS[start.run_mode].items()
    }
    return {
        name: (training, job, layout)
        for name, (training, job, layout) in found.items()
        if not faults_of(job, layout)
        and (layout.holding > 1 or not layout.stage)
        and (layout.pipeline > 1 or not training.chunks)
    }


def peak_memory(job: Job, layout: Layout, training: Training) -> dict[str, float]:
    """Return bytes by class at the peak of a rank's tensors, as the lab's ledger counts them; the planner adds up the
    peaks of each class, as an allocator keeps them.

    Gradients of a single microbatch outside buckets appear as activations go. With sequence parallelism hand-written
    slices keep their gathered input; the planner gathers it again: Korthikanti's 26/t + 8 in place of 34/t.
    """
    memory = memory_by_class(job, layout)
    if not training.buckets and microbatches(job, layout) == 1:
        memory["gradients"] = max(0.0, memory["gradients"] - memory["activations"] - memory["logits"])
    if training.sequence and job.recompute == "none":
        gathered = SLICES * layers(job, layout) * boundary_bytes(job, layout) * (1 - 1 / layout.tensor)
        memory["activations"] += gathered * flying(job, layout)
    return memory


def plannable(start: Start, sizes: dict[str, int]) -> bool:
    """Return whether it trains the lab's GPT, without added delays, on axes that the planner has."""
    config = start.config
    return (
        start.run_mode in TRAININGS and config.get("LAB_MODEL") == "gpt" and config.get("LAB_DTYPE") in ITEMSIZES
        and set(sizes) <= {"dp", "tp", "pp"} and not any(config.get(name) for name in CHANGED)
    )  # fmt: skip


def layout_of(start: Start, sizes: dict[str, int], training: Training) -> Layout:
    pipeline = sizes.get("pp", 1)
    chunks = int(start.config.get("LAB_CHUNKS") or 2) if training.chunks and pipeline > 1 else 1
    return Layout(sizes.get("tp", 1), pipeline, sizes.get("dp", 1), training.stage, chunks=chunks)


def job_of(start: Start, sizes: dict[str, int], training: Training, measured: Sequence[Measured]) -> Job:
    """Return the run's model and batch, on ranks with measured numbers alone."""
    config, shape = start.config, shape_of(start.config)
    samples = int(config["LAB_BATCH"])
    parts = sizes.get("dp", 1) * int(config.get("LAB_MICROBATCHES") or 1)
    flops = next((each.flops for each in measured if each.flops), math.inf)
    link = next((each.link for each in measured if each.link), Link(0.0, math.inf))
    itemsize = ITEMSIZES[config["LAB_DTYPE"]]
    return Job(
        lab_parameters(shape, int(config["LAB_SEQ"])), start.world_size, math.inf, shape, int(config["LAB_SEQ"]),
        max(1, samples // parts), samples, False, measured_card(gpu_named("a100"), flops), link, link, start.world_size,
        Weights(itemsize, False, 2.0 * itemsize if config.get("LAB_OPTIMIZER") == "adamw" else 0.0),
        "full" if config.get("LAB_RECOMPUTE") else "none", True, training.sequence, 0.0,
        hides=not any(each.crowded for each in measured),
    )  # fmt: skip


def planned(folder: Path, records: Ranks) -> Planned | None:
    """Plan the run in `folder` for its report, with its own FLOP/s and the newest link next to it; None if the planner
    does not model its mode."""
    start = next((start for _, start in select(records, Start)), None)
    if start is None or start.run_mode not in TRAININGS:
        return None
    if not planned_variants(records, []):
        return Planned({}, ["not planned: only the lab's GPT is, in equal parts on dp, tp and pp, without added delays"])  # fmt: skip
    compute = reached(Path(folder.name), records, start)
    if compute is None:
        return Planned({}, ["not planned: no step was timed, so the ranks' speed is not known"])
    link = next(links(folder, start), None)
    if link is None:
        return Planned(
            {}, [f"not planned: no comm run next to this one has measured the cost of messages: {how(start)}"]
        )
    return Planned(priced(records, [compute, link]), [compute.source, link.source])


def links(folder: Path, start: Start) -> Iterator[Measured]:
    """Yield the links of finished `comm` runs next to `folder` with the same ranks and transport, newest first."""
    nearby = [path for path in folder.resolve().parent.glob("*/rank0.jsonl") if not path.parent.is_symlink()]
    for path in sorted(nearby, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            with path.open("rb") as lines:
                other = from_line(lines.readline(MOST_LINE_BYTES), str(path))
            if isinstance(other, Start) and same_link(other, start):
                yield link_of(Path(path.parent.name), read_run(path.parent))
        except (BrokenRecord, OSError):
            continue


def same_link(other: Start, start: Start) -> bool:
    same_settings = all(other.config.get(name) == start.config.get(name) for name in LINK_SETTINGS)
    return other.run_mode == "comm" and other.world_size == start.world_size and same_settings


def how(start: Start) -> str:
    """Return the settings that start a `comm` run with the same ranks and transport."""
    repeated = "".join(f" {name}={start.repeat[name]}" for name in LINK_SETTINGS if name in start.repeat)
    return f"RUN_MODE=comm WORLD_SIZE={start.world_size}{repeated}"
