"""A replica that survives the loss of its process group: applied updates are kept, late ranks copy the newest state;
and a variant that shards the optimizer's state.

    each step   gradients [P] | owner of each sample [E] | loss [1] | a join request [1]    summed in one all_reduce
                the update, on this rank alone; then the step counts

The all_reduce either returns the sum of all members, or raises. If a member dies in it, some may have the sum and
others not: those are exactly one update behind, since the next sum needs everybody. So the survivors compare how many
steps each has applied. If one has the step, it is *kept*: the others copy its weights, moments and history. If none
has, it is *redone* by the survivors: the dead member's samples are reassigned.

The owners of samples are summed together with the gradient and count with it, so no other record is needed of what a
dead member did: sample i of the epoch gets 1 + (rank + 1)/1024 from the rank that computes with it.
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
    Piece,
    Recut,
    StoredVersion,
    Version,
    chunk,
    fresh,
    gaps,
    move_shards,
    part,
    stepped,
)

OWNERS = 1024  # the fraction (rank + 1)/1024 identifies a sample's owner
EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_

Report = dict[str, Any]


class Survivor:
    """One rank's replica, in float64. `at(moment)` is called between the parts of a step; a fault test may raise there.

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
        # The optimizer steps the model's own weights.
        self.piece = fresh(self.vectors.weights, config.optimizer)._replace(weights=self.vectors.weights)
        self.reduced = self.vectors.gradients[:0]  # of this step: all members' summed gradients, or a part
        self.sizes = {name: each.numel() for name, each in model.named_parameters()}
        self.epoch = batches.num_batches * batches.batch
        self.history = self.vectors.weights.new_zeros(steps, self.epoch + 1)  # a row per step: owners, loss
        self.applied = 0  # steps
        self.rescale, self.samples = rescale, batches.batch  # of all members in this step
        self.rates = dict[int, float]()  # of the steps that this rank has applied itself

    # --- a step ---

    def step(self, group: Regroup, place: int, size: int, join_request: bool) -> bool:
        """Run one step as member number `place` of `size`; return whether any member has a `join_request`.

        Raises RuntimeError if a member was lost; this rank's state is then that before or after the step.
        """
        payload = self.sum_of_all(group, place, size, join_request)
        self.reduced, row = payload[: len(self.vectors.weights)], payload[len(self.vectors.weights) : -1]
        self.at("reduced")
        self.apply(self.clipped(self.reduced, self.reduced.norm().item()))
        self.history[self.applied] = row
        self.applied += 1
        self.at("applied")
        return bool(payload[-1] > 0)

    def sum_of_all(self, group: Regroup, place: int, size: int, join_request: bool) -> Tensor:
        """Return this member's results summed over all members: [P + E + 1 + 1]."""
        row = self.computed(place, size)
        self.at("computed")
        requested = row.new_tensor([float(join_request)])
        payload = group.sum(torch.cat([self.vectors.gradients, row, requested]))
        self.at("summed")
        return payload

    def computed(self, place: int, size: int) -> Tensor:
        """Run forward and backward on this member's part of the batch; return owners and its part of the loss."""
        self.vectors.zero()
        row = self.vectors.weights.new_zeros(self.epoch + 1)
        ids, parts = self.assign(place, size)
        for inputs, targets, share in parts:
            loss = self.model(inputs, targets) * share
            loss.backward()
            row[-1] += loss.item()
        for sample in ids:
            row[sample] += 1 + (self.rank + 1) / OWNERS
        return row

    def assign(self, place: int, size: int) -> tuple[list[int], list[Microbatch]]:
        """Return the numbers of this member's samples at this step, and the samples as microbatches."""
        if not self.rescale:
            microbatches = self.batches.microbatches(self.applied, place, size)
            return self.batches.sample_ids(self.applied, place, size), microbatches
        sizes = self.batches.kept_sizes(size)
        self.samples, seen = sum(sizes), int(self.history[: self.applied, :-1].floor().sum())
        ids = self.batches.ids_from(seen + sum(sizes[:place]), sizes[place])
        return ids, self.batches.parts(ids, 1 / (self.samples * self.batches.samples.terms))

    def clipped(self, gradient: Tensor, norm: float) -> Tensor:
        """Clip a gradient, or a part of it, by the global `norm` of the sum."""
        if self.config.clip is None:
            return gradient
        return gradient * min(1.0, self.config.clip / (norm + EPSILON))

    def apply(self, gradient: Tensor) -> None:
        """Update this replica, all at once."""
        after = stepped(self.piece, gradient, self.rate(), self.applied + 1)
        self.put(after.weights, after.moments)

    def rate(self) -> float:
        """Return the learning rate of this step."""
        self.rates[self.applied] = self.config.learning_rate * self.factor()
        return self.rates[self.applied]

    def factor(self) -> float:
        """Return this step's samples divided by LAB_BATCH."""
        return self.samples / self.batches.batch

    def put(self, weights: Tensor, moments: Tensor) -> None:
        """Replace the model's weights and moments by these."""
        self.vectors.weights.copy_(weights)
        self.piece = Piece(self.vectors.weights, moments)

    # --- for audits ---

    def alike(self, kind: str) -> list[tuple[str, Tensor]]:
        """Return the summed "gradients" or the "weights", equal on all members to the bit, by parameter."""
        vector = self.vectors.weights if kind == "weights" else self.reduced
        return list(zip(self.sizes, vector.split(list(self.sizes.values())), strict=True))

    # --- after a loss ---

    def report(self) -> Report:
        """Return the state that the first member needs to decide which step is kept."""
        return {"applied": self.applied}

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        """Decide from all reports, by rank in order, which steps are kept and which rank has them."""
        applied = {rank: int(report["applied"]) for rank, report in reports.items()}
        most = max(applied.values())
        source = next(rank for rank, steps in applied.items() if steps == most)
        behind = [rank for rank, steps in applied.items() if steps < most]
        return {"applied": most, "source": source, "behind": [*behind, *newcomers]}

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        """Continue in a new group of `ranks`: members that are behind copy the state of the plan's source."""
        if plan["behind"]:
            state = group.broadcast(self.state(), ranks.index(plan["source"]))  # a copy, so a partial one is never used
            if self.rank in plan["behind"]:
                self.set_state(state, int(plan["applied"]))

    def state(self) -> Tensor:
        return torch.cat([self.piece.weights, self.piece.moments.flatten(), self.history.flatten()])

    def set_state(self, state: Tensor, applied: int) -> None:
        """Continue from a `state` that was taken after so many steps."""
        parts = (self.piece.weights, self.piece.moments, self.history)
        weights, moments, history = state.split([part.numel() for part in parts])
        self.put(weights, moments.view_as(self.piece.moments).clone())
        self.history = history.view_as(self.history).clone()
        self.applied = applied

    # --- for a restart ---

    def save(self, path: Path, group: Regroup) -> None:  # noqa: ARG002  every replica has all
        save_atomically(path, {"applied": self.applied, "state": self.state()})

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.set_state(saved["state"], saved["applied"])

    def moments(self, group: Regroup) -> Tensor:  # noqa: ARG002  every replica has them all
        """Return AdamW's moments of all weights, [2, P]; a collective."""
        return self.piece.moments


