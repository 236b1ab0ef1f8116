"""The planner beside the lab's own steps: `python -m benchmarks.planned [ROUNDS]`.

Predicted and measured seconds of a step, and bytes at the peak, of each variant by hand that the planner knows: a GPT
of 3.3M parameters in float32 with SGD. What `distlab plan --calibrate` takes from a `dp` and a `comm` run is measured
in the same rounds as the steps, which a noisy second hits alike: a step of every rank by itself, and all_reduces of a
few sizes in all groups at once. Errors are of the medians. Peaks are those of runs of one step.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.rounds import Timing, interleave, on_ranks, table
from benchmarks.runs import run_lab
from benchmarks.steps import WARMUP_STEPS, step_of
from distlab.collectives.by_hand import Collective
from distlab.config import Config
from distlab.experiments.comm.benchmark import fit
from distlab.mesh.grid import Mesh
from distlab.plan.calibration import BY_HAND, Measured, fills_cores, lab_parameters, shape_of
from distlab.plan.job import Link
from distlab.plan.own_runs import WAYS, priced
from distlab.plan.step_time import executed_flops
from distlab.rank.mode_loader import load
from distlab.report.reading import read_run
from distlab.report.records import Ranks, Start, select

BATCH = 8
SIZES = {"LAB_WIDTH": "256", "LAB_DEPTH": "4", "LAB_SEQ": "128", "LAB_BATCH": str(BATCH)}
# By number of ranks the modes, and what each is given beside SIZES. Stages have a core each: of more ranks than cores
# one computes faster while another idles.
MODES: dict[int, dict[str, dict[str, str]]] = {
    2: {"dp": {}, "fsdp": {}, "tp": {}, "pp": {"LAB_MICROBATCHES": "4"}},
    4: {"mesh": {"LAB_MESH": "dp2,tp2", "LAB_MICROBATCHES": "1"}},
}
MESSAGES_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
GROUP = 2  # ranks along each axis of all these modes
LARGE_BYTES = MESSAGES_BYTES[2:]
COMPUTE = "compute"
WITHIN = 0.15


class Peaks(NamedTuple):
    """What a run of one step of a mode wrote, and the most bytes of its fullest rank by variant."""

    records: Ranks
    peak_bytes: dict[str, int]


def settings(mode: str, ranks: int) -> dict[str, str]:
    return {"RUN_MODE": mode, "WORLD_SIZE": str(ranks)} | SIZES | MODES[ranks].get(mode, {})


def variants(mode: str) -> list[str]:
    """Those that the planner knows; chunks, which want a pipeline, in pp alone."""
    return [name for name, way in WAYS[mode].items() if mode == "pp" or not way.chunks]


def peaks(mode: str, ranks: int) -> Peaks:
    with tempfile.TemporaryDirectory() as folder:
        quick = {"LAB_STEPS": "1", "LAB_PROOF": "0", "LAB_LOG": "quiet", "LAB_VARIANT": ",".join(variants(mode))}
        run = run_lab(Path(folder), **settings(mode, ranks), **quick)
        held = {each["name"]: [sum((of or {}).values()) for of in each["peak_by_class"]] for each in run["variants"]}
        return Peaks(read_run(Path(folder) / "latest"), {name: max(of_ranks) for name, of_ranks in held.items()})


def measure(world: dist.ProcessGroup, rounds: int) -> dict[str, Timing]:
    """Steps of all variants, of each rank by itself, and all_reduces, interleaved."""
    ranks = world.size()
    alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank(world)]
    own = settings("dp", ranks) | {"LAB_BATCH": str(BATCH // ranks), "WORLD_SIZE": "1"}
    steps = {COMPUTE: prepared("dp", own, "flat", alone)}
    for mode in MODES[ranks]:
        steps |= {f"{mode} {name}": prepared(mode, settings(mode, ranks), name, world) for name in variants(mode)}
    for step in [step for step in steps.values() for _ in range(WARMUP_STEPS)]:
        step()
    firsts = range(0, ranks, GROUP)
    group = [dist.new_group(range(first, first + GROUP)) for first in firsts][dist.get_rank(world) // GROUP]
    messages = {str(nbytes): message(group, nbytes) for nbytes in MESSAGES_BYTES}
    halves = {f"halves {nbytes}": both_halves(group, nbytes) for nbytes in LARGE_BYTES}
    return interleave(steps | messages | halves, world, rounds)


def prepared(mode: str, given: dict[str, str], variant: str, group: dist.ProcessGroup) -> Callable[[], None]:
    config = Config.read(given)
    return step_of(variant, Mesh.grid(load(mode).axes(config), group), config)


def message(group: dist.ProcessGroup, nbytes: int) -> Callable[[], object]:
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def both_halves(group: dist.ProcessGroup, nbytes: int) -> Callable[[], object]:
    """A reduce_scatter and an all_gather, as the sharded strategies make them."""
    collective, whole = Collective(group, BY_HAND), torch.zeros(nbytes // 4)
    chunk = torch.zeros(nbytes // 4 // group.size())

    def call() -> None:
        collective.reduce_scatter(chunk, whole)
        collective.all_gather(whole, chunk)

    return call


def calibration(timings: dict[str, Timing], records: Ranks, ranks: int) -> Measured:
    """FLOP/s of a rank while all compute, and latency and rate of an all_reduce, as the lab's runs fit them."""
    start = next(start for _, start in select(records, Start))
    shape, seq = shape_of(start.config), int(start.config["LAB_SEQ"])
    flops = executed_flops(shape, lab_parameters(shape, seq), seq, BATCH * seq / ranks) / timings[COMPUTE].median_s
    times = {nbytes: timings[str(nbytes)].median_s for nbytes in MESSAGES_BYTES}
    latency_s, bytes_per_s, _ = fit("gloo", GROUP, times)
    halves = median(timings[f"halves {each}"].median_s / timings[str(each)].median_s for each in LARGE_BYTES)
    link = f"α = {latency_s * 1e6:.3g} us, B = {bytes_per_s / 1e9:.3g} GB/s, halves {halves:.2f} times an all_reduce"
    told = f"{ranks} ranks: {flops / 1e9:.3g} GFLOP/s each, {link}"
    return Measured(Link(max(0.0, latency_s), bytes_per_s, halves=halves), flops, told, crowded=fills_cores(records, 1))


