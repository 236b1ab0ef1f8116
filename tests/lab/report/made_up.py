"""Records of runs that never were: small, exact, and each test bends one of them."""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distlab.lab.report.reading import to_line
from distlab.lab.report.records import (
    Called,
    Chart,
    Check,
    Classes,
    Comparison,
    End,
    Injected,
    Losses,
    Memory,
    MemoryLine,
    Messages,
    Planned,
    Profile,
    Ranks,
    Record,
    Said,
    Skipped,
    Start,
    Steps,
    Table,
    Timeline,
    Wire,
)

MEGA = 10**6
SENT_BYTES = 400_000  # a message of the pipeline
VARIANTS = {"naive": 81e-3, "bucketed": 50e-3, "ddp": 50e-3}  # seconds a step


def start(rank: int = 0, world_size: int = 4, run_id: str = "dp-20261120-171500", **settings: object) -> Start:
    """The first record of a rank, with further settings of the run."""
    config = {
        "RUN_MODE": "dp",
        "WORLD_SIZE": world_size,
        "LAB_STEPS": 20,
        "LAB_BATCH": 16,
        "LAB_DTYPE": "float32",
        "LAB_PROOF": True,
        "LAB_TEXT": None,
    }
    repeat = {"RUN_MODE": "dp", "WORLD_SIZE": str(world_size), "LAB_SEED": "1"}
    versions = {"python": "3.11.2", "torch": "2.13.0+cpu", "lab": "0a1b2c3d4e5f"}
    return Start(
        rank,
        run_id,
        "dp",
        world_size,
        f"worker{rank}",
        config | settings,
        repeat,
        versions,
        "gpt, 1.6M parameters",
        ["ddp"],
    )


MISTAKE = {"name": "no_broadcast", "what": "every rank begins from weights of its own", "check": "replicas"}


def mistaken(records: Ranks) -> Ranks:
    """The same run with a mistake made on purpose."""
    return bent(records, lambda record: replace(record, mistake=MISTAKE) if isinstance(record, Start) else record)


def good_run(world_size: int = 4, steps: int = 20, variants: dict[str, float] = VARIANTS) -> Ranks:
    """A data-parallel run in which everything held."""
    return {
        rank: [
            start(rank, world_size),
            *_of_rank(rank, world_size, steps, variants),
            End(rank, 100.0, 104.0, 112.5, 0.01),
        ]
        for rank in range(world_size)
    }


def drilled_run() -> Ranks:
    """Rank 1 stands still at 3 s."""
    plan = Planned(0, "pause rank 1 for 2 s at step 30", "pause", 1, "survived", 5.0, 30)
    return plus(plus(good_run(), plan), Injected(0, 1, 30, "", 1_000_003.0), rank=1)


FORWARD_S, SEND_S, OPTIMIZER_S = 10e-3, 0.4e-3, 2e-3  # of a pipeline's step; a backward takes twice a forward


def pipeline_run(world_size: int = 4, microbatches: int = 8, variants: tuple[str, ...] = ("gpipe", "1f1b")) -> Ranks:
    """A pipeline whose timelines come from a simulation, so that its bubble is the formula's but for the sends."""
    records = good_run(world_size, variants=dict.fromkeys(variants, 0.4))
    for variant in variants:
        timelines = simulated(variant, world_size, microbatches)
        for rank, spans in enumerate(timelines):
            seconds = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer", "waiting"), 0.0)
            seconds |= {kind: sum(s[3] - s[2] for s in spans if s[0] == kind) for kind in ("forward", "backward")}
            seconds |= {"communication": 0.004 + 0.001 * rank, "optimizer": OPTIMIZER_S, "waiting": 0.05}
            called = Messages(variant, messages(rank, timelines))
            records[rank][-1:-1] = [Timeline(variant, 12, spans), called, Profile(variant, seconds)]
        ideal = (world_size - 1) / (microbatches + world_size - 1)
        bubble = Comparison(variant, "bubble", "", ideal, ideal + 0.035, 0.0, "(p-1)/(m+p-1)", decides=False)
        records[0].insert(-1, bubble)
    return records


