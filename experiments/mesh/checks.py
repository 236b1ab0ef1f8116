"""What a run of a mesh is held to beside its sums: bytes along each axis, the order of its pipelines, and when buckets
are launched.

A rank's peers along an axis are those that differ along it alone: so whom bytes went to says which axis they belong to,
on the wire as in the calls. Where gradients are summed over dp and cp together, one group has peers of either axis:
its calls are its own, and on the wire both axes are held as one.
"""

from collections.abc import Iterator, Mapping

from distlab.contract import Claims, Measured, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.verify.pipeline_checks import Piped, check_schedule
from distlab.lab.verify.run_all import measured
from distlab.techniques.collectives.costs import Cost, total_cost, wire_tolerance

from .placement import HOW, Rank, at
from .traffic import FORMULAS, by_axis

TESTS = "tests/experiments/test_mesh.py::"


def tell(lab: Lab, sizes: Mapping[str, int]) -> None:
    """The grid, and what 1f1b sends along each of its axes."""
    grid = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
    for axis, cost in by_axis(Rank(lab.config, sizes, 0, HOW["1f1b"])).items():
        lab.say(f"{grid}: 1f1b sends {cost.nbytes / 1e6:.3g} MB over {axis}, calls: {cost.calls}", "predict")
    place = ", ".join(f"{axis} {index}" for axis, index in at(lab.rank, sizes).items())
    rank = Rank(lab.config, sizes, lab.rank, HOW["1f1b"])
    numel = sum(local.numel for unit in rank.units for local in unit)
    lab.note("holds", f"at {place}: layers {rank.layers[0]} to {rank.layers[-1]}, {numel} parameters")


def compare_axes(lab: Lab, name: str, rank: Rank, measured: Measured) -> None:
    """Called bytes of each axis exactly, those on the wire within 1 % and gloo's frames."""
    traffic, control = measured.traffic, f"{TESTS}test_bytes_along_a_wrong_axis_fail"
    costs = by_axis(rank)
    for axis, cost in costs.items():
        called = sum(op.called_bytes for op in traffic.called if op.axis == axis)
        lab.compare(
            f"called bytes over {axis}", round(cost.nbytes, 3), round(called, 3), "B", 0.0, name, FORMULAS[axis],
            control=control,
        )  # fmt: skip
    for axis, cost in on_the_wire(costs).items() if traffic.wire_error is None else ():
        along = set(axis.split("_"))
        peers = [peer for peer in traffic.wire if differing_axes(lab.rank, peer, rank.sizes) <= along]
        sent = sum(traffic.wire[peer].sent for peer in peers)
        wanted, seen = lab.of_ranks(f"the wire of {name} over {axis}", cost.nbytes, sent)
        lab.compare(
            f"wire bytes over {axis}", wanted, seen, "B", wire_tolerance(cost.nbytes, cost.messages), name,
            FORMULAS[axis], control=control,
        )  # fmt: skip


def on_the_wire(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """What goes to the peers along each axis; of a group over two axes with all that goes along either."""
    within = {axis: group for group in costs for axis in group.split("_") if "_" in group}
    found: dict[str, list[Cost]] = {}
    for axis, cost in costs.items():
        found.setdefault(within.get(axis, axis), []).append(cost)
    return {axis: total_cost(*parts) for axis, parts in found.items()}


def differing_axes(one: int, other: int, sizes: Mapping[str, int]) -> set[str]:
    here, there = at(one, sizes), at(other, sizes)
    return {axis for axis in sizes if here[axis] != there[axis]}


def check_order(lab: Lab, name: str, rank: Rank, measured: Measured) -> None:
    """Each row along pp works in the order of 1f1b, and idles no more than its formula."""
    check_schedule(lab, name, measured.order, Piped("1f1b", lab.config.num_microbatches, [*range(rank.p)]))


def check_overlap(lab: Lab, name: str, measured: Measured) -> None:
    """Buckets are launched inside a backward pass, as soon as their gradients are there."""
    if HOW[name].zero or lab.mesh.size("dp") == lab.mesh.size("cp") == 1:
        return
    sums = measured.order.launches("all_reduce")
    inside = [place for place in sums if within_backward(measured.order, place)]
    wrong = len(sums) - len(inside) + len(measured.order.untimely(sums))
    detail = f"{len(inside)} of {len(sums)} buckets were launched inside of a backward pass"
    lab.check("overlap", wrong, 0, name, detail)


def within_backward(order: Order, place: int) -> bool:
    """Whether something happened inside of a backward pass."""
    begun, ended = (sum(other < place for other in order.where(what, "backward")) for what in ("begin", "end"))
    return begun > ended


# What a run of several axes has to claim, so that a check that vanishes is missed.


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, and the order of passes with what comes of it."""
    sizes = mode.axes(config)
    yield from measured(mode, config, copied=("1f1b",) if sizes["dp"] > 1 else ())
    if config.proof:
        yield Claims(("in flight",), mode.by_hand)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand)
    yield Claims(("schedule", "bubble on paper"), mode.by_hand)
    along = [axis for axis, ranks in sizes.items() if axis != "cp" and ranks > 1]
    if sizes["cp"] == 1:  # else gradients go over two axes at once
        yield Claims([f"{kind} bytes over {axis}" for kind in ("called", "wire") for axis in along], mode.by_hand)
    if sizes["dp"] > 1:
        yield Claims(("overlap",), [name for name in mode.by_hand if not name.startswith("zero")])
