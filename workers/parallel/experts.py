"""A mixture of experts over ranks: a layer whose router is here, and whose experts may be elsewhere.

All ranks have tokens of their own, and the router whole. What a batch routes is decided by the tokens of all
(routing.py), rows travel to the experts and back (dispatch.py). A loss that is a sum of the ranks' shares gives each
expert its whole gradient where it is, since all tokens of its copy's ranks came there (placement.py): only copies are
left to sum, and nothing is divided.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.parallel import routing
from workers.parallel.dispatch import Compute
from workers.parallel.phases import phase


@dataclass(frozen=True)
class Rules:
    """How tokens find experts, and what balances them (routing.py)."""

    top_k: int
    capacity_factor: float
    balance: float
    z: float
    bias_rate: float


class Routed(NamedTuple):
    """What one batch did in one layer, on all ranks."""

    wanted: list[list[list[int]]]  # [n][k][E]
    admitted: list[list[int]]  # [n][E]
    places: int  # of each expert


class Carries(Protocol):
    """What brings rows to experts and back: dispatch.Dispatch, or nothing where all experts are here."""

    def addressed(self, admitted: list[list[int]]) -> Tensor: ...

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor: ...


class Scores(Protocol):
    """A router: tokens [T, D] to scores [T, E]; a `bias` [E] moves the choice, where there is one."""

    bias: nn.Parameter | None

    def __call__(self, tokens: Tensor) -> Tensor: ...


class Weights(Protocol):
    """What a rank holds of all experts: up [e, D, h], down [e, h, D]."""

    up: nn.Parameter
    down: nn.Parameter


class MixtureOfExperts(nn.Module):
    """[..., D] to [..., D] for this rank's tokens; those without a place get zeros, and go on by the residual.

    `extra` is this rank's part of the auxiliary losses, a sum over its tokens; `seen` what was routed, where it is a
    list.

    Args:
        world: all ranks whose tokens share the places of an expert, in the order of their tokens.
        carries: between this rank and those that hold the other experts.
    """

    def __init__(
        self, router: Scores, experts: Weights, rules: Rules, world: dist.ProcessGroup, carries: Carries
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.rules, self.world, self.carries = rules, world, carries
        self.extra: Tensor | None = None
        self.seen: list[Routed] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [T, D]
        scores = self.router(tokens)
        choices = self.choose(scores)
        table = self.everyone(choices.wanted)  # [n, k, E]
        places = self.places(table)
        kept, admitted = self.admit(choices.experts, table, places)
        leaving = kept[self.carries.addressed(admitted).to(kept.device)]
        token = leaving % len(tokens)
        came = self.carries(tokens[token], admitted, self.compute)
        gates = choices.gates.flatten()[leaving]
        mixed = torch.zeros_like(tokens).index_add(0, token, (came * gates[:, None]).to(tokens.dtype))
        self.balance(scores, choices, table)
        if self.seen is not None:
            self.seen.append(Routed(table.tolist(), admitted, places))
        return mixed.view_as(hidden)

    def choose(self, scores: Tensor) -> routing.Choices:
        """The experts of each token."""
        return routing.choose(scores, self.rules.top_k, self.router.bias)

    def everyone(self, wanted: Tensor) -> Tensor:
        """What the tokens of all ranks want, [n, k, E]; each rank has this one's [k, E]."""
        of_ranks = [torch.empty_like(wanted) for _ in range(self.world.size())]
        with phase("all_gather"):
            dist.all_gather(of_ranks, wanted, group=self.world)
        return torch.stack(of_ranks)

    def places(self, table: Tensor) -> int:
        """Of each expert, by the tokens of all ranks."""
        num_tokens = int(table[:, 0].sum())
        return routing.capacity(num_tokens, self.rules.top_k, table.shape[2], self.rules.capacity_factor)

    def admit(self, experts: Tensor, table: Tensor, places: int) -> tuple[Tensor, list[list[int]]]:
        """This rank's choices that find a place, sorted by expert, and the rows of each rank for each expert."""
        kept = routing.kept(experts, table, self.world.rank(), places)
        return kept, routing.admitted(table, places).tolist()

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The experts of this rank on `rows`, `counts` of each."""
        return routing.grouped(rows, counts, self.experts.up, self.experts.down)

    def balance(self, scores: Tensor, choices: routing.Choices, table: Tensor) -> None:
        """What keeps the experts busy alike: losses now, a bias from the next batch on."""
        balance = routing.balance_loss(choices.probabilities, table)
        self.extra = self.rules.balance * balance + self.rules.z * routing.z_loss(scores)
        self.move_bias(table)

    @torch.no_grad()
    def move_bias(self, table: Tensor) -> None:
        """By what the tokens of all ranks want, so that it stays the same on all."""
        if self.router.bias is not None:
            self.router.bias.copy_(routing.moved_bias(self.router.bias, table, self.rules.bias_rate))