def simulated(variant: str, world_size: int, microbatches: int) -> list[list[list[Any]]]:
    """The spans of each stage under gpipe or 1f1b: an action begins when its rank is free and its message is there."""
    ends: dict[tuple[str, int, int], float] = {}  # of kind, microbatch and stage
    spans: list[list[list[Any]]] = [[] for _ in range(world_size)]
    free = [0.0] * world_size
    left = [order(variant, world_size, microbatches, stage) for stage in range(world_size)]
    while any(left):
        for stage in range(world_size):
            kind, number = left[stage][0] if left[stage] else ("", 0)
            sender = stage - 1 if kind == "forward" else stage + 1
            message = ends.get((kind, number, sender)) if 0 <= sender < world_size else 0.0
            if not kind or message is None:
                continue
            del left[stage][0]
            start = max(free[stage], message)
            end = start + FORWARD_S * (1 if kind == "forward" else 2)
            if start > free[stage]:
                spans[stage].append(["receive", str(number), free[stage], start])
            spans[stage] += [[kind, str(number), start, end], ["send", str(number), end, end + SEND_S]]
            ends[kind, number, stage] = free[stage] = end + SEND_S
    for stage, last in enumerate(free):
        spans[stage].append(["optimizer", "", last, last + OPTIMIZER_S])
    return spans


def messages(rank: int, timelines: list[list[list[Any]]]) -> list[list[Any]]:
    """What a stage sends and receives: each send when it was marked, and its receive until it was there."""
    found: list[list[Any]] = []
    for stage, spans in enumerate(timelines):
        for (kind, *_), (then, _, start, end) in itertools.pairwise(spans):
            to = stage + (1 if kind == "forward" else -1)
            if then == "send" and 0 <= to < len(timelines) and rank in (stage, to):
                op = "send" if rank == stage else "recv"
                found.append([op, [stage, to], SENT_BYTES * (op == "send"), SENT_BYTES, 0, start, end])
    return sorted(found, key=lambda call: float(call[5]))


def order(variant: str, world_size: int, microbatches: int, stage: int) -> list[tuple[str, int]]:
    """What a stage does: with gpipe all forwards first, with 1f1b only as many as there are stages from here."""
    ahead = microbatches if variant == "gpipe" else min(microbatches, world_size - stage)
    actions = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(("backward", number))
        if ahead + number < microbatches:
            actions.append(("forward", ahead + number))
    return actions


def bent(records: Ranks, change: Callable[[Record], Record | None], rank: int | None = None) -> Ranks:
    """The same run with each record of `rank` (None: of all) put through `change`; None drops the record."""

    def of_rank(number: int) -> list[Record]:
        if rank not in (None, number):
            return records[number]
        return [new for new in map(change, records[number]) if new is not None]

    return {number: of_rank(number) for number in records}


def without(kind: type[Record], records: Ranks, rank: int | None = None) -> Ranks:
    """The same run without the records of one kind."""
    return bent(records, lambda record: None if isinstance(record, kind) else record, rank)


def with_check(records: Ranks, name: str, difference: float, rank: int = 0) -> Ranks:
    """The same run with another difference in each check of that name."""
    return bent(
        records, lambda r: replace(r, max_abs_diff=difference) if isinstance(r, Check) and r.name == name else r, rank
    )


def with_measured(records: Ranks, variant: str, name: str, measured: float, rank: int) -> Ranks:
    """The same run with another measured value in one rank's comparison."""

    def change(record: Record) -> Record:
        if isinstance(record, Comparison) and (record.variant, record.name) == (variant, name):
            return replace(record, measured=measured)
        return record

    return bent(records, change, rank)


def plus(records: Ranks, *more: Record, rank: int = 0) -> Ranks:
    """The same run with more records at the end of one rank."""
    return records | {rank: [*records[rank], *more]}


