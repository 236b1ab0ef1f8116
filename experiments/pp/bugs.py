"""Classic bugs of pipelines, injected by LAB_BUG: in the loss, in the messages between stages, and in their order."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.contract import Mistakes, Needs, replaced
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.techniques.pipeline_parallel import pipeline
from distlab.techniques.pipeline_parallel.pipeline import Boundaries, Loss, Pipeline
from distlab.techniques.pipeline_parallel.schedules import (
    Action,
    Schedule,
    gpipe,
    one_forward_one_backward,
    split_backwards,
    zbv,
)
from distlab.techniques.pipeline_parallel.strategy import Pipelined

SPLIT = ("zb_h1", "zbv", "dualpipev")  # ours with split backward passes
BOUNDED = ("1f1b", "interleaved", "zb_h1", "zbv")  # ours that store fewer than all microbatches
TORCHS = ("torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev")
PIPELINED = ("gpipe", "1f1b", "interleaved", *SPLIT, *TORCHS)
ONE_STAGE = ("gpipe", "1f1b", "zb_h1")  # ours with one stage per rank
mistake = Mistakes()


# --- settings that hide a bug ---


def one_in_flight(config: Config) -> str:
    """A rank with one activation at a time needs only one buffer."""
    chosen = set(config.variant or ONE_STAGE) & set(ONE_STAGE)
    alone = chosen <= {"1f1b"} and config.world_size == 2
    return "1f1b on 2 ranks: its second rank stores one microbatch at a time" if alone else ""


def nothing_behind(config: Config) -> str:
    """With no more microbatches than ranks, nothing can run ahead or wait."""
    most = config.num_microbatches
    return (
        f"LAB_MICROBATCHES={most}: it takes more than WORLD_SIZE={config.world_size}"
        if most <= config.world_size
        else ""
    )


AHEAD = Needs(microbatches=2, unless=nothing_behind)
AHEAD_TIMED = Needs(proof=False, microbatches=2, unless=nothing_behind)
IN_FLIGHT = Needs(microbatches=2, unless=one_in_flight)


# --- the bugs ---

ordered_by = partial(
    mistake,
    part="schedule_of",
    put=lambda schedule: lambda config, _: schedule(config.world_size, config.num_microbatches),
)


@ordered_by("gpipes_order", check="schedule", of=("1f1b",), needs=Needs(ranks=1, proof=False, microbatches=2))
def all_ahead(ranks: int, microbatches: int) -> Schedule:
    """1f1b runs all forwards first, like gpipe: the same numbers and bubble, but all m activations are stored."""
    return gpipe(ranks, microbatches)


@ordered_by("one_more_ahead", check="in flight", of=("1f1b",), needs=AHEAD)
def one_more_ahead(ranks: int, microbatches: int) -> Schedule:
    """1f1b runs ahead by one microbatch too many, and stores one more."""
    schedule = []
    for rank, actions in enumerate(one_forward_one_backward(ranks, microbatches)):
        forwards, backwards = ([each for each in actions if each.kind == kind] for kind in ("forward", "backward"))
        ahead = min(ranks - rank, microbatches)
        turns = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
        schedule.append(forwards[:ahead] + turns + backwards[microbatches - ahead :])
    return schedule


@mistake("clinging_passes", check="activation bytes", part="Pipeline", of=BOUNDED, needs=AHEAD_TIMED)
class Clinging(Pipeline):
    """A stage keeps a microbatch's activations until the step ends: the order of 1f1b with the memory of gpipe."""

    def step(self, inputs: Sequence[Tensor], loss: Loss) -> Tensor | None:
        self._clung: list[Tensor] = []
        return super().step(inputs, loss)

    def _backward(self, action: Action) -> None:
        self._clung.append(self._saved[action.stage, action.microbatch][1])
        with replaced(vars(pipeline), {"fast_backward": partial(torch.autograd.backward, retain_graph=True)}):
            super()._backward(action)


@ordered_by("weights_at_once", check="bubble on paper", of=("zbv",), needs=AHEAD_TIMED)
def at_once(ranks: int, microbatches: int) -> Schedule:
    """zbv computes the gradients of weights directly after each input's: its order is valid, but ranks wait."""
    back = [[action for action in actions if action.kind != "weight"] for actions in zbv(ranks, microbatches)]
    whole = [[each._replace(kind="backward") if each.kind == "input" else each for each in own] for own in back]
    return [split_backwards(actions) for actions in whole]


@mistake("forgotten_weights", check="gradients", part="Pipeline", of=SPLIT, needs=Needs(ranks=1))
class Forgetful(Pipeline):
    """A microbatch's gradients of weights are deferred and never computed."""

    def _weight(self, action: Action) -> None:
        if action.microbatch > 0:
            super()._weight(action)
        else:
            self._deferred.pop((action.stage, action.microbatch))


@mistake("undivided_loss", check="gradients", part="Pipelined", of=PIPELINED, needs=Needs(ranks=1, microbatches=2))
class Undivided(Pipelined):
    """Each microbatch's mean loss is not divided by their number: gradients are m times too large."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        batch = sum(len(each.inputs) for each in microbatches)
        return super().backward([each._replace(share=each.share * batch / len(each.inputs)) for each in microbatches])


@mistake("stale_activation", check="gradients", part="Pipeline", of=ONE_STAGE, needs=IN_FLIGHT)
def with_one_buffer(*args: Any) -> Pipeline:
    """One receive buffer for all microbatches: an activation is overwritten before its backward pass."""
    made = Pipeline(*args)
    made.boundaries.__class__ = StaleBoundaries
    return made


class StaleBoundaries(Boundaries):
    """Receives every activation in the same buffer."""

    def receive_for(self, action: Action) -> Tensor:
        """Return a view of the buffer; by `.data`, since autograd's version counter would reveal the bug."""
        received = super().receive_for(action)
        if action.kind == "backward":
            return received
        if not hasattr(self, "shared"):
            self.shared = received.new_empty(max(self.sizes), *received.shape[1:])
        self.shared.data[: len(received)].copy_(received)
        return self.shared[: len(received)].detach()
