"""A replica that outlives its group: whatever was applied is kept, and whoever is behind takes it over.

    each step   gradients [P] | who saw which sample [E] | loss [1] | a wish [1]     summed in one all_reduce
                the update, on this rank alone; then the step counts

The all_reduce either ends with the sum of all members, or raises. Where a member dies in it, some may have the sum and
others not: those are one update behind, no more, since the next sum needs everybody. So the members that are left
compare how many steps each has applied. If one has the step, it is *kept*: the others take over its weights, moments
and history. If none has, it is *redone* with the members that are left: the dead one's samples are dealt anew.

What was seen goes the same way as the gradient and counts with it, so nobody's word is needed for what a dead member
did: sample i of the epoch gets 1 + (rank + 1)/1024 from who computes with it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.config import Config
from distlab.data_parallel.buckets import Vectors
from distlab.elastic.process_group import Regroup
from distlab.sharded.flat_parameter import Piece, fresh, stepped
from distlab.workload.data import Batches
from distlab.workload.model import Model

OWNERS = 1024  # one over it times rank + 1 tells whose a sample was
EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

Report = dict[str, Any]


class Survivor:
    """One rank's replica, in float64. `at(moment)` is called between the parts of a step: a drill may raise there."""

    def __init__(
        self, model: Model, batches: Batches, config: Config, rank: int, steps: int,
        at: Callable[[str], None] = lambda moment: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        self.model, self.batches, self.config, self.rank, self.steps, self.at = model, batches, config, rank, steps, at
        self.vectors = Vectors(model.parameters())
        # What is stepped are the weights that the model computes with.
        self.piece = fresh(self.vectors.weights, config.optimizer)._replace(weights=self.vectors.weights)
        self.reduced = self.vectors.gradients[:0]  # of the step: the sum of all members' gradients, or a part of it
        self.sizes = {name: each.numel() for name, each in model.named_parameters()}
        self.epoch = batches.num_batches * batches.batch
        self.history = self.vectors.weights.new_zeros(steps, self.epoch + 1)  # a row a step: who saw what, the loss
        self.applied = 0  # steps

    # --- a step ---

    def step(self, group: Regroup, place: int, size: int, wish: bool) -> bool:
        """One step as member number `place` of `size`; returns whether any member has a `wish`.

        Raises RuntimeError where a member is gone, with this rank's state as it was before the step or after it.
        """
        payload = self.sum_of_all(group, place, size, wish)
        self.reduced, row = payload[: len(self.vectors.weights)], payload[len(self.vectors.weights) : -1]
        self.at("reduced")
        self.apply(self.clipped(self.reduced, self.reduced.norm().item()))
        self.history[self.applied] = row
        self.applied += 1
        self.at("applied")
        return bool(payload[-1] > 0)

    def sum_of_all(self, group: Regroup, place: int, size: int, wish: bool) -> Tensor:
        """What this member has computed, and what all have: [P + E + 1 + 1]."""
        row = self.computed(place, size)
        self.at("computed")
        wished = row.new_tensor([float(wish)])
        payload = group.sum(torch.cat([self.vectors.gradients, row, wished]))
        self.at("summed")
        return payload

    def computed(self, place: int, size: int) -> Tensor:
        """Forward and backward of this member's part of the batch; returns who saw what, and its part of the loss."""
        self.vectors.zero()
        row = self.vectors.weights.new_zeros(self.epoch + 1)
        for inputs, targets, share in self.batches.dealt(self.applied, place, size):
            loss = self.model(inputs, targets) * share
            loss.backward()
            row[-1] += loss.item()
        for sample in self.batches.sample_ids(self.applied, place, size):
            row[sample] += 1 + (self.rank + 1) / OWNERS
        return row

    def clipped(self, gradient: Tensor, norm: float) -> Tensor:
        """A gradient, or a part of it, by the global `norm`, which is that of the sum."""
        if self.config.clip is None:
            return gradient
        return gradient * min(1.0, self.config.clip / (norm + EPSILON))

    def apply(self, gradient: Tensor) -> None:
        """The update of this replica, all of it at once."""
        after = stepped(self.piece, gradient, self.config.learning_rate, self.applied + 1)
        self.put(after.weights, after.moments)

    def put(self, weights: Tensor, moments: Tensor) -> None:
        """From here on the model computes with these."""
        self.vectors.weights.copy_(weights)
        self.piece = Piece(self.vectors.weights, moments)

    # --- what an audit compares ---

    def alike(self, kind: str) -> list[tuple[str, Tensor]]:
        """The "gradients", once they are summed, or "weights" that all members have to the bit, by parameter."""
        vector = self.vectors.weights if kind == "weights" else self.reduced
        return list(zip(self.sizes, vector.split(list(self.sizes.values())), strict=True))

    # --- what is known after a loss ---

    def report(self) -> Report:
        """What the first member has to know of this one to decide what is kept."""
        return {"applied": self.applied}

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        """From the reports of those who were in, by rank, in their order: which steps stand, and who has them."""
        applied = {rank: int(report["applied"]) for rank, report in reports.items()}
        most = max(applied.values())
        source = next(rank for rank, steps in applied.items() if steps == most)
        behind = [rank for rank, steps in applied.items() if steps < most]
        return {"applied": most, "source": source, "behind": [*behind, *newcomers]}

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        """Go on in a new group of `ranks`: whoever is behind takes over all that its source has."""
        if plan["behind"]:
            state = group.broadcast(self.state(), ranks.index(plan["source"]))  # a copy, so that a half is never kept
            if self.rank in plan["behind"]:
                self.take(state, int(plan["applied"]))

    def state(self) -> Tensor:
        """A copy of all that a newcomer needs, as one vector."""
        return torch.cat([self.piece.weights, self.piece.moments.flatten(), self.history.flatten()])

    def take(self, state: Tensor, applied: int) -> None:
        """Go on from what `state` gave after so many steps."""
        parts = (self.piece.weights, self.piece.moments, self.history)
        weights, moments, history = state.split([part.numel() for part in parts])
        self.put(weights, moments.view_as(self.piece.moments).clone())
        self.history = history.view_as(self.history).clone()
        self.applied = applied

    # --- what a restart needs ---

    def save(self, path: Path, group: Regroup) -> None:  # noqa: ARG002  every replica has all
        """Write all to a disk, so that the file is whole whenever it is read."""
        draft = path.with_suffix(".draft")
        torch.save({"applied": self.applied, "state": self.state()}, draft)
        os.replace(draft, path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        saved = torch.load(path)
        self.take(saved["state"], saved["applied"])

    def moments(self, group: Regroup) -> Tensor:  # noqa: ARG002  every replica has them all
        """AdamW's moments of all weights, [2, P]; a collective."""
        return self.piece.moments
