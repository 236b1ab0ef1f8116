"""Which collectives a pass makes, layer by layer: the order that the papers draw, held against the recorded one.

Of one layer, forward and backward (Shoeybi et al. 2019, figure 4; Korthikanti et al. 2022, figure 5). A layer of gpt is
two slices, attention and MLP; g ends a slice on the way forward, f begins it and so ends it on the way back.
Below are the injected bugs that this order and the proof have to catch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.contract import Claims, Mistakes, Mode, Needs
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.model import Attention, outline
from distlab.techniques.collectives import autograd
from distlab.techniques.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, Whole

from .predictions import untied_linears

SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
COLLECTIVES = (SUM, GATHER, SCATTER)
MESSAGES = ("send", "receive", "all_to_all")  # what one by hand is made of
Ops = tuple[str, ...]

# Forward and backward of an embedding, a layer and an output layer; mlp's layers have one slice.
ENDS: dict[str, tuple[tuple[Ops, Ops], tuple[Ops, Ops]]] = {
    "megatron": (((SUM,), ()), ((), (SUM,))),
    "plain": (((), ()), ((), ())),
    "sequence": (((SCATTER,), (GATHER,)), ((GATHER,), (SCATTER,))),
}
SLICE: dict[str, tuple[Ops, Ops]] = {
    **dict.fromkeys(("megatron", "plain"), ((SUM,), (SUM,))),  # g; f
    "sequence": ((GATHER, SCATTER), (GATHER, SCATTER)),  # of each the other's transpose, and the other way round
}
LOSS = (SUM, SUM)  # the maxima of split scores, then sums and the targets' scores; backward nothing


def expected_calls(name: str, config: Config) -> tuple[list[Ops], list[Ops]]:
    """What each layer calls, forward in their order and backward in theirs; the loss as one layer more."""
    if name == "gathered":
        counts = [0] * len(outline(config).layers)
        for linear in untied_linears(outline(config)):
            counts[int(linear.split(".")[1])] += 1
        return [*((GATHER,) * count for count in counts), ()], [(SUM,) * count for count in reversed(counts)]
    forward, backward = SLICE[name]
    if config.model != "gpt":
        return [forward] * config.depth + [()], [backward] * config.depth
    first, last = ENDS[name]
    layers = [(forward * 2, backward * 2)] * config.depth
    ordered = [first, *layers, last]
    return [*(ops for ops, _ in ordered), LOSS if name != "plain" else ()], [ops for _, ops in reversed(ordered)]


def collectives(events: list[Event]) -> list[str]:
    """The collectives in their order; what is sent inside of a mark belongs to it."""
    found: list[str] = []
    inside = ""
    for event in events:
        if event.name in COLLECTIVES and event.what == "begin":
            found.append(event.name)
            inside = event.name
        elif event.name in COLLECTIVES and event.what == "end":
            inside = ""
        elif event.what == "call" and event.name not in (inside, *(MESSAGES if inside else ())):
            found.append(event.name)
    return found


def by_layer(events: list[Event]) -> list[Ops]:
    """Those of a forward pass, layer by layer; after the last one the loss."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.name == "layer":
            groups.append([])
        groups[-1].append(event)
    between, within = groups[0::2], groups[1::2]  # a layer begins, a layer ends
    outside = [op for some in between[:-1] for op in collectives(some)]
    return [*(tuple(collectives(some)) for some in within), (*outside, *collectives(between[-1]))]


def misplaced(name: str, order: Order, config: Config) -> list[str]:
    """Sentences where the recorded passes differ from what is drawn."""
    forward, backward = expected_calls(name, config)
    faults = []
    for label, events in order.within("forward"):
        seen = by_layer(events)
        faults += [
            f"microbatch {label}: {layer_name(layer, len(forward))} calls {names_of(found)} forward,"
            f" not {names_of(wanted)}"
            for layer, (found, wanted) in enumerate(zip(seen, forward, strict=True))
            if found != wanted
        ]
    flat = tuple(op for ops in backward for op in ops)
    for label, events in order.within("backward"):
        back = tuple(collectives(events))
        if back != flat:
            at = next((n for n, (one, other) in enumerate(zip(back, flat, strict=False)) if one != other), len(flat))
            faults.append(f"microbatch {label}: {len(back)} calls backward, not {len(flat)}; they part at call {at}")
    return faults


