"""What a pipeline's run is held against, beyond the proof and its schedule: the memory that comes of the order.

What a pass saves is gone as soon as the part of its backward that needs it is over.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from distlab.contract import Claims, Measured, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.verify.counted import Saved, saved
from distlab.lab.verify.pipeline_checks import Pass, Piped, check_schedule
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.pipeline_parallel.schedules import stages_of
from distlab.techniques.pipeline_parallel.strategy import joined, runs_of

from .predictions import passed_bytes, tied_weight_traffic

AHEAD = 2  # receives beside the one that is waited for, as distlab/techniques/pipeline_parallel/pipeline.py says
CONTROL = "tests/experiments/test_pp.py::test_what_a_step_posts_late_holds_or_leaves_fails_by_name"


def check_messages(lab: Lab, name: str, measured: Measured, done: list[Pass], owners: list[int]) -> None:
    """Receives are posted ahead, messages are let go of, and of a step nothing is left but a number for each end of a
    stage, which knows the type of what passes there."""
    if name != "one_microbatch" and not Peers(lab.group).batched:
        off = [abs(posted - wanted) for posted, wanted in posted_ahead(measured.order)]
        detail = f"receives that were posted as one was waited for, of {AHEAD} more, in {len(off)} waits"
        lab.check("posted ahead", max(off, default=0), 0, name, detail, control=CONTROL)
    number = 1 if name == "one_microbatch" else lab.config.num_microbatches
    # A tied gradient is summed when all messages between stages are gone.
    tied = tied_weight_traffic(lab.config.model_copy(update={"clip": None}), folded=owners[0] == owners[-1])
    most = measured.most["communication"]
    allowed = max(tied[lab.rank].nbytes, most_under_way(done, ends_of(lab, owners, number)))
    detail = f"{most} B of messages held at most, {allowed} by the order of passes"
    lab.check("messages", max(0, most - allowed), 0, name, detail, control=CONTROL)
    if not is_own(lab.config.model):
        numbers = 2 * owners.count(lab.rank) * lab.config.itemsize
        left = measured.rest["activations"]
        detail = f"{left} B that are no weight, gradient, moment or message, {numbers} allowed"
        lab.check("left of a step", max(0, left - numbers), 0, name, detail, control=CONTROL)


def posted_ahead(order: Order) -> list[tuple[int, int]]:
    """At each wait for a message how many receives were posted, and how many should have been: AHEAD more."""
    receives, waits = order.where("call", "receive"), order.where("begin", "receive")
    return [
        (sum(place < wait for place in receives), min(len(waits), number + 1 + AHEAD))
        for number, wait in enumerate(waits)
    ]


class Ends(NamedTuple):
    """Bytes of each microbatch that pass the ends of one chunk; 0 where no other rank is beside it."""

    taken: list[int]  # from the stage before; back to it goes as much
    given: list[int]


def ends_of(lab: Lab, owners: list[int], number: int) -> list[Ends]:
    """Of each chunk of this rank, of `number` microbatches."""
    whole = passed_bytes(lab.config) // lab.config.batch
    sizes = [size * whole for size in shard_sizes(lab.config.batch, number)]
    stages = stages_of(lab.rank, owners)

    def passed(stage: int) -> list[int]:
        other = 0 <= stage < len(owners) and owners[stage] != lab.rank
        return [size * other for size in sizes]

    return [Ends(passed(stage - 1), passed(stage + 1)) for stage in stages]


def most_under_way(done: list[Pass], ends: list[Ends]) -> int:
    """The most bytes of messages at once, as the passes of a rank came: what was given until its gradient is here, and
    gradients: AHEAD that may come, those that came until their weights' part is done, and those that were given, since
    nothing tells that these have arrived."""
    coming = [
        ends[chunk].given[mb] if kind != "forward" else 0 for kind, chunk, mb in done if takes(kind, ends[chunk], mb)
    ]
    halved = any(kind == "weight" for kind, _, _ in done)
    posted = min(AHEAD, len(coming))
    held = most = sum(coming[:posted])
    for kind, chunk, mb in done:
        taken, given = ends[chunk].taken[mb], ends[chunk].given[mb]
        if takes(kind, ends[chunk], mb) and posted < len(coming):
            held, posted = held + coming[posted], posted + 1
            most = max(most, held)
        held += given if kind == "forward" else taken if kind != "weight" else 0
        most = max(most, held)
        # What was given has arrived, since its gradient is here, but autograd goes back from it until the pass is over.
        held -= given * (kind in ("input", "backward")) + given * (kind == ("weight" if halved else "backward"))
    return most


def takes(kind: str, ends: Ends, microbatch: int) -> bool:
    """Whether a pass waits for a message."""
    return kind != "weight" and bool((ends.taken if kind == "forward" else ends.given)[microbatch])


def check_order(lab: Lab, name: str, measured: Measured, owners: list[int]) -> None:
    """The passes come in the order of the schedule, and what they save is gone after their backward."""
    number = 1 if name == "one_microbatch" else lab.config.num_microbatches
    done = check_schedule(lab, name, measured.order, Piped(name, number, owners))
    if done:
        check_messages(lab, name, measured, done, owners)
        predicted = most_held(done, saved_by_pass(lab, owners, number, as_one=name == "one_microbatch"))
        formula = "what the microbatches in flight save in one process"
        lab.compare(
            "activation bytes", predicted, measured.activation_bytes, tolerance=0.01 * predicted, variant=name,
            formula=formula,
        )  # fmt: skip


def most_held(done: list[Pass], kept: dict[tuple[int, int], Saved]) -> int:
    """The most bytes held for what is left of the backward passes, of passes that save so much: {(chunk, microbatch):
    kept}; behind the input's gradient there are left the inputs of linear layers."""
    held = most = 0
    for kind, chunk, microbatch in done:
        whole, linear = kept[chunk, microbatch]
        held += {"forward": whole, "backward": -whole, "input": linear - whole, "weight": -linear}[kind]
        most = max(most, held)
    return most


