"""The cost of collectives from 1 KiB to 64 MiB: latency, bandwidth and bytes sent, compared with gloo's own.

Definitions as in nccl-tests: algbw = S / time, busbw = algbw x 2(N-1)/N for an all_reduce and (N-1)/N for its halves,
so the busbw of every algorithm and N compares with the link's speed. The time of a call is the slowest rank's, the
median of some interleaved rounds.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS
from distlab.techniques.collectives import costs as formulas
from distlab.techniques.collectives.by_hand import Collective, pick
from distlab.techniques.collectives.costs import (
    FITTED,
    LATENCY,
    RATE,
    all_reduce_messages,
    half_messages,
    slowest_of,
    wire_tolerance,
)

from .checks import Trial, uneven

# The cost of a collective at one size: the slowest rank's seconds per call, and the bytes that a rank sends.

KIB, MIB = 1 << 10, 1 << 20
SMALL = 64 * KIB  # below it speeds are in MB/s
BYTES: dict[str, Callable[[str, int, int, int], float]] = {
    "all_reduce": formulas.all_reduce_bytes,
    "reduce_scatter": formulas.reduce_scatter_bytes,
    "all_gather": formulas.all_gather_bytes,
}


@dataclass
class Cost:
    """An operation by a variant at one size: the slowest rank's seconds per call, and this rank's bytes."""

    rounds_s: list[float] = field(default_factory=list)
    wire_bytes: float | None = None
    error: float = 0.0  # the largest error of any call

    @property
    def seconds(self) -> float:
        """Return the median round's time."""
        return statistics.median(self.rounds_s)


def algorithm(variant: str) -> str:
    """Return the algorithm whose formulas a variant has: the lesson's is a ring."""
    return "ring" if variant == "plain" else variant


Costs = dict[tuple[str, int, str], Cost]  # by operation, bytes, variant


def size(nbytes: int) -> str:
    """Format 1024 as "1 KiB"."""
    if nbytes < KIB:
        return f"{nbytes} B"
    return f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"


def even(nbytes: int, world_size: int) -> int:
    """Return the next smaller size with equal chunks of whole floats, at least one per rank."""
    return max(nbytes - nbytes % (4 * world_size), 4 * world_size)


# The data of the sweep's figures: latency, bandwidth and bytes by size, and the server's limit.
#
# T = rounds·α + bytes/B, fitted to each algorithm's times, splits them into a latency α of a round and a bandwidth B
# of the busiest link.


def tables(lab: Lab, op: str, costs: Costs, variants: list[str], sizes: list[int]) -> None:
    """Show latency, algbw, busbw and bytes of one operation, by size; the bytes are rank 0's."""
    factor = formulas.busbw_factor(op, lab.world_size)
    rows: list[list[object]] = []
    for nbytes in sizes:
        picked = pick(op, nbytes, lab.world_size).replace("backend", "gloo")
        for name in variants:
            cost, whole = costs[op, nbytes, name], even(nbytes, lab.world_size)
            speed = [speed_cell(nbytes, whole / cost.seconds * times) for times in (1, factor)]
            bytes_ = [
                f"{BYTES[op](algorithm(name), lab.world_size, whole, 0):.0f}",
                "-" if cost.wire_bytes is None else f"{cost.wire_bytes:.0f}",
            ]
            rows.append(
                [size(nbytes), name, f"{cost.seconds * 1e6:.0f}", *speed, *bytes_, "picked" if name == picked else ""]
            )
    lab.table(op, ["size", "variant", "us", "algbw", "busbw", "predicted B", "wire B", "best by size"], rows)
    times_text = [f"{name} {costs[op, sizes[-1], name].seconds * 1e3:.3g}" for name in variants]
    lab.say(f"{op}, {size(sizes[-1])}, ms: {', '.join(times_text)}", "result", at="normal")
    megabytes = [nbytes / 1e6 for nbytes in sizes]
    times = {name: [costs[op, nbytes, name].seconds for nbytes in sizes] for name in variants}
    milliseconds = {name: [megabytes, [seconds * 1e3 for seconds in column]] for name, column in times.items()}
    busbw = {
        name: [megabytes, [factor * nbytes / seconds / 1e9 for nbytes, seconds in zip(sizes, column, strict=True)]]
        for name, column in times.items()
    }
    lab.chart(f"{op}: time of a call", "MB", "ms", milliseconds, log_x=True, log_y=True)
    lab.chart(f"{op}: busbw", "MB", "GB/s", busbw, log_x=True)


