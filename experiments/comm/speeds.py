"""What the sweep says of speed, held to what it says of bytes and time: algbw x time = S, busbw = algbw x factor.

In GB/s of 10^9 bytes, as nccl-tests has them, with the factor as its paper states it. The cells of a table are rounded:
a number may be off by half of its last digit, and by that of what it is held against.
"""

import math

from experiments.comm.costs import Costs, Told, even, size
from workers.lab import Lab
from workers.measure.formulas.slowest import none_slower

CONTROL = "tests/experiments/test_comm.py::test_speeds_in_another_unit_fail_the_sweep"


def check_speeds(lab: Lab, op: str, costs: Costs, told: Told) -> None:
    """One check an operation; the detail tells of the first thing that is wrong."""
    factor = (2 if op == "all_reduce" else 1) * (lab.world_size - 1) / lab.world_size
    by_name = {(size(nbytes), name): (nbytes, cost) for (other, nbytes, name), cost in costs.items() if other == op}
    faults = [
        f"{name} at {label}: {us} us, {algbw} and {busbw} GB/s"
        for label, name, us, algbw, busbw, *_ in told.rows
        if not agree(even(by_name[str(label), str(name)][0], lab.world_size), [us, algbw, busbw], factor)
    ]
    for name, (megabytes, speeds) in told.busbw.items():
        for mb, speed in zip(megabytes, speeds, strict=True):
            cost = costs[op, round(mb * 1e6), name]
            if not math.isclose(speed * 1e9 * cost.seconds, factor * mb * 1e6, rel_tol=1e-9):
                faults.append(f"{name} at {mb:g} MB: {speed:g} GB/s drawn")
    slower = [name for (_, name), (_, cost) in by_name.items() if not none_slower(cost.rounds_s, cost.own_s)]
    faults += [f"{name} took this rank longer than the slowest one" for name in slower]
    detail = f"{op}: {faults[0] if faults else f'{len(told.rows)} rows'}"
    lab.check("speeds", len(faults), 0, detail=detail, control=CONTROL)


def agree(nbytes: int, cells: list[object], factor: float) -> bool:
    """Whether the microseconds, algbw and busbw of one row are those of as many bytes."""
    us, algbw, busbw = (float(str(cell)) for cell in cells)
    off_us, off_algbw, off_busbw = (10.0 ** -len(str(cell).partition(".")[2]) / 2 for cell in cells)
    least, most = (max(0.0, us - off_us) * (algbw - off_algbw), (us + off_us) * (algbw + off_algbw))
    slack = off_busbw + off_algbw * factor + 1e-9
    return least <= nbytes / 1e3 <= most and abs(busbw - algbw * factor) <= slack
