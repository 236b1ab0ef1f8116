"""Compare the collectives of each pass, layer by layer, with the order that the papers draw.

Shoeybi et al. 2019, figure 4, and Korthikanti et al. 2022, figure 5, show one layer, forward and backward. A layer of
gpt has two slices, attention and MLP. In the forward pass g is the last call of a slice; in the backward pass f is.
Below are the injected bugs that this order and the proof have to catch.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distlab.contract import Claims, Mistakes, Mode, Needs
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Event, Order
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.model import Attention, Model, outline
from distlab.techniques.collectives import autograd
from distlab.techniques.tensor_parallel.layers import Region, ReplicatedRegion, RowParallelLinear, partition_sizes
from distlab.techniques.tensor_parallel.strategy import slice_layers

from .predictions import untied_linears

SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
COLLECTIVES = (SUM, GATHER, SCATTER)
MESSAGES = ("send", "receive", "all_to_all")  # the messages of a collective by hand
Ops = tuple[str, ...]

# The calls forward and backward of the embedding and the output layer; and of a slice, of which mlp's layers have one.
ENDS: dict[str, tuple[tuple[Ops, Ops], tuple[Ops, Ops]]] = {
    "megatron": (((SUM,), ()), ((), (SUM,))),
    "plain": (((), ()), ((), ())),
    "sequence": (((SCATTER,), (GATHER,)), ((GATHER,), (SCATTER,))),
}
SLICE: dict[str, tuple[Ops, Ops]] = {
    **dict.fromkeys(("megatron", "plain"), ((SUM,), (SUM,))),  # g; f
    "sequence": ((GATHER, SCATTER), (GATHER, SCATTER)),  # backward the transposes, in reverse order
}
LOSS = (SUM, SUM)  # the maxima of split scores, then sums and the targets' scores; backward nothing


def expected_calls(name: str, config: Config) -> tuple[list[Ops], list[Ops]]:
    """Return the calls of each layer, forward and backward, in the order of the pass; the loss is one more layer."""
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
    """List the collectives in their order; calls inside a marked collective belong to it."""
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
    """List the collectives of a forward pass, layer by layer, and of the loss behind the last layer."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.name == "layer":
            groups.append([])
        groups[-1].append(event)
    between, within = groups[0::2], groups[1::2]  # a layer begins, a layer ends
    outside = [op for part in between[:-1] for op in collectives(part)]
    return [*(tuple(collectives(part)) for part in within), (*outside, *collectives(between[-1]))]


def misplaced(name: str, order: Order, config: Config) -> list[str]:
    """Describe where the recorded passes differ from the expected order."""
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
        found = tuple(collectives(events))
        if found != flat:
            call = next((n for n, (own, other) in enumerate(zip(found, flat, strict=False)) if own != other), len(flat))
            faults.append(
                f"microbatch {label}: {len(found)} calls backward, not {len(flat)}; they differ from call {call} on"
            )
    return faults


def layer_name(layer: int, end: int) -> str:
    """A layer, or what follows the last."""
    return f"layer {layer}" if layer < end - 1 else "the loss"


def names_of(ops: Ops) -> str:
    return ", ".join(ops) or "nothing"


def check_order(lab: Lab, name: str, order: Order) -> None:
    """Check that every pass makes the expected collectives, in the expected order, and no others."""
    faults = misplaced(name, order, lab.config)
    number = len(order.where("begin", "forward"))
    detail = faults[0] if faults else f"{number} passes forward and backward, all collectives in the expected order"
    lab.check("order of calls", len(faults), 0, name, detail)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """List the checks of a run: bytes and order of calls for all variants by hand."""
    misplaced = "tests/experiments/test_orders.py::test_tp_misplaced_collectives_are_named"
    unsaved = "test_wrong_savings_of_activations_fail"
    return (
        *measured(mode, config, replicated=mode.by_hand),
        Claims(("replicas",), (*mode.by_hand, *mode.by_torch), when=config.proof),
        Claims(("called bytes", "wire bytes", "calls"), mode.by_hand),
        Claims(("order of calls",), mode.by_hand, fails_in=misplaced),
        Claims(("activation bytes",), ("sequence",), when=not config.variant, fails_in=unsaved),
    )


# Classic bugs of tensor parallelism, injected by LAB_BUG: in f and g, in the heads, and in the bias.

mistake = Mistakes()


# --- settings that hide a bug ---


def without_attention(config: Config) -> str:
    """Without attention there are no heads to mix up."""
    return "" if config.model == "gpt" else f"LAB_MODEL={config.model}: it has no attention heads"


# --- the bugs ---


@mistake("double_reduce", check="gradients", part="ReplicatedRegion", of=("megatron",))
class DoubleReduce(ReplicatedRegion):
    """The backward pass of g sums too: every rank has the whole gradient already, so it becomes N times too large."""

    def leave(self, partial: Tensor) -> Tensor:
        return autograd.all_reduce(partial, self.group, loss="own")


@mistake("lost_f", check="replicas", part="ReplicatedRegion", of=("gathered", "megatron"))
class LostF(ReplicatedRegion):
    """A slice takes its input without f: the layers before it get only this rank's part of the gradient."""

    def enter(self, x: Tensor) -> Tensor:
        return x


sliced = partial(mistake, check="losses", part="slice_layers", of=("megatron", "sequence"))


@sliced("packed_qkv", needs=Needs(unless=without_attention))
@torch.no_grad()
def packed(model: Model, group: dist.ProcessGroup, region: Region) -> None:
    """Each rank takes one run of the rows of [Q; K; V] and cuts it in three: its q, k and v belong to other heads."""
    for attention in (part for part in model.modules() if isinstance(part, Attention)):
        dense = (attention.q, attention.k, attention.v)
        heads = partition_sizes(attention.q.out_features // attention.head_dim, group.size(), attention.head_dim)
        for name in ("weight", "bias"):
            rows = torch.cat([getattr(project, name) for project in dense])
            runs = rows.split([3 * num_rows for num_rows in heads])
            for index, project in enumerate(dense):
                getattr(project, name).copy_(torch.cat([run.chunk(3)[index] for run in runs]))
    slice_layers(model, group, region)


@sliced("bias_everywhere")
def add_bias_everywhere(model: Model, group: dist.ProcessGroup, region: Region) -> None:
    """A row-parallel layer adds its bias on every rank before the sum, where it counts N times."""
    slice_layers(model, group, region)
    for layer in (part for part in model.modules() if isinstance(part, RowParallelLinear)):
        layer.forward = partial(sum_with_bias, layer)  # type: ignore[method-assign]


def sum_with_bias(layer: RowParallelLinear, x: Tensor) -> Tensor:
    return layer.region.leave(F.linear(x, layer.weight, layer.bias))
