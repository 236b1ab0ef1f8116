"""Check from the recorded order of a step which weights are whole at which moment, and when gradients are summed.

Whole weights are seen by their memory, which is allocated and freed (`held`); a layer that computes, by torch's own
hooks; its gradients, when autograd hands them over. Nothing is read from distlab/techniques/sharded/zero.py.
"""

from collections.abc import Iterator, Mapping, Sequence

from distlab.contract import Claims, Measured, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.model import outline

from .predictions import BLOCKING, BY_HAND, tied

AHEAD = {"zero3_blocking": 0, "zero3": 1, "plain": 0}  # layers whose weights are whole beside the one that computes


class Units:
    """The flat unit of each layer."""

    def __init__(self, config: Config) -> None:
        self.num_layers = len(outline(config).layers)
        self.ends_shared = tied(config)

    def of(self, layer: int) -> int:
        """Return the unit of a layer, numbered by its first layer."""
        return 0 if self.ends_shared and layer == self.num_layers - 1 else layer

    def whole(self, layer: int, ahead: int, *, forward: bool, kept: bool) -> set[int]:
        """Return the units that must be whole while `layer` computes, and no others: its own, the next ones in order,
        the shared one from its first use to its last, and where weights are kept all that will be used again."""
        step = 1 if forward else -1
        near = {layer + step * distance for distance in range(ahead + 1)} & set(range(self.num_layers))
        whole = {self.of(each) for each in near} | ({0} if self.ends_shared else set())
        return whole | ({self.of(each) for each in range(layer)} if kept else set())


def events_with_gathered(order: Order) -> Iterator[tuple[Event, set[int]]]:
    """Yield every event with the storages of weights that are whole by then."""
    whole: set[int] = set()
    for event in order.events:
        if event.what == "held":
            whole = whole | event.storages if event.nbytes else whole - event.storages
        yield event, whole


def most_gathered(order: Order) -> int:
    """Return the most units whose weights are whole at once."""
    return max(len(whole) for _, whole in events_with_gathered(order))


def allowed_gathered(name: str, config: Config, *, reshard: bool) -> int:
    """Return the most units that may be whole at once."""
    units, ahead = Units(config), AHEAD[name]
    layers = range(units.num_layers)
    kept = name not in BLOCKING and not reshard
    if name in BLOCKING:
        return 1
    return max(
        len(units.whole(layer, ahead, forward=forward, kept=kept)) for layer in layers for forward in (True, False)
    )


def wrongly_gathered(name: str, order: Order, config: Config, *, reshard: bool) -> list[str]:
    """Describe the moments at which other weights are whole than those that the layer at work needs."""
    units, faults, backward = Units(config), [], False
    layer_of = {storage: units.of(int(weight.split(".")[0])) for weight, storage in order.weights.items()}
    kept = name not in BLOCKING and not reshard
    for event, storages in events_with_gathered(order):
        if event.name == "backward":
            backward = event.what == "begin"
        whole = {layer_of[storage] for storage in storages}
        if event.what == "gradient":
            layer = int(event.label.split(".")[0])
            wanted = (
                {units.of(layer)} if name in BLOCKING else units.whole(layer, AHEAD[name], forward=False, kept=kept)
            )
        elif (event.what, event.name) == ("begin", "layer") and not backward:
            layer = int(event.label)
            wanted = set() if name in BLOCKING else units.whole(layer, AHEAD[name], forward=True, kept=kept)
        else:
            continue
        if whole != wanted:
            faults.append(
                f"at layer {layer} {pass_name(backward)} layers {format_layers(whole)} are gathered,"
                f" not {format_layers(wanted)}"
            )
    if storages := next((whole for event, whole in reversed(list(events_with_gathered(order)))), set()):
        faults.append(f"units still gathered after the step: {len(storages)}")
    return faults


def unsummed(order: Order, config: Config, stage: int) -> list[str]:
    """Describe the units whose sum does not begin with their last gradient, in every backward pass or the last."""
    units, faults = Units(config), []
    for label, events in order.within("backward")[-1 if stage == 1 else 0 :]:
        last = {units.of(int(event.label.split(".")[0])): place for place, event in written(events).items()}
        for unit, place in last.items():
            following = min((other for other in written(events) if other > place), default=len(events))
            if not any(is_sum(event, order.weights) for event in events[place:following]):
                faults.append(f"microbatch {label}: the gradients of layer {unit} are complete, but not summed at once")
    return faults


def written(events: list[Event]) -> dict[int, Event]:
    return {place: event for place, event in enumerate(events) if event.what == "gradient"}


def is_sum(event: Event, weights: Mapping[str, int]) -> bool:
    return event.what == "call" and event.name != "receive" and not event.storages & set(weights.values())


def pass_name(backward: bool) -> str:
    return "backward" if backward else "forward"


def format_layers(layers: set[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"


def check_order(lab: Lab, name: str, measured: Measured, *, reshard: bool) -> None:
    """Check that weights are whole only while they are needed, and that gradients are summed at once."""
    config, order = lab.config, measured.order
    if name in AHEAD:
        lab.compare(
            "whole units", allowed_gathered(name, config, reshard=reshard), most_gathered(order), "units", variant=name,
            formula="the layer that computes" + ", and the next one" * AHEAD[name] + ", at most",
        )  # fmt: skip
        faults = wrongly_gathered(name, order, config, reshard=reshard)
        lab.check(
            "a layer at a time", len(faults), 0, name, faults[0] if faults else "each is gathered only when it computes"
        )
    if lab.world_size > 1 and name != "dp":  # one rank sends nothing
        late = unsummed(order, config, BY_HAND.get(name, 3))
        lab.check("sums", len(late), 0, name, late[0] if late else "each begins with its last gradient")
    lab.check("scratch", measured.rest["communication"], 0, name, "bytes of messages kept between two steps")


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """List the checks of a run: bytes, calls, when weights are whole, and when gradients are summed."""
    orders = "tests/experiments/test_orders.py::"
    too_soon = f"{orders}test_fsdp_weights_gathered_too_early_or_long_are_named"
    return (
        *measured(mode, config, replicated=("dp", "zero1", "zero2")),  # which hold all weights
        Claims(("called bytes", "wire bytes", "rest bytes", "calls", "scratch"), mode.by_hand),
        Claims(("peak bytes",), mode.by_hand, fails_in=f"{orders}test_fsdp_late_sums_fail_the_peak"),
        Claims(("whole units",), tuple(AHEAD)),
        Claims(("a layer at a time",), tuple(AHEAD), fails_in=too_soon),
        Claims(("sums",), [name for name in mode.by_hand if name != "dp"], when=config.world_size > 1),
    )