def rows_of(ranks: int, rounds: int) -> Iterator[list[str | int]]:
    """A row for each variant, after a line that says what was measured to calibrate with."""
    found = {mode: peaks(mode, ranks) for mode in MODES[ranks]}
    timings = on_ranks(ranks, measure, rounds)
    measured = calibration(timings, next(iter(found.values())).records, ranks)
    print(measured.told, flush=True)
    for mode, (records, peak_bytes) in found.items():
        for name, cost in priced(records, [measured]).items():
            step_s, peak = timings[f"{mode} {name}"].median_s, peak_bytes[name]
            step = [f"{cost.step_s * 1e3:.0f}", f"{step_s * 1e3:.0f}", f"{cost.step_s / step_s - 1:+.0%}"]
            held = [f"{cost.held_bytes / 1e6:.1f}", f"{peak / 1e6:.1f}", f"{cost.held_bytes / peak - 1:+.0%}"]
            yield [mode, ranks, name, *step, *held]


def main(rounds: str = "15") -> None:
    """Print the table, and how many rows are within 15 %."""
    rows = [row for ranks in MODES for row in rows_of(ranks, int(rounds))]
    heading = ["mode", "ranks", "variant", "ms planned", "ms a step", "error", "MB planned", "MB at peak", "error"]
    print(table(heading, rows))
    for what, column in (("step", 5), ("peak", 8)):
        errors = [abs(int(str(row[column]).rstrip("%"))) for row in rows]
        held = sum(error <= 100 * WITHIN for error in errors)
        print(f"{what}: {held} of {len(errors)} within {WITHIN:.0%}, worst {max(errors)}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