def saved_by_pass(lab: Lab, owners: list[int], number: int, *, as_one: bool) -> dict[tuple[int, int], Saved]:
    """What one process saves of each microbatch of `number` in each chunk of this rank; `as_one` where a batch in one
    piece is a copy, and no view of the samples."""
    config = lab.config.model_copy(update={"microbatches": number})
    batches = lab.mode.batches(config, proof=False, device=lab.device, dtype=getattr(torch, config.dtype))
    microbatches = [joined(lab.dealt(batches, 0))] if as_one else lab.dealt(batches, 0)
    runs = runs_of(config.model, len(outline(config).layers), len(owners))
    sizes = {len(microbatch.inputs): microbatch for microbatch in microbatches}
    kept = {
        (chunk, size): saved(lab, runs[stage], microbatch)
        for chunk, stage in enumerate(stages_of(lab.rank, owners))
        for size, microbatch in sizes.items()
    }
    return {
        (chunk, index): kept[chunk, len(microbatch.inputs)]
        for chunk in range(owners.count(lab.rank))
        for index, microbatch in enumerate(microbatches)
    }


# What a run of pipelines has to claim, so that a check that vanishes is missed.


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all variants by hand bytes, calls, and the order of passes with what comes of it."""
    yield from measured(mode, config)
    if config.proof:
        yield Claims(("in flight",), mode.by_hand)
    yield Claims(
        ("called bytes", "wire bytes", "calls", "schedule", "bubble on paper", "activation bytes"), mode.by_hand
    )
    yield Claims(("rest bytes", "messages"), mode.by_hand)
    if config.backend != "nccl":
        yield Claims(("posted ahead",), [name for name in mode.by_hand if name != "one_microbatch"])
