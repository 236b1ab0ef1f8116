"""A replica that outlives its group: whatever was applied is kept, and whoever is behind takes it over; and one that
shards the optimizer's state.

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

from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.costs import gloo_all_reduce_messages
from distlab.techniques.data_parallel.vectors import Vectors
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.shards import (
    HeldVersion,
    Piece,
    Recut,
    Version,
    chunk,
    fresh,
    gaps,
    move_shards,
    part,
    stepped,
)

OWNERS = 1024  # one over it times rank + 1 tells whose a sample was
EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_

Report = dict[str, Any]


class Survivor:
    """One rank's replica, in float64. `at(moment)` is called between the parts of a step: a drill may raise there.

    With `rescale` a rank keeps its number of samples: of LAB_BATCH samples n of N members take k times as many, at k
    times LAB_LR (linear scaling rule; Goyal et al. 2017, section 2.1), the next ones of the same permutations.
    """

    def __init__(
        self, model: Model, batches: Batches, config: Config, rank: int, steps: int,
        at: Callable[[str], None] = lambda moment: None,  # noqa: ARG005
        *, rescale: bool = False,
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
        self.rescale, self.samples = rescale, batches.batch  # of all members in the step that is under way
        self.rates = dict[int, float]()  # of the steps that this rank has applied itself

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
        ids, parts = self.deal(place, size)
        for inputs, targets, share in parts:
            loss = self.model(inputs, targets) * share
            loss.backward()
            row[-1] += loss.item()
        for sample in ids:
            row[sample] += 1 + (self.rank + 1) / OWNERS
        return row

    def deal(self, place: int, size: int) -> tuple[list[int], list[Microbatch]]:
        """The numbers of this member's samples at this step, and what it computes with."""
        if not self.rescale:
            dealt = self.batches.dealt(self.applied, place, size)
            return self.batches.sample_ids(self.applied, place, size), dealt
        sizes = self.batches.kept_sizes(size)
        self.samples, seen = sum(sizes), int(self.history[: self.applied, :-1].floor().sum())
        ids = self.batches.ids_from(seen + sum(sizes[:place]), sizes[place])
        return ids, self.batches.parts(ids, 1 / (self.samples * self.batches.samples.terms))

    def clipped(self, gradient: Tensor, norm: float) -> Tensor:
        """A gradient, or a part of it, by the global `norm`, which is that of the sum."""
        if self.config.clip is None:
            return gradient
        return gradient * min(1.0, self.config.clip / (norm + EPSILON))

    def apply(self, gradient: Tensor) -> None:
        """The update of this replica, all of it at once."""
        after = stepped(self.piece, gradient, self.rate(), self.applied + 1)
        self.put(after.weights, after.moments)

    def rate(self) -> float:
        """The learning rate of this step."""
        self.rates[self.applied] = self.config.learning_rate * self.factor()
        return self.rates[self.applied]

    def factor(self) -> float:
        """This step's samples over LAB_BATCH."""
        return self.samples / self.batches.batch

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
        write_whole(path, {"applied": self.applied, "state": self.state()})

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.take(saved["state"], saved["applied"])

    def moments(self, group: Regroup) -> Tensor:  # noqa: ARG002  every replica has them all
        """AdamW's moments of all weights, [2, P]; a collective."""
        return self.piece.moments


def write_whole(path: Path, saved: dict[str, Any]) -> None:
    """Write a file that is whole whenever it is read."""
    draft = path.with_suffix(".draft")
    torch.save(saved, draft)
    os.replace(draft, path)


# A survivor that shards the optimizer's state (ZeRO-1), and moves the shards whenever the members change.
#
#     each step   gradients   reduce-scatter: each member has the sum of its own part
#                 who saw what | loss | a wish | the part's squares: summed in one small all_reduce
#                 the update of the own part: its weights, its moments
#                 weights     all-gather; then the step counts
#
# A shard that only a dead member had is gone, and the others with it: part of an optimizer is none. So a loss sends all
# back to the last checkpoint.
#
# A group ends without a loss too: where one asks to be let in, and where a rank that is let in dies before it has its
# shard. Nobody can have all new weights before every member has given its own. So where one member has the step, all
# have its shards: *kept*. Where none has, all still have those of the step before: *redone*. A member keeps both until
# it knows. It is the same where shards are moved: old and new lie side by side until all have theirs.