def written(folder: Path, records: Ranks) -> Path:
    """The run's folder, as the ranks leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, of_rank in records.items():
        (folder / f"rank{rank}.jsonl").write_text("".join(to_line(record) + "\n" for record in of_rank))
    return folder


def _of_rank(rank: int, world_size: int, steps: int, variants: dict[str, float]) -> list[Record]:
    peers = [peer for peer in range(world_size) if peer != rank]
    share = 9.6 * MEGA / max(1, len(peers))
    made: list[Record] = []
    for number, (variant, seconds) in enumerate(variants.items()):
        wobble = [seconds * (1 + 0.05 * math.sin(7 * step + rank) + 0.002 * rank) for step in range(steps - 2)]
        ring = {peer: 9.61 * MEGA if peer == (rank + 1) % world_size else 0.0 for peer in peers}
        made += [
            Steps(variant, wobble, [0.8 * value for value in wobble]),
            Called(variant, "all_reduce", "dp", 1.0, 6.4 * MEGA, 9.6 * MEGA),
            *(Wire(variant, peer, share * 1.01 if variant == "naive" else ring[peer], 0.0) for peer in peers),
            *memory_records(variant, 20 + 3 * number + 0.2 * rank),
            *(
                Comparison(variant, name, "B", 9.6 * MEGA, measured, 0.15 * MEGA, "2(N-1)/N·S", variant != "ddp")
                for name, measured in (("called bytes", 9.6 * MEGA), ("wire bytes", 9.61 * MEGA))
            ),
        ]
    return made + _of_rank_0(steps, variants) if rank == 0 else made


def memory_records(variant: str, peak_mb: float) -> list[Record]:
    """A variant's memory: 6.4 MB of weights and of gradients stay, activations come and go on top."""
    kinds = ("parameters", "gradients", "optimizer", "activations", "communication")
    rest = dict(zip(kinds, (6_400_000, 6_400_000, 0, 0, 0), strict=True))
    peak = rest | {"activations": round((peak_mb - 12.8) * MEGA)}
    shape = [math.sin(math.pi * part / 40) for part in range(41)]
    line = {kind: [round(rest[kind] + (peak[kind] - rest[kind]) * high) for high in shape] for kind in kinds}
    measured = {"rest bytes": 12.8, "process bytes": 13.1, "process peak bytes": peak_mb + 1}
    predicted = {"rest bytes": 12.8, "process bytes": 12.8, "process peak bytes": peak_mb}
    return [
        Memory(variant, int(peak_mb * MEGA)),
        Classes(variant, rest, peak),
        MemoryLine(variant, 0.3, line),
        *(
            Comparison(
                variant, name, "B", predicted[name] * MEGA, measured[name] * MEGA, 0.128 * MEGA, "8 x P",
                decides=name == "rest bytes" and variant != "ddp",
            )
            for name in measured
        ),
    ]  # fmt: skip


def _of_rank_0(steps: int, variants: dict[str, float]) -> list[Record]:
    sizes = [float(2**power) for power in range(10, 27, 2)]
    curve = [5.5 * math.exp(-step / 12) + 2.4 + 0.1 * math.sin(step) for step in range(steps)]
    return [
        Said("predict", "each rank sends 2(N-1)/N x 6.4 MB = 9.6 MB a step, under 12.8 MB for every N"),
        *(
            Check(variant, name, difference, 1e-12)
            for variant in variants
            for name, difference in (("gradients", 2.8e-17), ("weights", 5.6e-17), ("losses", 0.0))
        ),
        Check("", "shards disjoint", 0.0, 0.0, "16 samples dealt once each"),
        Skipped("sharded", "8 heads cannot be dealt to 3 ranks"),
        *(Losses(name, curve) for name in ("one process", *variants)),
        Table("what each rank holds", ["rank", "before", "after"], [[0, "[1, 2]", "[4, 6]"], [1, "[3, 4]", "[4, 6]"]]),
        Chart(
            "all_reduce by size",
            "bytes",
            "GB/s",
            {
                name: [sizes, [rate * size / (size + 2e5) for size in sizes]]
                for name, rate in (("ring", 2.1), ("gloo", 1.6))
            },
            log_x=True,
        ),
    ]


def unwrapped(lines: Iterable[str]) -> list[str]:
    """The lines of a log, its sentences whole as they were before they were wrapped."""
    return re.sub(r"\n {11}(?=\S)", " ", "\n".join(lines)).splitlines()
