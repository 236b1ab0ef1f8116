"""Classic bugs of elastic training, injected by LAB_BUG."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.strategy import Report, ShardedSurvivor, Survivor

from .options import Options

mistake = Mistakes()


# --- settings that hide a bug ---


def no_loss(config: Config) -> str:
    """Return why no check can detect a bug that acts after a loss."""
    if not config.own(Options).losses:
        return "LAB_LOSSES=0: no rank dies"
    return f"LAB_STEPS={config.steps}: no rank dies in fewer than 4 steps" if config.steps < 4 else ""


def unsaved(config: Config) -> str:
    """Return why no restart would find a checkpoint from before its loss."""
    if config.own(Options).saved_every * 3 > config.steps:
        return "LAB_SAVED_EVERY above a third of LAB_STEPS: no checkpoint is saved before the last loss"
    return no_loss(config)


def unscaled(config: Config) -> str:
    """Return why the learning rate need not follow the members."""
    return no_loss(config) if config.own(Options).rescale else "LAB_RESCALE=0: neither the batch nor the rate changes"


def needs_loss(variant: str, ranks: int = 2, unless: Callable[[Config], str] = no_loss) -> Needs:
    return Needs(ranks=ranks, proof=False, variants=(variant,), unless=unless)


# --- the bugs ---


@mistake("stale_deal", check="samples", part="survivor", needs=needs_loss("shrink"))
class StaleAssignment(Survivor):
    """Survivors split the batch for the original number of ranks: the lost rank's samples are left out."""

    first: tuple[int, int] | None = None

    def computed(self, place: int, size: int) -> Tensor:
        self.first = self.first or (place, size)
        return super().computed(*self.first)


@mistake("oldest_state", check="updates kept", part="survivor", needs=needs_loss("join", ranks=3))
class Oldest(Survivor):
    """After a loss all continue from the rank that is behind: updates that others had applied are lost."""

    def decide(self, reports: Mapping[int, Report], newcomers: Iterable[int]) -> Report:
        applied = {rank: int(report["applied"]) for rank, report in reports.items()}
        least = min(applied.values())
        source = next(rank for rank, steps in applied.items() if steps == least)
        ahead = [rank for rank, steps in applied.items() if steps > least]
        return {"applied": least, "source": source, "behind": [*ahead, *newcomers]}


@mistake("unsent_state", check="replicas", part="survivor", needs=needs_loss("join"))
class Unsent(Survivor):
    """A newcomer gets the step but not the state: it continues from its first weights.

    These are the weights of LAB_SEED, as at its first start.
    """

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        if plan["behind"]:
            group.broadcast(self.state(), ranks.index(plan["source"]))
        self.applied = int(plan["applied"])


@mistake("weights_alone", check="optimizer", part="survivor", needs=needs_loss("restart", unless=unsaved))
class WeightsAlone(Survivor):
    """The copied state lacks the optimizer's moments: AdamW restarts in the middle of the training."""

    def set_state(self, state: Tensor, applied: int) -> None:
        super().set_state(state, applied)
        self.piece = self.piece._replace(moments=torch.zeros_like(self.piece.moments))


@mistake("seldom_saved", check="save interval", part="survivor", needs=needs_loss("restart", unless=unsaved))
class Seldom(Survivor):
    """Every second checkpoint is not written: a loss goes back further than LAB_SAVED_EVERY."""

    left_out = False

    def save(self, path: Path, group: Regroup) -> None:
        self.left_out = not self.left_out
        if not self.left_out:
            super().save(path, group)


@mistake("redone_twice", check="weights", part="survivor", needs=needs_loss("shrink"))
class Twice(Survivor):
    """After a change of members each applies its own gradient of the step again."""

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        super().enter(group, ranks, plan)
        if self.applied:
            self.apply(self.vectors.gradients)


@mistake("rate_kept", check="learning rate", part="survivor", needs=needs_loss("join", unless=unscaled))
class RateKept(Survivor):
    """The batch shrinks with the members but the learning rate does not: fewer samples move the weights equally far."""

    def factor(self) -> float:
        return 1.0


@mistake("old_cut", check="optimizer", part="sharded", needs=needs_loss("zero1", ranks=3))
class OldCut(ShardedSurvivor):
    """When the members change, each keeps the shard of the old cut: moments belong to other weights.

    The shard keeps its numbers although it begins elsewhere in the new cut.
    """

    def enter(self, group: Regroup, ranks: Sequence[int], plan: Report) -> None:
        before = self.versions[0]
        super().enter(group, ranks, plan)
        if before.version.ranks and self.versions[0].version.ranks != before.version.ranks:
            old, own = before.part, self.versions[0].part
            length = min(own.shape[1], old.shape[1])
            own[:, :length] = old[:, :length]