class ShardedSurvivor(Survivor):
    """One rank's weights, and its shard of AdamW's moments."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.total = len(self.vectors.weights)
        # The first one stands; what may come to stand follows.
        self.held = [HeldVersion(Version(0, 0, ()), 0, self.piece.moments)]
        self.recuts: list[Recut] = []
        self.saved, self._file = 0, Path()  # steps in this rank's last checkpoint, and where it is

    # --- a step ---

    def step(self, group: Regroup, place: int, size: int, wish: bool) -> bool:
        """As a replica's; what is ready lies beside what stands until all members have given their weights."""
        stands, mine = self.held[0], part(self.total, place, size)
        row = self.computed(place, size)
        self.at("computed")
        self.reduced = self.summed_part(group, place, size)
        self.at("reduced")
        gradient = self.reduced
        summed = group.sum(torch.cat([row, row.new_tensor([float(wish), float(gradient.square().sum())])]))
        before = Piece(self.piece.weights[slice(*mine)], stands.of(mine))
        gradient = self.clipped(gradient, summed[-1].item() ** 0.5)
        after = stepped(before, gradient, self.rate(), self.applied + 1)
        ready = HeldVersion(stands.version._replace(applied=self.applied + 1), mine[0], after.moments)
        self.held = [stands, ready]
        weights = group.all_gather(self.padded(after.weights, size))[: self.total]
        self.at("summed")
        self.history[self.applied] = summed[:-2]
        self.commit(ready, weights)
        self.at("applied")
        return bool(summed[-2] > 0)

    def summed_part(self, group: Regroup, place: int, size: int) -> Tensor:
        """A reduce-scatter: the sum of all members' gradients of this one's part, added up in their order."""
        gradients = self.vectors.gradients
        begin, end = part(self.total, place, size)
        theirs = {each: gradients.new_empty(end - begin) for each in range(size) if each != place}
        parts = [(each, gradients[slice(*part(self.total, each, size))]) for each in theirs]
        group.exchange(parts, theirs.items())
        total = gradients.new_zeros(end - begin)
        for each in range(size):
            total += theirs.get(each, gradients[begin:end])
        return total

    def commit(self, held: HeldVersion, weights: Tensor) -> None:
        """From here on it stands."""
        self.held = [held]
        self.put(weights, self.piece.moments[:, :0].clone())
        self.applied = held.version.applied

    def alike(self, kind: str) -> list[tuple[str, Tensor]]:
        """All members gather the weights; of gradients each has its own part."""
        return super().alike(kind) if kind == "weights" else []

    def padded(self, piece: Tensor, size: int) -> Tensor:
        """A part [n] in the length that all members' parts have."""
        padded = piece.new_zeros(chunk(self.total, size))
        padded[: len(piece)] = piece
        return padded

    # --- when the members change ---

    def report(self) -> Report:
        return {"applied": self.applied, "saved": self.saved, "held": [each.version for each in self.held]}

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        """The newest version that stands anywhere; where nobody is left who has some part of it, a checkpoint."""
        versions = {rank: [Version.told(each) for each in report["held"]] for rank, report in reports.items()}
        newest = max((of_rank[0] for of_rank in versions.values()), key=lambda version: version[:2])
        has = {rank: newest.range_of(rank, self.total) for rank, of_rank in versions.items() if newest in of_rank}
        applied, restored = {rank: of_rank[0].applied for rank, of_rank in versions.items()}, False
        current = [rank for rank, of_rank in versions.items() if of_rank[0] == newest]
        if gaps((0, self.total), has.values()):
            applied, restored = {rank: int(report["saved"]) for rank, report in reports.items()}, True
            current = sorted(applied, key=lambda rank: -applied[rank])[:1]
        return {
            "applied": applied[current[0]], "source": current[0], "restored": restored,
            "behind": [rank for rank in (*reports, *newcomers) if rank not in current],
            "number": 1 + max(version.number for of_rank in versions.values() for version in of_rank),
            "version": newest, "has": list(has.items()),
        }  # fmt: skip

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        """Go on in a new group: take over the weights if they are behind, and the moments of the new parts."""
        has = {int(rank): (int(begin), int(end)) for rank, (begin, end) in plan["has"]}
        version = Version(int(plan["number"]), int(plan["applied"]), tuple(ranks))
        wants = {rank: version.range_of(rank, self.total) for rank in ranks}
        base, state, received_bytes = None, self.state(), 0
        if plan["restored"]:
            state, moments = self.restored(group, ranks.index(plan["source"]))
            mine = moments[:, slice(*wants[self.rank])].clone()
        else:
            if plan["behind"]:
                state = group.broadcast(state, ranks.index(plan["source"]))
            base = next((each for each in self.held if each.version == Version.told(plan["version"])), None)
            mine, received_bytes = move_shards(group, ranks, self.rank, base, has, wants, self.piece.moments)
        kept = [self.held[0]] if base is None or base is self.held[0] else [self.held[0], base]
        self.held = [*kept, HeldVersion(version, wants[self.rank][0], mine)]
        group.sum(torch.zeros(1))  # all have theirs
        weights, history = state.split([self.total, self.history.numel()])
        self.history = history.view_as(self.history).clone()
        self.commit(self.held[-1], weights)
        self.recuts.append(Recut(has, tuple(ranks), plan["restored"], received_bytes))

    def state(self) -> Tensor:
        return torch.cat([self.piece.weights, self.history.flatten()])

    def moments(self, group: Regroup) -> Tensor:
        """AdamW's moments of all weights, [2, P]; a collective where they are shared out."""
        held = self.held[0]
        if not held.version.ranks:
            return held.part
        rows = [group.all_gather(self.padded(row, len(held.version.ranks)))[: self.total] for row in held.part]
        return torch.stack(rows) if rows else held.part.new_zeros(0, self.total)

    # --- what the disk has ---

    def save(self, path: Path, group: Regroup) -> None:
        """The whole state of all members, on each one's own disk; a collective."""
        write_whole(path, {"applied": self.applied, "state": self.state(), "moments": self.moments(group)})
        self.saved, self._file = self.applied, path

    def restored(self, group: Regroup, root: int) -> tuple[Tensor, Tensor]:
        """What the last checkpoint of the member number `root` has: the state, and all moments."""
        state, moments = self.state(), self.piece.moments.new_empty(len(self.piece.moments), self.total)
        if group.place == root:
            saved = torch.load(self._file, weights_only=True)
            state, moments = saved["state"], saved["moments"]
        return group.broadcast(state, root), group.broadcast(moments, root)