def save_atomically(path: Path, saved: dict[str, Any]) -> None:
    """Write a file atomically, so that readers never see a part of it."""
    draft = path.with_suffix(".draft")
    torch.save(saved, draft)
    os.replace(draft, path)


# A replica that shards the optimizer's state (ZeRO-1), and moves shards when the members change.
#
#     each step   gradients   reduce-scatter: each member has the sum of its own part
#                 owners | loss | a join request | squares of the part: summed in one small all_reduce
#                 the update of its own part: its weights, its moments
#                 weights     all-gather; then the step counts
#
# A shard that only a dead member had is lost, and an incomplete optimizer state is useless. So after a loss all members
# return to the last checkpoint.
#
# A group can also end without a lost shard: when a rank asks to join, or a joined rank dies before it has its shard. No
# member can have all new weights before every member has sent its own. So if one member has the step, all have its
# shards: *kept*. If none has, all still have those of the step before: *redone*. A member keeps both until it knows.
# The same holds while shards move: old and new are kept until all members have theirs.


class ShardedSurvivor(Survivor):
    """One rank's weights, and its shard of AdamW's moments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.total = len(self.vectors.weights)
        # The first is valid; versions that may become valid follow.
        self.versions = [StoredVersion(Version(0, 0, ()), 0, self.piece.moments)]
        self.recuts: list[Recut] = []
        self.saved, self._file = 0, Path()  # steps in this rank's last checkpoint, and its file

    # --- a step ---

    def step(self, group: Regroup, place: int, size: int, join_request: bool) -> bool:
        """Run a step like a replica; the new version becomes valid once all members have sent their weights."""
        valid, mine = self.versions[0], part(self.total, place, size)
        row = self.computed(place, size)
        self.at("computed")
        self.reduced = self.summed_part(group, place, size)
        self.at("reduced")
        gradient = self.reduced
        summed = group.sum(torch.cat([row, row.new_tensor([float(join_request), float(gradient.square().sum())])]))
        before = Piece(self.piece.weights[slice(*mine)], valid.of(mine))
        gradient = self.clipped(gradient, summed[-1].item() ** 0.5)
        after = stepped(before, gradient, self.rate(), self.applied + 1)
        ready = StoredVersion(valid.version._replace(applied=self.applied + 1), mine[0], after.moments)
        self.versions = [valid, ready]
        weights = group.all_gather(self.padded(after.weights, size))[: self.total]
        self.at("summed")
        self.history[self.applied] = summed[:-2]
        self.commit(ready, weights)
        self.at("applied")
        return bool(summed[-2] > 0)

    def summed_part(self, group: Regroup, place: int, size: int) -> Tensor:
        """Return the sum of all members' gradients for this member's part, added in member order: a reduce-scatter."""
        gradients = self.vectors.gradients
        begin, end = part(self.total, place, size)
        received = {each: gradients.new_empty(end - begin) for each in range(size) if each != place}
        parts = [(each, gradients[slice(*part(self.total, each, size))]) for each in received]
        group.exchange(parts, received.items())
        total = gradients.new_zeros(end - begin)
        for each in range(size):
            total += received.get(each, gradients[begin:end])
        return total

    def commit(self, stored: StoredVersion, weights: Tensor) -> None:
        """Make this version the only valid one."""
        self.versions = [stored]
        self.put(weights, self.piece.moments[:, :0].clone())
        self.applied = stored.version.applied

    def alike(self, kind: str) -> list[tuple[str, Tensor]]:
        """Gather the weights of all members; gradients are of each member's own part."""
        return super().alike(kind) if kind == "weights" else []

    def padded(self, piece: Tensor, size: int) -> Tensor:
        """Return a part [n] padded to the length that all members' parts have."""
        padded = piece.new_zeros(chunk(self.total, size))
        padded[: len(piece)] = piece
        return padded

    # --- when the members change ---

    def report(self) -> Report:
        return {"applied": self.applied, "saved": self.saved, "versions": [each.version for each in self.versions]}

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        """Choose the newest version that is valid anywhere, or a checkpoint if a part of it is lost."""
        versions = {rank: [Version.parse(each) for each in report["versions"]] for rank, report in reports.items()}
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
        """Continue in a new group: copy the weights if they are behind, and the moments of the new parts."""
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
            base = next((each for each in self.versions if each.version == Version.parse(plan["version"])), None)
            mine, received_bytes = move_shards(group, ranks, self.rank, base, has, wants, self.piece.moments)
        kept = [self.versions[0]] if base is None or base is self.versions[0] else [self.versions[0], base]
        self.versions = [*kept, StoredVersion(version, wants[self.rank][0], mine)]
        group.sum(torch.zeros(1))  # wait until all members have their shards
        weights, history = state.split([self.total, self.history.numel()])
        self.history = history.view_as(self.history).clone()
        self.commit(self.versions[-1], weights)
        self.recuts.append(Recut(has, tuple(ranks), plan["restored"], received_bytes))

    def state(self) -> Tensor:
        return torch.cat([self.piece.weights, self.history.flatten()])

    def moments(self, group: Regroup) -> Tensor:
        """Return AdamW's moments of all weights, [2, P]; a collective if they are sharded."""
        stored = self.versions[0]
        if not stored.version.ranks:
            return stored.part
        rows = [group.all_gather(self.padded(row, len(stored.version.ranks)))[: self.total] for row in stored.part]
        return torch.stack(rows) if rows else stored.part.new_zeros(0, self.total)

    # --- on disk ---

    def save(self, path: Path, group: Regroup) -> None:
        """Write the whole state of all members to each member's own disk; a collective."""
        save_atomically(path, {"applied": self.applied, "state": self.state(), "moments": self.moments(group)})
        self.saved, self._file = self.applied, path

    def restored(self, group: Regroup, root: int) -> tuple[Tensor, Tensor]:
        """Return the state and all moments from the last checkpoint of member number `root`."""
        state, moments = self.state(), self.piece.moments.new_empty(len(self.piece.moments), self.total)
        if group.place == root:
            saved = torch.load(self._file, weights_only=True)
            state, moments = saved["state"], saved["moments"]
        return group.broadcast(state, root), group.broadcast(moments, root)