def speed_cell(nbytes: int, bytes_per_s: float) -> str:
    """Return a speed with a unit that suits the call's size: small calls in GB/s would be zeros."""
    unit, scale = ("MB/s", 1e6) if nbytes < SMALL else ("GB/s", 1e9)
    return f"{bytes_per_s / scale:.3f} {unit}"


def crossings(lab: Lab, op: str, costs: Costs, sizes: list[int]) -> None:
    """Log the sizes from which gloo or plain TCP is faster, if both were timed."""
    if any((op, nbytes, name) not in costs for nbytes in sizes for name in ("gloo", "tcp")):
        return
    ratios = [costs[op, nbytes, "gloo"].seconds / costs[op, nbytes, "tcp"].seconds for nbytes in sizes]
    ratios_text = [f"{size(sizes[0])} {ratios[0]:.3g}x"]
    for before, ratio, nbytes in zip(ratios, ratios[1:], sizes[1:], strict=False):
        if (before > 1) != (ratio > 1) or nbytes == sizes[-1]:
            ratios_text.append(f"{size(nbytes)} {ratio:.3g}x")
    lab.say(f"{op}: gloo's time over tcp's, at both ends and where it crosses 1: {', '.join(ratios_text)}", "crossover")


def fits(lab: Lab, costs: Costs, variants: list[str], sizes: list[int]) -> None:
    """Log the latency per round and the bandwidth of the busiest link of each algorithm's all_reduce."""
    rows: list[list[object]] = []
    for name in variants:
        times = {nbytes: costs["all_reduce", nbytes, name].seconds for nbytes in sizes}
        latency_s, bytes_per_s, error = fit(name, lab.world_size, times)
        rounds = formulas.all_reduce_rounds(algorithm(name), lab.world_size)
        rows.append([name, rounds, three_digits(latency_s * 1e6), three_digits(bytes_per_s / 1e9), f"{error:.0%}"])
    # `python -m distlab plan --calibrate` reads this table.
    lab.table(FITTED, ["variant", "rounds", LATENCY, RATE, "median error"], rows)


def fit(name: str, world_size: int, times: Mapping[int, float]) -> tuple[float, float, float]:
    """Fit α and B to `times`, seconds by bytes, by least squares of the relative errors; also return their median."""
    rounds = formulas.all_reduce_seconds(algorithm(name), world_size, 0, 1.0, 1.0)
    serial = {nbytes: formulas.all_reduce_seconds(algorithm(name), world_size, nbytes, 0.0, 1.0) for nbytes in times}
    terms = torch.tensor([[rounds / t, serial[nbytes] / t] for nbytes, t in times.items()], dtype=torch.float64)
    ones = torch.ones(len(times), 1, dtype=torch.float64)
    latency_s, s_per_byte = torch.linalg.lstsq(terms, ones).solution.flatten().tolist()
    error = statistics.median(abs(row[0] * latency_s + row[1] * s_per_byte - 1) for row in terms.tolist())
    return latency_s, 1 / s_per_byte, error


