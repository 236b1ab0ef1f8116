"""Classic bugs of expert parallelism, injected by LAB_BUG: in the sums of gradients, in capacity, in the order of rows
and in the gates."""

from typing import Any

from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.techniques.expert_parallel import layer as routing
from distlab.techniques.expert_parallel.layer import Dispatch, MixtureOfExperts
from distlab.techniques.expert_parallel.strategy import ExpertParallel

from .options import Options

DISTRIBUTED = ("ep", "ep_dp", "ep_tp", "ep_dp_tp")  # experts on ranks
ROUTED = ("replicated", *DISTRIBUTED)
mistake = Mistakes()


# --- settings that hide a bug ---


def several(config: Config) -> str:
    """With several choices it is right to divide the gates by their sum."""
    top_k = config.own(Options).top_k
    return "" if top_k == 1 else f"LAB_TOP_K={top_k}: it takes 1"


def drops_none(config: Config) -> str:
    """Without a capacity no expert is ever full."""
    full = "LAB_CAPACITY=0: it takes more than 0, where an expert can be full"
    return "" if config.own(Options).capacity else full


# --- the bugs ---


@mistake("experts_times_ep", check="gradients", part="ExpertParallel", of=DISTRIBUTED)
class TimesRanks(ExpertParallel):
    """The loss is scaled by the ranks, and only other gradients are averaged: those of experts are ep times too large
    (pytorch 160285)."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        ranks = self.world.size()
        scaled = super().backward([each._replace(share=each.share * ranks) for each in microbatches])
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and self.is_summed(name):
                parameter.grad /= ranks
        return scaled / ranks


@mistake("aux_on_every_rank", check="losses", part="MixtureOfExperts", of=ROUTED)
class CountedByAll(MixtureOfExperts):
    """Each rank adds the auxiliary losses of the whole batch to its part of the loss: they count N times."""

    def balance(self, scores: Tensor, choices: routing.Choices, table: Tensor) -> None:
        super().balance(scores, choices, table)
        assert self.extra is not None
        self.extra = self.extra * self.world.size()


@mistake("local_capacity", check="capacity", part="MixtureOfExperts", of=ROUTED, needs=Needs(unless=drops_none))
class OwnPlaces(MixtureOfExperts):
    """An expert's places are computed from each rank's tokens alone: other tokens are dropped than in one process."""

    def admit(self, experts: Tensor, table: Tensor, places: int) -> tuple[Tensor, list[list[int]]]:  # noqa: ARG002
        tables = [rank_table.unsqueeze(0) for rank_table in table]
        own = tables[self.world.rank()]
        admitted = [routing.admitted(each, self.places(each))[0].tolist() for each in tables]
        return routing.within_capacity(experts, own, 0, self.places(own)), admitted


@mistake("copies_apart", check="copies", part="ExpertParallel", of=("ep_dp", "ep_dp_tp"), needs=Needs(ranks=4))
class CopiesApart(ExpertParallel):
    """Gradients of experts are not summed over their copies: the copies diverge."""

    def __init__(self, *args: Any) -> None:
        model, placement, world, config, _ = args
        super().__init__(model, placement, world, config)


@mistake("left_sorted", check="losses", part="Dispatch", of=DISTRIBUTED)
class LeftSorted(Dispatch):
    """Rows return in the order of the experts, not in the order received: tokens get other tokens' results."""

    def restore_order(self, sorted_rows: Tensor, order: Tensor) -> Tensor:  # noqa: ARG002
        return sorted_rows


@mistake("gate_over_itself", check="gradients", part="MixtureOfExperts", of=ROUTED, needs=Needs(unless=several))
class GateOverItself(MixtureOfExperts):
    """With one choice the gate is divided by itself: it is always 1, and the router learns nothing."""

    def choose(self, scores: Tensor) -> routing.Choices:
        choices = super().choose(scores)
        return choices._replace(gates=choices.gates / choices.gates.sum(0))
