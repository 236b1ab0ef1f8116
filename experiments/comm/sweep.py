"""What a collective costs from 1 KiB to 64 MiB: latency, bandwidth, bytes on the wire, beside gloo's own.

Definitions as in nccl-tests: algbw = S / time, busbw = algbw x 2(N-1)/N for an all_reduce and (N-1)/N for its halves,
so that the busbw of every algorithm and N can be held against the speed of the link. The time of a call is the slowest
rank's, the median of a few interleaved rounds.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from experiments.comm.contents import Trial, uneven
from experiments.comm.costs import BYTES, KIB, MIB, Cost, Costs, even, size
from experiments.comm.figures import crossings, fits, tables, wall
from experiments.comm.speeds import check_speeds
from workers.lab import Lab
from workers.measure.formulas import PYTORCHS
from workers.measure.formulas.messages import all_reduce_messages, half_messages, wire_tolerance
from workers.measure.formulas.slowest import slowest_of
from workers.parallel.collectives import Collective

SIZES = (8, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COMPARED = (256 * KIB, 4 * MIB, 64 * MIB)
TIMED_HALVES = (
    "gloo",
    "ring",
    "direct",
    "tcp",
)  # of reduce_scatter and all_gather; of the others the bytes are counted alone
# As the papers write it; where an algorithm has an entry of its own it comes first.
FORMULAS = {
    ("all_reduce", "server"): "(N-1)·S on rank 0, S elsewhere",
    ("all_reduce", "tree"): "2(P-1)/P·S, and 2·S for each rank beyond P = 2^k",
    ("reduce_scatter", "gloo"): "2(N-1)/N·S: an all_reduce and a slice",
    ("reduce_scatter", "server"): "(N-1)/N·S on rank 0, S elsewhere",
    ("reduce_scatter", "tree"): "(N-1)/N·S, and S on each rank beyond P = 2^k",
    ("all_gather", "tree"): "(N-1)/N·S, and S more for each rank beyond P = 2^k",
    ("all_reduce", "tcp"): "the server's up to 512 KiB, then direct's",
    ("all_gather", "server"): "(N-1)·S on rank 0, S/N elsewhere",
}


def formula(op: str, variant: str) -> str:
    """Bytes that a rank sends in `op` by `variant`, of a tensor of S bytes over N ranks."""
    return FORMULAS.get((op, variant), "2(N-1)/N·S" if op == "all_reduce" else "(N-1)/N·S")


REPEATED_BYTES = 16 * MIB  # small calls are repeated up to this many bytes, and 16 times, in each round


def run(lab: Lab, collectives: Mapping[str, Collective], largest_bytes: int) -> None:
    """Sweep, hold the contents and the bytes against the formula, and show where the time goes."""
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
            check_speeds(lab, op, costs, tables(lab, op, costs, names, sizes))
    if lab.world_size > 1:
        for op in BYTES:
            crossings(lab, op, costs, sizes)
        fits(lab, costs, variants, sizes)
        wall(lab, costs, variants, sizes[-1])


def calls(op: str, nbytes: int, variants: Iterable[str]) -> int:
    """How many calls `price` times of one operation at one size."""
    return rounds(nbytes) * repeats(nbytes) * len(timed(op, variants))


def timed(op: str, variants: Iterable[str]) -> list[str]:
    """The variants whose time is shown."""
    return [name for name in variants if op == "all_reduce" or name in TIMED_HALVES]


def rounds(nbytes: int) -> int:
    """In which the variants take turns."""
    return 3 if nbytes < 16 * MIB else 2


def repeats(nbytes: int) -> int:
    """Calls in a row of one variant in one round."""
    return max(1, min(16, REPEATED_BYTES // nbytes))


def price(lab: Lab, op: str, nbytes: int, collectives: Mapping[str, Collective]) -> dict[str, Cost]:
    """The bytes of one call, which also warms up, and the time of a few rounds in which the variants take turns.

    Each call has numbers of its own; they are laid out before what is timed, and what came of them is looked at after.
    """
    in_a_row, names = repeats(nbytes), timed(op, collectives)
    numel = even(nbytes, lab.world_size) // 4
    trials = [Trial.of(op, lab.rank, lab.world_size, numel, lab.device) for _ in range(in_a_row)]
    costs = {name: Cost() for name in collectives if name in names or nbytes in COMPARED}
    for name, cost in costs.items():
        prepare(trials[:1], collectives[name], 0)
        with lab.count() as traffic:
            trials[0].run(collectives[name])
        cost.wire_bytes = traffic.wire_bytes if traffic.wire_error is None else None
        cost.off = trials[0].off()
    for turn in range(rounds(nbytes)):
        for name in names:
            prepare(trials, collectives[name], 1 + turn * in_a_row)
            costs[name].rounds_s.append(lab.seconds(partial(run_next, iter(trials), collectives[name]), in_a_row))
            costs[name].off = max(costs[name].off, *(trial.off() for trial in trials))
    everyone = lab.exchange.everyone(op, [seconds for cost in costs.values() for seconds in cost.rounds_s])
    slowest = slowest_of(everyone)
    for cost in costs.values():
        cost.own_s, cost.rounds_s = cost.rounds_s, slowest[: len(cost.rounds_s)]
        slowest = slowest[len(cost.rounds_s) :]
    return costs


def prepare(trials: list[Trial], collective: Collective, first: int) -> None:
    """New numbers for each call, from repeat `first` on, and scratch memory that holds none of the last ones."""
    for repeat, trial in enumerate(trials, first):
        trial.prepare(repeat)
    collective.peers.spoil()


def run_next(trials: Iterator[Trial], collective: Collective) -> None:
    """One of several calls in a row."""
    next(trials).run(collective)


def check_contents(lab: Lab, costs: Costs, collectives: Mapping[str, Collective]) -> None:
    """What every call left, at all sizes of the sweep and at lengths that nothing divides, is the formula's."""
    for name, collective in collectives.items():
        for op in BYTES:
            lab.at(0, f"contents of {op} by {name}")
            swept = [cost.off for (other, _, of), cost in costs.items() if (other, of) == (op, name)]
            worst = max([uneven(collective, op, lab.device), *swept])
            lab.check("contents", worst, 0.0, variant=name, detail=f"{op}, every call at every size")


def compare(lab: Lab, costs: Costs) -> None:
    """Wire bytes of the larger sizes against the formula; gloo's are only shown."""
    for (op, nbytes, name), cost in costs.items():
        if nbytes in COMPARED and cost.wire_bytes is not None:
            predicted = BYTES[op](name, lab.world_size, even(nbytes, lab.world_size), lab.rank)
            sent = messages(op, name, lab.world_size, even(nbytes, lab.world_size), lab.rank)
            tolerance = wire_tolerance(predicted, sent)
            lab.compare(
                f"wire bytes {op} {size(nbytes)}", predicted, cost.wire_bytes, tolerance=tolerance, variant=name,
                formula=formula(op, name), shown=PYTORCHS if name in lab.mode.by_torch else "",
                control="tests/experiments/test_comm.py::test_bytes_that_are_off_fail_the_sweep",
            )  # fmt: skip


def messages(op: str, name: str, world_size: int, nbytes: int, rank: int) -> int:
    """Messages of `rank` in `op` by the algorithm `name`."""
    if op == "all_reduce":
        return all_reduce_messages(name, world_size, nbytes, rank)
    return half_messages(name, op, world_size, nbytes, rank)
