"""What a model of one's own sends, cut by its plan: counted where its linear layers are called, priced by the formulas.

A "row" is an all_reduce of its outputs forward, what a "column" takes one of its gradient backward, once for all in a
row that take the same tensor; a layer that is cut by itself is an all_gather and an all_reduce (Shoeybi et al. 2019,
section 3). How often each is called, and on how many rows, comes from a watched pass (layers.py).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from experiments.tp.cuts import Cut
from experiments.tp.layers import linears, uses
from experiments.tp.plans import as_words, cuts_of, plan_of
from workers.config import Config
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.collectives import all_gather_bytes, all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.slices import shares
from workers.workload.data import shard_sizes
from workers.workload.model import outline

FORMULAS = {
    "naive": ("(t-1)/t x rows x (out + 2·in) a linear layer", "2 a linear layer"),
    "megatron": ("2(t-1)/t x (out of each row + in of each column)", "1 a row, 1 what columns take"),
    "dtensor": ("2(t-1)/t x (out of each row + in of each column)", ""),
}


class Sent(NamedTuple):
    """One collective of a step: its numbers, forward or backward."""

    op: str
    numel: int
    backward: bool
    layer: int


# --- counted ---


def called(config: Config) -> list[str]:
    """The layers that `naive` cuts: all that can be."""
    return [layer.ours for layer in linears(config).values()]


def sent(variant: str, config: Config, samples: int) -> list[Sent]:
    """The collectives of one microbatch: those of the forward pass in its order, then the backward pass's."""
    cuts, cuttable = cuts_of(config, 1), called(config)
    forward, backward, entered = list[Sent](), list[Sent](), -1
    for use in uses(config, samples):
        if use.name not in (cuttable if variant == "naive" else cuts):
            continue
        layer = int(use.name.split(".")[1])
        given, taken = use.rows * use.outputs, use.rows * use.inputs
        if variant == "naive":
            padded = -(-use.outputs // config.world_size) * config.world_size  # parts of one size are gathered
            forward.append(Sent("all_gather", use.rows * padded, False, layer))
        elif not cuts[use.name].by_outputs:
            forward.append(Sent("all_reduce", given, False, layer))
            continue
        if use.learns and not (variant == "megatron" and use.taken == entered):
            backward.append(Sent("all_reduce", taken, True, layer))
        entered = use.taken
    return forward + backward[::-1]


# --- priced ---


def predict(config: Config, cannot: Iterable[str]) -> list[Prediction]:
    """Bytes and calls of one step of each variant that can run; every rank sends the same."""
    found = []
    for variant, (formula, of_calls) in FORMULAS.items():
        if variant in cannot:
            continue
        nbytes, calls, messages = priced(variant, config)
        ranks, shown = config.world_size, PYTORCHS if variant == "dtensor" else ""
        found.append(
            Prediction(variant, "wire bytes", "B", formula, (nbytes,) * ranks, calls, shown, (messages,) * ranks)
        )
        if of_calls:
            found.append(Prediction(variant, "calls", "calls", of_calls, (calls,) * ranks, calls))
        kept = tuple(rest(variant, config, rank) for rank in range(ranks))
        found.append(
            Prediction(variant, "rest bytes", "B", "weights, gradients and moments of its parts", kept, 0, shown)
        )
    return found


def rest(variant: str, config: Config, rank: int) -> float:
    """Bytes of weights, gradients and optimizer state that a rank keeps between two steps: its parts, and the rest
    whole."""
    ranks = config.world_size
    layers = {layer.ours: layer for layer in linears(config).values()}
    cuts = {name: Cut(True, shares(layer.outputs, ranks)) for name, layer in layers.items()}
    cuts = cuts if variant == "naive" else cuts_of(config, ranks)
    sizes = []
    for name, parameter in outline(config).named_parameters():
        holder, _, own = name.rpartition(".")
        each, numel = cuts.get(holder), parameter.numel()
        if each is not None and (each.by_outputs or own == "weight"):  # all ranks have the whole bias of a row
            numel = numel // sum(each.sizes) * each.sizes[rank]
        sizes.append(numel)
    adam, itemsize = config.optimizer == "adamw", getattr(torch, config.dtype).itemsize
    held = rest_bytes(0, sum(sizes), sum(sizes), itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    return float(sum(held.values()))


def priced(variant: str, config: Config) -> tuple[float, int, int]:
    """Bytes, calls and messages of a rank in one step."""
    ranks, itemsize = config.world_size, getattr(torch, config.dtype).itemsize
    calls = [(each.op, each.numel * itemsize) for size in microbatches(config) for each in sent(variant, config, size)]
    if config.clip:
        calls.append(("all_reduce", 8))  # the sum of squares, in float64
    price = {"all_reduce": all_reduce_bytes, "all_gather": all_gather_bytes}
    messages = [gloo_all_reduce_messages(ranks, n) if op == "all_reduce" else 2 * (ranks - 1) for op, n in calls]
    return sum(price[op]("gloo", ranks, nbytes) for op, nbytes in calls), len(calls), sum(messages)


def microbatches(config: Config) -> list[int]:
    """Samples of each."""
    return shard_sizes(config.batch, config.num_microbatches)


# --- in words ---


def summary(config: Config) -> str:
    """One line of what is sent."""
    nbytes, calls, _ = priced("megatron", config)
    return f"{calls} all_reduces a step, 2(t-1)/t of their bytes: {nbytes / 1e6:.3g} MB a rank"


def holds(config: Config, rank: int) -> str:
    """What a rank has of each line of the plan, for its own log."""
    parts = []
    for pattern, value in plan_of(config).items():
        parts.append(f"{pattern} by {as_words(value)[0]}")
    kept = sum(each.sizes[rank] for each in cuts_of(config, config.world_size).values())
    whole = sum(sum(each.sizes) for each in cuts_of(config, config.world_size).values())
    return f"holds      {kept} of {whole} features of {', '.join(parts)}"
