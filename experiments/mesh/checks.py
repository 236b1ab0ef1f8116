"""What a run of a mesh is held to beside its sums: bytes along each axis, the order of its pipelines, when buckets are
launched, and what goes ahead of the gradients of weights.

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


def tell(lab: Lab, sizes: Mapping[str, int], chunks: int) -> None:
    """The grid, and what 1f1b sends along each of its axes."""
    grid = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
    for axis, cost in by_axis(Rank(lab.config, sizes, 0, HOW["1f1b"], chunks)).items():
        lab.say(f"{grid}: 1f1b sends {cost.nbytes / 1e6:.3g} MB over {axis}, calls: {cost.calls}", "predict")
    place = ", ".join(f"{axis} {index}" for axis, index in at(lab.rank, sizes).items())
    rank = Rank(lab.config, sizes, lab.rank, HOW["1f1b"], chunks)
    layers = [layer for run in rank.stages.values() for layer in run]
    numel = sum(local.numel for stage in rank.stages for unit in rank.units(stage) for local in unit)
    lab.note("holds", f"at {place}: layers {layers[0]} to {layers[-1]}, {numel} parameters")


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
    """Each row along pp works in the order of the schedule, and idles no more than its formula."""
    owners = [*range(rank.p)] * rank.chunks
    piped = Piped(rank.how.schedule, lab.config.num_microbatches, owners)
    check_schedule(lab, name, measured.order, piped)


def check_overlap(lab: Lab, name: str, measured: Measured) -> None:
    """Buckets are launched inside a backward pass, as soon as their gradients are there; of `per_parameter` none."""
    if HOW[name].zero or lab.mesh.size("dp") == lab.mesh.size("cp") == 1:
        return
    sums = measured.order.launches("all_reduce")
    inside = [place for place in sums if within_backward(measured.order, place)]
    wrong = len(inside) if HOW[name].one_by_one else len(sums) - len(inside) + len(measured.order.untimely(sums))
    detail = f"{len(inside)} of {len(sums)} buckets were launched inside of a backward pass"
    lab.check("overlap", wrong, 0, name, detail)


def check_gradients_first(lab: Lab, name: str, rank: Rank, measured: Measured) -> None:
    """Where backward passes are in two, the stage before is given its gradient before those of weights are computed."""
    wanted = rank.how.in_two * sum(number > 0 for number in rank.stages) * lab.config.num_microbatches
    found = sent_between(measured.order)
    detail = f"{found} gradients of inputs were sent between the two parts of a backward pass, {wanted} should be"
    lab.check(
        "gradients first", abs(found - wanted), 0, name, detail,
        control=f"{TESTS}test_a_gradient_that_is_sent_behind_the_weights_is_seen",
    )  # fmt: skip


def sent_between(order: Order) -> int:
    """How often something was sent between the gradients of a microbatch's input and those of its weights."""
    sends, found = order.where("call", "send"), 0
    for place in order.where("end", "input"):
        label = order.events[place].label
        behind = next((other for other in order.where("begin", "weight", label) if other > place), place)
        following = min((other for other in order.where("begin", "input") if other > place), default=behind)
        found += any(place < send < min(behind, following) for send in sends)
    return found


def within_backward(order: Order, place: int) -> bool:
    """Whether something happened inside of a backward pass, or of a part of one."""
    begun, ended = (
        sum(other < place for kind in ("backward", "input", "weight") for other in order.where(what, kind))
        for what in ("begin", "end")
    )
    return begun > ended


# What a run of several axes has to claim, so that a check that vanishes is missed.


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, and the order of passes with what comes of it."""
    sizes = mode.axes(config)
    copied = ("per_parameter", "gpipe", "1f1b", "1f1b_split") if sizes["dp"] > 1 else ()
    yield from measured(mode, config, copied=copied)
    if config.proof:
        yield Claims(("in flight",), mode.by_hand)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand)
    yield Claims(("schedule", "bubble on paper", "gradients first"), mode.by_hand)
    along = [axis for axis, ranks in sizes.items() if axis != "cp" and ranks > 1]
    if sizes["cp"] == 1:  # else gradients go over two axes at once
        yield Claims([f"{kind} bytes over {axis}" for kind in ("called", "wire") for axis in along], mode.by_hand)
    if sizes["dp"] > 1:
        yield Claims(("overlap",), [name for name in mode.by_hand if not name.startswith("zero")])
