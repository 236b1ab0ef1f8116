"""Silent corruption where ranks come and go: who is in at a step compares hashes, and the odd one is named.

Every LAB_AUDIT_EVERY steps each member hashes the gradients once they are summed and the weights once they are updated,
where all members hold them whole. One all_gather takes the hashes to all of them: any of them may be the last, so all
know what was named. The first member says it. An audit that a loss ends is left out.
"""

from collections.abc import Sequence

import torch

from workers.lab import Lab
from workers.parallel.regroup import Regroup
from workers.passes.corruption import KINDS, LEAST, Corruption, Hashes, Odd
from workers.strategies.survivor import Survivor

NONE = -1  # in place of a hash, which is never negative


class Audit(Corruption):
    """The audits of one variant, in one rank."""

    def __init__(self, lab: Lab, name: str) -> None:
        super().__init__(lab, {}, lab.config.audited_every)
        self.name = name
        self._group: Regroup | None = None
        self._ranks: list[int] = []

    def enter(self, group: Regroup, ranks: Sequence[int], training: Survivor) -> None:
        """From here on these are in."""
        self._group, self._ranks = group, list(ranks)
        compared = training.alike("weights") if len(ranks) >= LEAST else []
        self.holders[self.name] = {parameter: sorted(ranks) for parameter, _ in compared}

    def see(self, kind: str, training: Survivor, step: int) -> None:
        """This member's "gradients" or "weights" of a step are there: a drill may change them, then they are hashed."""
        self.lab.on_tensors(kind, self.name, training, step, self.shared(self.name))
        self.hash(kind, self.name, training, step)

    def gathered(self, name: str, mine: Hashes) -> Sequence[Hashes]:
        """A collective of all members; of a rank that is not in nothing."""
        assert self._group is not None, "who audits is in"
        labels = [f"{kind}.{parameter}" for kind in KINDS for parameter in self.holders[name]]
        rows = self._group.all_gather(torch.tensor([mine.get(label, NONE) for label in labels])).view(-1, len(labels))
        of_ranks = dict(zip(self._ranks, rows.tolist(), strict=True))
        return [
            {label: found for label, found in zip(labels, of_ranks.get(rank, ()), strict=False) if found != NONE}
            for rank in range(self.lab.world_size)
        ]

    def tell(self, name: str, step: int, odd: list[Odd], sentence: str) -> None:
        """All know it; the first member tells."""
        if self.lab.rank == self._ranks[0]:
            super().tell(name, step, odd, sentence)

    def decide(self) -> None:
        """Each member's check of what it saw."""
        if self.audits[self.name]:
            self.decide_one(self.name)
