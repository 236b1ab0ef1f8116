"""Overlap, decided from the order of a step and not from the clock: which sums began before the backward pass was over.

A sum belongs to the gradients that lie in the memory which it sends. Autograd says when it hands each of them over, so
nothing here asks the buckets what they did, or how they are laid out: that they are in the reverse order of
registration, which is roughly that of the backward pass (Li et al. 2020, section 3.2.3), is held by how many bytes
wait.
"""

from collections.abc import Iterator, Mapping
from itertools import takewhile

import torch
from torch import nn

from distlab.config import Config
from distlab.contract import WHOLE_RUN, Claims, Measured, Mode
from distlab.lab import Lab
from distlab.measure.event_order import Order
from distlab.verify.run_all import measured
from distlab.workload.model import outline

from .predictions import bucket_sizes

CONTROL = "tests/experiments/test_orders.py::test_dp_buckets_that_wait_for_the_first_layer_are_seen"

EARLY = ("bucketed", "ring")  # their first messages leave from hooks
SENDS = ("all_reduce", "send")


def early(order: Order) -> int:
    """Sums that began before the last backward pass was over."""
    over = max(order.where("end", "backward"), default=-1)
    return sum(1 for place in order.launches(*SENDS) if place < over)


def waiting(order: Order, sizes: Mapping[str, int]) -> int:
    """The most bytes that waited, as another gradient came, though nothing was missing for their sum: of parameters
    from the last one that is registered on, all of whose gradients had come by then. `sizes` are in order of
    registration."""
    begun = {place: sum(sizes[name] for name in names) for place, names in order.launches(*SENDS).items()}
    come: set[str] = set()
    most = launched = 0
    for place, event in enumerate(order.events):
        launched += begun.get(place, 0)
        if event.what == "gradient":
            complete = sum(sizes[name] for name in takewhile(come.__contains__, reversed(list(sizes))))
            most = max(most, complete - launched)
            come.add(event.label)
    return most


def gradient_sizes(config: Config) -> dict[str, int]:
    """The bytes of each gradient, by its name in an `Order`, in order of registration; a tied one is the first
    layer's."""
    itemsize, found = getattr(torch, config.dtype).itemsize, dict[nn.Parameter, tuple[str, int]]()
    for index, layer in enumerate(outline(config).layers):
        for name, parameter in layer.named_parameters():
            found.setdefault(parameter, (f"{index}.{name}", parameter.numel() * itemsize))
    return dict(found.values())


def check_overlap(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Hold when the sums of each variant began against what it claims: from hooks at once, or after the backward
    pass."""
    sizes, bucket_bytes = bucket_sizes(lab.config), lab.config.bucket_mib * 2**20
    for name, seen in measured.items():
        if name == "ddp":
            over = max(seen.order.where("end", "backward"), default=0)
            began = sum(1 for place in seen.order.where("call", "all_reduce") if place < over)
            lab.compare(
                "launched early", len(sizes) + 1, began, "buckets", variant=name, formula="all buckets",
                shown="it is PyTorch's own",
            )  # fmt: skip
            continue
        silent = name == "ring" and lab.world_size == 1  # it has nobody to send to
        predicted = len(sizes) if name in EARLY and not silent else 0
        shows = name != "ring" or min(sizes) >= lab.world_size
        lab.compare(
            "launched early", predicted, early(seen.order), "buckets", variant=name,
            formula="all buckets" if name in EARLY else "none",
            shown="" if shows else "of a bucket with fewer numbers than ranks some ranks send nothing at first",
        )  # fmt: skip
        if name in EARLY and shows:
            launches = seen.order.launches(*SENDS)
            wrong = seen.order.untimely(launches)
            detail = f"{len(wrong)} of {len(launches)} buckets launched too soon, or later than at once"
            lab.check("launch order", len(wrong), 0, name, detail)
            most = waiting(seen.order, gradient_sizes(lab.config))
            detail = "gradients that waited beside one bucket, in the order of the backward pass, B"
            lab.check("waiting gradients", max(0.0, most - bucket_bytes), 0, name, detail, control=CONTROL)


# What a run of data parallelism has to claim, so that a check that vanishes is missed.


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls where they are foretold, and when their sums begin."""
    yield from measured(mode, config)
    if config.proof:
        yield Claims(("samples",), WHOLE_RUN, one=True)
        yield Claims(("replicas",), (*mode.by_hand, *mode.by_torch))
        if config.model == "line":
            yield Claims(("losses",), ("coordinator",), one=True)
    yield Claims(("called bytes", "wire bytes", "rest bytes", "peak bytes", "launched early"), mode.by_hand)
    yield Claims(("calls",), ("naive", "flat", "bucketed"))
    yield Claims(("launch order",), ("bucketed",))  # ring's too, but of buckets of fewer numbers than ranks
