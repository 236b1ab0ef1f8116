"""What the sweep's figures are drawn from: latency, bandwidth and bytes by size, and the server's wall.

T = rounds·α + bytes/B, fitted to each algorithm's times, splits them into a latency α of a round and a bandwidth B of
the busiest link.
"""

import statistics
from collections.abc import Mapping

import torch

from experiments.comm.costs import BYTES, MIB, Costs, Told, even, size
from workers.lab import Lab
from workers.measure.formulas import collectives as formulas
from workers.measure.formulas.seconds import FITTED, LATENCY, RATE
from workers.parallel.picking import pick


def tables(lab: Lab, op: str, costs: Costs, variants: list[str], sizes: list[int]) -> Told:
    """Latency, algbw, busbw and bytes of one operation, by size; the bytes are rank 0's. Returns what they say."""
    factor = formulas.busbw_factor(op, lab.world_size)
    rows: list[list[object]] = []
    for nbytes in sizes:
        picked = pick(op, nbytes, lab.world_size).replace("backend", "gloo")
        for name in variants:
            cost, whole = costs[op, nbytes, name], even(nbytes, lab.world_size)
            speed = [f"{whole / cost.seconds / 1e9 * times:.3f}" for times in (1, factor)]
            bytes_ = [
                f"{BYTES[op](name, lab.world_size, whole, 0):.0f}",
                "-" if cost.wire_bytes is None else f"{cost.wire_bytes:.0f}",
            ]
            rows.append(
                [size(nbytes), name, f"{cost.seconds * 1e6:.0f}", *speed, *bytes_, "picked" if name == picked else ""]
            )
    lab.table(op, ["size", "variant", "us", "algbw GB/s", "busbw GB/s", "predicted B", "wire B", "by size"], rows)
    megabytes = [nbytes / 1e6 for nbytes in sizes]
    times = {name: [costs[op, nbytes, name].seconds for nbytes in sizes] for name in variants}
    milliseconds = {name: [megabytes, [seconds * 1e3 for seconds in column]] for name, column in times.items()}
    busbw = {
        name: [megabytes, [factor * nbytes / seconds / 1e9 for nbytes, seconds in zip(sizes, column, strict=True)]]
        for name, column in times.items()
    }
    lab.chart(f"{op}: time of a call", "MB", "ms", milliseconds, log_x=True, log_y=True)
    lab.chart(f"{op}: busbw", "MB", "GB/s", busbw, log_x=True)
    return Told(rows, busbw)


def crossings(lab: Lab, op: str, costs: Costs, sizes: list[int]) -> None:
    """From which size on which of gloo and plain TCP is the faster one, where both were timed."""
    if any((op, nbytes, name) not in costs for nbytes in sizes for name in ("gloo", "tcp")):
        return
    ratios = [costs[op, nbytes, "gloo"].seconds / costs[op, nbytes, "tcp"].seconds for nbytes in sizes]
    told = [f"{size(sizes[0])} {ratios[0]:.3g}x"]
    for before, ratio, nbytes in zip(ratios, ratios[1:], sizes[1:], strict=False):
        if (before > 1) != (ratio > 1) or nbytes == sizes[-1]:
            told.append(f"{size(nbytes)} {ratio:.3g}x")
    lab.say(f"{op}: speed of tcp over gloo's where it crosses 1 and at both ends: {', '.join(told)}", "crossover")


def fits(lab: Lab, costs: Costs, variants: list[str], sizes: list[int]) -> None:
    """Latency of a round and bandwidth of the busiest link, for each algorithm's all_reduce."""
    rows: list[list[object]] = []
    for name in variants:
        times = {nbytes: costs["all_reduce", nbytes, name].seconds for nbytes in sizes}
        latency_s, bytes_per_s, off = fit(name, lab.world_size, times)
        rounds = formulas.all_reduce_rounds(name, lab.world_size)
        rows.append([name, rounds, shown(latency_s * 1e6), shown(bytes_per_s / 1e9), f"{off:.0%}"])
    # `python -m workers.plan --calibrate` reads this table.
    lab.table(FITTED, ["variant", "rounds", LATENCY, RATE, "typically off by"], rows)


def fit(name: str, world_size: int, times: Mapping[int, float]) -> tuple[float, float, float]:
    """(α, B, median relative error) by least squares of the relative errors, since times span five powers of ten;
    `times` are seconds by bytes."""
    rounds = formulas.all_reduce_seconds(name, world_size, 0, 1.0, 1.0)
    serial = {nbytes: formulas.all_reduce_seconds(name, world_size, nbytes, 0.0, 1.0) for nbytes in times}
    terms = torch.tensor([[rounds / t, serial[nbytes] / t] for nbytes, t in times.items()], dtype=torch.float64)
    ones = torch.ones(len(times), 1, dtype=torch.float64)
    latency_s, s_per_byte = torch.linalg.lstsq(terms, ones).solution.flatten().tolist()
    off = statistics.median(abs(row[0] * latency_s + row[1] * s_per_byte - 1) for row in terms.tolist())
    return latency_s, 1 / s_per_byte, off


def wall(lab: Lab, costs: Costs, variants: list[str], largest: int) -> None:
    """The busiest rank's bytes over S, for any N by the formula, and as counted on rank 0 at this one."""
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
        "The server's wall: bytes that the busiest rank sends in an all_reduce, over S", "ranks", "bytes / S", series
    )
    server, ring = (series[name][1][lab.world_size - 2] for name in ("server", "ring"))
    lab.say(
        f"the server sends {server:g}·S at N={lab.world_size}, and S more with each rank; the ring {ring:.3g}·S, under"
        " 2·S for any N"
    )


def shown(value: float) -> float:
    """Three digits, however slow the link is."""
    return float(f"{value:.3g}")
