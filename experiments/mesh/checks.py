"""Checks of a mesh besides the proof: bytes along each axis, the order of its pipelines, and when buckets are
launched."""

from collections.abc import Mapping, Sequence

from distlab.contract import Claims, Measured, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.verify.pipeline_checks import Piped, check_schedule
from distlab.lab.verify.run_all import measured

from .placement import HOW, Rank
from .traffic import FORMULAS, by_axis


def announce(lab: Lab, sizes: Mapping[str, int]) -> None:
    """Log the grid, and what 1f1b sends along each of its axes."""
    grid = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
    for axis, cost in by_axis(Rank(lab.config, sizes, 0, HOW["1f1b"])).items():
        lab.say(f"{grid}: 1f1b sends {cost.nbytes / 1e6:.3g} MB over {axis}, in {cost.calls} calls", "predict")
    rank = Rank(lab.config, sizes, lab.rank, HOW["1f1b"])
    numel = sum(local.numel for unit in rank.units for local in unit)
    lab.note("holds", f"{numel} parameters")


def compare_axes(lab: Lab, name: str, rank: Rank, measured: Measured) -> None:
    """Check the bytes along each axis, exactly."""
    for axis, cost in by_axis(rank).items():
        called_bytes = sum(op.called_bytes for op in measured.traffic.called if op.axis == axis)
        lab.compare(
            f"called bytes over {axis}", round(cost.nbytes, 3), round(called_bytes, 3), "B", 0.0, name, FORMULAS[axis]
        )  # fmt: skip


def check_order(lab: Lab, name: str, rank: Rank, measured: Measured) -> None:
    """Check that each row along pp follows the order of 1f1b, and idles no more than its formula."""
    check_schedule(lab, name, measured.order, Piped("1f1b", lab.config.num_microbatches, [*range(rank.p)]))


def check_overlap(lab: Lab, name: str, measured: Measured) -> None:
    """Check that buckets are launched inside a backward pass, as soon as their gradients are ready."""
    if HOW[name].zero or HOW[name].plain or lab.mesh.size("dp") == lab.mesh.size("cp") == 1:
        return
    sums = measured.order.launches("all_reduce")
    inside = [place for place in sums if within_backward(measured.order, place)]
    wrong = len(sums) - len(inside) + len(measured.order.untimely(sums))
    detail = f"{len(inside)} of {len(sums)} buckets were launched inside a backward pass"
    lab.check("overlap", wrong, 0, name, detail)


def within_backward(order: Order, place: int) -> bool:
    """Return whether an event happened inside a backward pass."""
    begun, ended = (sum(other < place for other in order.where(what, "backward")) for what in ("begin", "end"))
    return begun > ended


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks of all variants by hand: bytes, calls, and the order of passes with its memory and bubble."""
    sizes = mode.axes(config)
    along = [axis for axis, ranks in sizes.items() if axis != "cp" and ranks > 1]
    launched = [name for name in mode.by_hand if name in HOW and not HOW[name].zero and not HOW[name].plain]
    return (
        *measured(mode, config, replicated=("1f1b",) if sizes["dp"] > 1 else ()),
        Claims(("in flight",), mode.by_hand, when=config.proof),
        Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand),
        Claims(("schedule", "bubble on paper"), mode.by_hand),
        # otherwise gradients are summed over two axes at once
        Claims([f"called bytes over {axis}" for axis in along], mode.by_hand, when=sizes["cp"] == 1),
        Claims(("called bytes over ",), (), fails_in="test_bytes_along_a_wrong_axis_fail"),
        Claims(("overlap",), launched, when=sizes["dp"] > 1),
    )