def layer_name(layer: int, end: int) -> str:
    """A layer, or what follows the last."""
    return f"layer {layer}" if layer < end - 1 else "the loss"


def names_of(ops: Ops) -> str:
    return ", ".join(ops) or "nothing"


def check_order(lab: Lab, name: str, order: Order) -> None:
    """Every pass makes the collectives that are drawn for its layers, in that order, and no other."""
    faults = misplaced(name, order, lab.config)
    number = len(order.where("begin", "forward"))
    detail = faults[0] if faults else f"{number} passes forward and backward, all collectives where they belong"
    lab.check("order of calls", len(faults), 0, name, detail)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Of all variants by hand bytes, and the calls in their order."""
    misplaced = "tests/experiments/test_orders.py::test_tp_a_collective_in_the_wrong_place_is_named"
    unsaved = "test_activations_that_are_not_saved_fail"
    return (
        *measured(mode, config, copied=mode.by_hand),
        Claims(("replicas",), (*mode.by_hand, *mode.by_torch), when=config.proof),
        Claims(("called bytes", "wire bytes", "calls"), mode.by_hand),
        Claims(("order of calls",), mode.by_hand, fails_in=misplaced),
        Claims(("activation bytes",), ("sequence",), when=not config.variant, fails_in=unsaved),
    )


# The classic mistakes of tensor parallelism, made by LAB_BUG: at a slice's ends, in its heads and in its bias.

mistake = Mistakes()


# --- the settings that hide one ---


def without_attention(config: Config) -> str:
    """Where no heads are, none can be another's."""
    return "" if config.model == "gpt" else f"LAB_MODEL={config.model}: it has no attention of the lab's"


# --- the mistakes ---


@mistake("double_reduce", check="gradients", part="region", of=("megatron",))
class DoubleReduce(Whole):
    """The backward of g is an all_reduce as well: of a gradient that every rank has whole, N times too large."""

    def leave(self, partial: Tensor) -> Tensor:
        return autograd.all_reduce(partial, self.group, loss="own")


@mistake("lost_f", check="replicas", part="region", of=("gathered", "megatron"))
class LostF(Whole):
    """A slice takes its input without f: the gradient that reaches what lies before is this rank's part alone."""

    def enter(self, x: Tensor) -> Tensor:
        return x


@mistake("packed_qkv", check="losses", part="qkv", of=("megatron", "sequence"), needs=Needs(unless=without_attention))
@torch.no_grad()
def packed(attention: Attention, heads: tuple[int, ...], rank: int) -> dict[str, nn.Module]:
    """Each rank takes one run of the rows of [Q; K; V] and cuts it in three: its q, k and v are of other heads."""
    dense = {"q": attention.q, "k": attention.k, "v": attention.v}
    for name in ("weight", "bias"):
        rows = torch.cat([getattr(project, name) for project in dense.values()])
        runs = rows.split([3 * num_rows for num_rows in heads])
        for index, project in enumerate(dense.values()):
            getattr(project, name).copy_(torch.cat([run.chunk(3)[index] for run in runs]))
    return {name: ColumnParallelLinear(project, heads, rank) for name, project in dense.items()}


@mistake("bias_everywhere", check="losses", part="row", of=("megatron", "sequence"))
class BiasEverywhere(RowParallelLinear):
    """A row-parallel layer adds its bias on every rank before the sum, where it counts N times."""

    def forward(self, x: Tensor) -> Tensor:
        return self.region.leave(F.linear(x, self.weight, self.bias))
