"""A survivor that shards the optimizer's state (ZeRO-1), and moves the shards whenever the members change.

    each step   gradients   reduce-scatter: each member has the sum of its own part
                who saw what | loss | a wish | the part's squares: summed in one small all_reduce
                the update of the own part: its weights, its moments
                copies      with `copies` each member sends its new moments to the one that keeps them (shards.py)
                weights     all-gather; then the step counts

A shard that only a dead member had is gone, and the others with it: part of an optimizer is none. So without copies a
loss sends all back to the last checkpoint. With them the others go on from memory, unless a member and the keeper of
its copy died together (Gemini: Wang et al., SOSP 2023).

Nobody can have all new weights before every member has given its own, and it gives them once it has the copies that it
keeps. So where one survivor has the step, all have the shards and the copies of it: *kept*. Where none has, all still
have those of the step before: *redone*. A member keeps both until it knows. It is the same where shards are moved: old
and new lie side by side until all have theirs.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.elastic.process_group import Parcel, Regroup
from distlab.elastic.shards import (
    HeldVersion,
    Range,
    Recut,
    Version,
    chunk,
    gaps,
    keeper,
    move_shards,
    owned_ranges,
    part,
    wards,
)
from distlab.elastic.strategy import Report, Survivor
from distlab.sharded.flat_parameter import Piece, stepped


class ShardedSurvivor(Survivor):
    """One rank's weights, its shard of AdamW's moments, and with `copies` those that it keeps for others."""

    def __init__(self, *given: Any, copies: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self.copies, self.total = copies, len(self.vectors.weights)
        # The first one stands; what may come to stand follows.
        self.held = [HeldVersion(Version(0, 0, ()), {(0, self.total): self.piece.moments})]
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
        after = stepped(before, gradient, self.config.learning_rate, self.applied + 1)
        copied = self.copied(group, place, size, self.to_copy(before, after)) if self.copies else {}
        ready = HeldVersion(stands.version._replace(applied=self.applied + 1), {mine: after.moments} | copied)
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
        parts = [Parcel(each, gradients[slice(*part(self.total, each, size))]) for each in theirs]
        group.exchange(parts, [Parcel(*each) for each in theirs.items()])
        total = gradients.new_zeros(end - begin)
        for each in range(size):
            total += theirs.get(each, gradients[begin:end])
        return total

    def to_copy(self, before: Piece, after: Piece) -> Tensor:  # noqa: ARG002  a mistake takes the other
        """What the keeper is sent."""
        return after.moments

    def copied(self, group: Regroup, place: int, size: int, moments: Tensor) -> dict[Range, Tensor]:
        """Send this member's `moments` to the one that keeps them; returns the copies that come to this one."""
        ranges = {ward: part(self.total, ward, size) for ward in wards(place, size)}
        come = {ward: moments.new_empty(len(moments), end - begin) for ward, (begin, end) in ranges.items()}
        to = keeper(place, size)
        group.exchange([] if to is None else [Parcel(to, moments)], [Parcel(*each) for each in come.items()])
        return {ranges[ward]: copy for ward, copy in come.items()}

    def commit(self, held: HeldVersion, weights: Tensor) -> None:
        """From here on it stands."""
        self.held = [held]
        self.put(weights, self.piece.moments[:, :0].clone())
        self.applied = held.version.applied

    def alike(self, kind: str) -> list[tuple[str, Tensor]]:
        """All members gather the weights; of gradients each has its own part."""
        return super().alike(kind) if kind == "weights" else []

    def own(self, kind: str) -> list[tuple[str, Tensor]]:
        """What this member alone has of `kind`."""
        return [("part", self.reduced)] if kind == "gradients" else []

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
        has = {rank: self.ranges(newest, rank) for rank, of_rank in versions.items() if newest in of_rank}
        applied, restored = {rank: of_rank[0].applied for rank, of_rank in versions.items()}, False
        current = [rank for rank, of_rank in versions.items() if of_rank[0] == newest]
        if gaps(has, self.total):
            applied, restored = {rank: int(report["saved"]) for rank, report in reports.items()}, True
            current = sorted(applied, key=lambda rank: -applied[rank])[:1]
        return {
            "applied": applied[current[0]], "source": current[0], "restored": restored,
            "behind": [rank for rank in (*reports, *newcomers) if rank not in current],
            "number": 1 + max(version.number for of_rank in versions.values() for version in of_rank),
            "version": newest, "has": list(has.items()),
        }  # fmt: skip

    def ranges(self, version: Version, rank: int) -> list[Range]:
        """What `rank` has of a version."""
        if not version.ranks:
            return [(0, self.total)]
        return owned_ranges(self.total, version.ranks, copies=self.copies)[rank]

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        """Go on in a new group: take over the weights if they are behind, and the moments of the new parts."""
        has = {int(rank): [(int(begin), int(end)) for begin, end in ranges] for rank, ranges in plan["has"]}
        version = Version(int(plan["number"]), int(plan["applied"]), tuple(ranks))
        wants = {rank: self.ranges(version, rank) for rank in ranks}
        base, state, received_bytes = None, self.state(), 0
        if plan["restored"]:
            state, moments = self.restored(group, ranks.index(plan["source"]))
            parts = {(begin, end): moments[:, begin:end].clone() for begin, end in wants[self.rank]}
        else:
            if plan["behind"]:
                state = group.broadcast(state, ranks.index(plan["source"]))
            base = next((each for each in self.held if each.version == Version.told(plan["version"])), None)
            parts, received_bytes = move_shards(group, ranks, self.rank, base, has, wants, self.piece.moments)
        kept = [self.held[0]] if base is None or base is self.held[0] else [self.held[0], base]
        self.held = [*kept, HeldVersion(version, parts)]
        group.sum(torch.zeros(1))  # all have theirs
        weights, history = state.split([self.total, self.history.numel()])
        self.history = history.view_as(self.history).clone()
        self.commit(self.held[-1], weights)
        self.recuts.append(Recut(Version.told(plan["version"]), has, tuple(ranks), plan["restored"], received_bytes))

    def state(self) -> Tensor:
        """A copy of what all members have alike: weights and history."""
        return torch.cat([self.piece.weights, self.history.flatten()])

    def moments(self, group: Regroup) -> Tensor:
        """AdamW's moments of all weights, [2, P]; a collective where they are shared out."""
        held = self.held[0]
        if not held.version.ranks:
            return held.of((0, self.total))
        size = len(held.version.ranks)
        mine = held.of(part(self.total, held.version.ranks.index(self.rank), size))
        rows = [group.all_gather(self.padded(row, size))[: self.total] for row in mine]
        return torch.stack(rows) if rows else mine.new_zeros(0, self.total)

    def copies_apart(self, moments: Tensor) -> float:
        """How far the copies that this member keeps are from the `moments` [2, P] of all."""
        copies = list(self.held[0].parts.items())[1:]
        apart = [float((copy - moments[:, begin:end]).abs().max()) for (begin, end), copy in copies if copy.numel()]
        return max(apart, default=0.0)

    # --- what the disk has ---

    def save(self, path: Path, group: Regroup) -> None:
        """The whole state of all members, on each one's own disk; a collective."""
        draft, moments = path.with_suffix(".draft"), self.moments(group)
        torch.save({"applied": self.applied, "state": self.state(), "moments": moments}, draft)
        os.replace(draft, path)
        self.saved, self._file = self.applied, path

    def restored(self, group: Regroup, root: int) -> tuple[Tensor, Tensor]:
        """What the last checkpoint of the member number `root` has: the state, and all moments."""
        state, moments = self.state(), self.piece.moments.new_empty(len(self.piece.moments), self.total)
        if group.place == root:
            saved = torch.load(self._file)
            state, moments = saved["state"], saved["moments"]
        return group.broadcast(state, root), group.broadcast(moments, root)