# The bytes that one member sends in a step and stores between steps, in float64.
#
# P is `parameters`, E the samples of an epoch, N the members; a member's own part has `own` of the P numbers. E + 2
# numbers are sent with the gradients: the owners of samples, the loss and a join request.

BYTES = 8  # of a float64
STEP = {
    "replica": "2(N-1)/N x 8 B x (P + E + 2)",
    "sharded": "8 B x (P - own) + 2(N-1)/N x 8 B x (E + 3) + (N-1) x 8 B x c",
}


def replica_step_bytes(size: int, parameters: int, samples: int) -> float:
    """Return the bytes of one all_reduce of the gradients and the E + 2 other numbers."""
    return 2 * (size - 1) / size * BYTES * (parameters + samples + 2)


def sharded_step_bytes(size: int, parameters: int, samples: int, own: int) -> float:
    """Return the bytes of a reduce-scatter of gradients, a small all_reduce that includes the norm, and an all-gather
    of weights in parts of c = P/N rounded up."""
    small = 2 * (size - 1) / size * BYTES * (samples + 3)
    return BYTES * (parameters - own) + small + (size - 1) * BYTES * -(-parameters // size)


def stored_bytes(own: int, rows: int) -> int:
    """Return the bytes of the moments that a member stores between steps, of `rows` numbers each."""
    return BYTES * rows * own


def step_messages(size: int, parameters: int, samples: int, *, sharded: bool) -> int:
    """Return the messages that a member sends in a step, or receives if these are more."""
    if not sharded:
        return gloo_all_reduce_messages(size, BYTES * (parameters + samples + 2))
    return 3 * (size - 1) + gloo_all_reduce_messages(size, BYTES * (samples + 3))