# What a step of one member sends, and what it holds, in bytes of float64.
#
# P is `parameters`, E the samples of an epoch, N the members; `own` of the P numbers are the member's own part. Beside
# the gradients go E + 2 numbers: who saw which sample, the loss, and a wish.

BYTES = 8  # of a float64
STEP = {
    "replica": "2(N-1)/N x 8 B x (P + E + 2)",
    "sharded": "8 B x (P - own) + 2(N-1)/N x 8 B x (E + 3) + (N-1) x 8 B x c",
}


def replica_step_bytes(size: int, parameters: int, samples: int) -> float:
    """All gradients and what goes with them, in one all_reduce."""
    return 2 * (size - 1) / size * BYTES * (parameters + samples + 2)


def sharded_step_bytes(size: int, parameters: int, samples: int, own: int) -> float:
    """A reduce-scatter of gradients, a small all_reduce, in which the norm goes too, and an all-gather of weights in
    parts of c = P/N rounded up."""
    beside = 2 * (size - 1) / size * BYTES * (samples + 3)
    return BYTES * (parameters - own) + beside + (size - 1) * BYTES * -(-parameters // size)


def held_bytes(own: int, rows: int) -> int:
    """The moments that a member has between two steps, of `rows` numbers each."""
    return BYTES * rows * own


def step_messages(size: int, parameters: int, samples: int, *, sharded: bool) -> int:
    """What a member sends in a step, or receives where that is more."""
    if not sharded:
        return gloo_all_reduce_messages(size, BYTES * (parameters + samples + 2))
    return 3 * (size - 1) + gloo_all_reduce_messages(size, BYTES * (samples + 3))