def chart_server_limit(lab: Lab, costs: Costs, variants: list[str], largest: int) -> None:
    """Chart the busiest rank's bytes over S, for any N by formula, and as counted on rank 0 here."""
    worlds = list(range(2, 9))
    series = {
        name: [
            [float(n) for n in worlds],
            [max(formulas.all_reduce_bytes(name, n, MIB, rank) for rank in range(n)) / MIB for n in worlds],
        ]
        for name in ("ring", "tree", "server")
    }
    for name in ("ring", "server"):
        counted = costs["all_reduce", largest, name].wire_bytes if name in variants else None
        if counted is not None:
            series[f"{name}, counted"] = [[float(lab.world_size)], [counted / largest]]
    lab.chart(
        "The server's limit: bytes that the busiest rank sends in an all_reduce, over S", "ranks", "bytes / S", series
    )
    server, ring = (series[name][1][lab.world_size - 2] for name in ("server", "ring"))
    lab.say(
        f"the server sends {server:g}·S at N={lab.world_size}, and S more per additional rank; the ring {ring:.3g}·S,"
        " less than 2·S for any N"
    )


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


SIZES = (8, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COMPARED = (256 * KIB, 4 * MIB, 64 * MIB)
TIMED_HALVES = (
    "gloo",
    "ring",
    "direct",
    "tcp",
)  # of reduce_scatter and all_gather; of the others the bytes are counted alone
# As in the papers; an algorithm's own entry has precedence.
FORMULAS = {
    ("all_reduce", "server"): "(N-1)·S on rank 0, S elsewhere",
    ("all_reduce", "tree"): "2(P-1)/P·S, plus 2·S per rank beyond P = 2^k",
    ("reduce_scatter", "gloo"): "2(N-1)/N·S: an all_reduce and a slice",
    ("reduce_scatter", "server"): "(N-1)/N·S on rank 0, S elsewhere",
    ("reduce_scatter", "tree"): "(N-1)/N·S, and S on each rank beyond P = 2^k",
    ("all_gather", "tree"): "(N-1)/N·S, plus S per rank beyond P = 2^k",
    ("all_reduce", "tcp"): "like server up to 512 KiB, then like direct",
    ("all_gather", "server"): "(N-1)·S on rank 0, S/N elsewhere",
}


def formula(op: str, variant: str) -> str:
    """Return the formula of the bytes that a rank sends in `op` by `variant`, of S bytes over N ranks."""
    return FORMULAS.get((op, variant), "2(N-1)/N·S" if op == "all_reduce" else "(N-1)/N·S")


REPEATED_BYTES = 16 * MIB  # small calls are repeated up to this many bytes, and 16 times, in each round


def run(lab: Lab, collectives: Mapping[str, Collective], largest_bytes: int) -> None:
    """Run the sweep, check contents and bytes against the formulas, and show the times."""
    variants, sizes = list(collectives), [nbytes for nbytes in SIZES if nbytes <= largest_bytes]
    costs: Costs = {}
    swept_mib = {(nbytes, op): calls(op, nbytes, variants) * nbytes / MIB for nbytes in sizes for op in BYTES}
    with lab.work.of(sum(swept_mib.values()), "MiB of all calls"):
        for (nbytes, op), mib in swept_mib.items():
            lab.at(sizes.index(nbytes), f"{op} of {size(nbytes)}")
            costs |= {(op, nbytes, name): cost for name, cost in price(lab, op, nbytes, collectives).items()}
            lab.work.advance(mib)
    check_contents(lab, costs, collectives)
    compare(lab, costs)
    for op in BYTES:
        if names := timed(op, variants):
            tables(lab, op, costs, names, sizes)
    if lab.world_size > 1:
        for op in BYTES:
            crossings(lab, op, costs, sizes)
        fits(lab, costs, variants, sizes)
        chart_server_limit(lab, costs, variants, sizes[-1])


def calls(op: str, nbytes: int, variants: Iterable[str]) -> int:
    """Return how many calls `price` times for an operation at one size."""
    return rounds(nbytes) * repeats(nbytes) * len(timed(op, variants))


def timed(op: str, variants: Iterable[str]) -> list[str]:
    return [name for name in variants if op == "all_reduce" or name in TIMED_HALVES]


def rounds(nbytes: int) -> int:
    """Return the number of rounds in which the variants take turns."""
    return 3 if nbytes < 16 * MIB else 2


def repeats(nbytes: int) -> int:
    """Return the consecutive calls of one variant in one round."""
    return max(1, min(16, REPEATED_BYTES // nbytes))


def price(lab: Lab, op: str, nbytes: int, collectives: Mapping[str, Collective]) -> dict[str, Cost]:
    """Return the bytes of one call, which also warms up, and the times of some interleaved rounds.

    Each call has different numbers; they are prepared before the timing and checked after it.
    """
    repeated, names = repeats(nbytes), timed(op, collectives)
    numel = even(nbytes, lab.world_size) // 4
    trials = [Trial.of(op, lab.rank, lab.world_size, numel, lab.device) for _ in range(repeated)]
    costs = {name: Cost() for name in collectives if name in names or nbytes in COMPARED}
    for name, cost in costs.items():
        prepare(trials[:1], collectives[name], 0)
        with lab.count() as traffic:
            trials[0].run(collectives[name])
        cost.wire_bytes = traffic.wire_bytes if traffic.wire_error is None else None
        cost.error = trials[0].error()
    for number in range(rounds(nbytes)):
        for name in names:
            prepare(trials, collectives[name], 1 + number * repeated)
            costs[name].rounds_s.append(lab.seconds(partial(run_next, iter(trials), collectives[name]), repeated))
            costs[name].error = max(costs[name].error, *(trial.error() for trial in trials))
    seconds_by_rank = lab.exchange.everyone(op, [seconds for cost in costs.values() for seconds in cost.rounds_s])
    slowest = slowest_of(seconds_by_rank)
    for cost in costs.values():
        cost.rounds_s, slowest = slowest[: len(cost.rounds_s)], slowest[len(cost.rounds_s) :]
    return costs


def prepare(trials: list[Trial], collective: Collective, first: int) -> None:
    """Fill in new numbers for each call, from repeat `first` on, and overwrite the scratch memory."""
    for repeat, trial in enumerate(trials, first):
        trial.prepare(repeat)
    collective.peers.memory.poison()


def run_next(trials: Iterator[Trial], collective: Collective) -> None:
    next(trials).run(collective)


def check_contents(lab: Lab, costs: Costs, collectives: Mapping[str, Collective]) -> None:
    """Check the result of every call, at all sizes of the sweep and at uneven lengths, against the formula."""
    for name, collective in collectives.items():
        for op in BYTES:
            lab.at(0, f"contents of {op} by {name}")
            swept = [cost.error for (other, _, of), cost in costs.items() if (other, of) == (op, name)]
            worst = max([uneven(collective, op, lab.device), *swept])
            lab.check("contents", worst, 0.0, variant=name, detail=f"{op}, every call at every size")


def compare(lab: Lab, costs: Costs) -> None:
    """Check the sent bytes of the larger sizes against the formula; gloo's are informational."""
    for (op, nbytes, name), cost in costs.items():
        if nbytes in COMPARED and cost.wire_bytes is not None:
            predicted = BYTES[op](algorithm(name), lab.world_size, even(nbytes, lab.world_size), lab.rank)
            sent = messages(op, algorithm(name), lab.world_size, even(nbytes, lab.world_size), lab.rank)
            tolerance = wire_tolerance(predicted, sent)
            lab.compare(
                f"wire bytes {op} {size(nbytes)}", predicted, cost.wire_bytes, tolerance=tolerance, variant=name,
                formula=formula(op, name), shown=PYTORCHS if name in lab.mode.by_torch else "",
            )  # fmt: skip


def messages(op: str, name: str, world_size: int, nbytes: int, rank: int) -> int:
    if op == "all_reduce":
        return all_reduce_messages(name, world_size, nbytes, rank)
    return half_messages(name, op, world_size, nbytes, rank)
