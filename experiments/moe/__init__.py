"""Mixture of experts: E MLPs in place of one, a router that picks k of them for each token, and experts on ranks.

A token costs k MLPs, however many experts there are: parameters grow, compute does not. Not all experts fit on one
rank, so each rank stores some, and tokens travel to them and back. The tokens choose, so the load is uneven: a step
takes as long as its busiest rank. A capacity bounds the load: tokens beyond it are dropped, and only their residual
continues. A balance loss makes that rare.

  predicted   rows of D numbers travel there and back, forward and backward: 2D x (rows that a rank sends to other
              ranks + rows that it receives), with even routing 4(N-1)/N x k·T·D, T tokens per rank; and as in dp
              2(N-1)/N x S' of all gradients except the experts'. replicated sends 2(N-1)/N x S of all gradients.
              Parameters per rank: Q + E·M/N where replicated has Q + E·M, M those of an MLP. An expert computes at most
              C = ceil(LAB_CAPACITY·k·B/E) of the B tokens of a batch, first choices first (Lepikhin et al. 2020,
              "GShard", section 2.2)
  shapes      tokens [T, D] per rank; scores [T, E]; choices and gates [k, T]; counts of all ranks' choices [N, k, E];
              rows that arrive [R, D] of any R, 0 too; experts up [E/N, D, 4D], down [E/N, 4D, D]

Each rank routes its own tokens, but makes the same choices, drops the same tokens and computes the same losses as one
process with the whole batch, since it knows how often the tokens of all ranks want each expert:

  replicated  every expert on every rank, data parallel: no token travels, but the gradients of all experts do
  ep          some experts on each rank; tokens travel to them by our own uneven all_to_all
  ep_dp       several copies of the experts, each on some ranks: tokens travel among fewer ranks, and the copies sum
              their gradients
  ep_tp       each expert is cut by its hidden units over several ranks, all of which compute its tokens
  ep_dp_tp    both
  ep_torch    ep with PyTorch's all_to_all_single

LAB_MESH=dp2,ep2 sets the grid of the experts.

LAB_TOP_K=1 is a switch (Fedus et al. 2021, "Switch Transformers"). LAB_BALANCE is `loss` (its section 2.2) or `none`.
Ranks that share cores take turns, so an uneven load does not show: LAB_ROW_US simulates compute that uses no core.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import digest_of
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import PartedBatches
from distlab.lab.workload.experts import Experts, Mixing, MixtureModel, Router, build_mixture, outline_mixture
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.expert_parallel.layer import (
    AllToAll,
    AllToAllSingle,
    Compute,
    Dispatch,
    MixtureOfExperts,
    Placement,
    Routed,
    Swap,
)
from distlab.techniques.expert_parallel.strategy import ExpertParallel, distribute
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.pipeline_parallel.pretend import Sleep

from . import lesson
from .bugs import mistake
from .checks import PASSES, Routes, by_step, check_capacity, claims, compare_pace, draw, tokens_of
from .options import Options
from .predictions import (
    cannot,
    even_row_bytes,
    expert_places,
    more_parameters,
    placements,
    predict,
    refuse,
)

BALANCE_WEIGHT = 0.01  # Switch Transformers, section 2.2


def mixing(config: Config) -> Mixing:
    own = config.own(Options)
    weight = BALANCE_WEIGHT if own.balance == "loss" else 0.0
    return Mixing(own.experts, own.top_k, own.capacity, weight, own.router_z)


# --- replicated: every expert on every rank ---


def replicated(model: MixtureModel, mesh: Mesh, config: Config) -> Strategy:
    """Data parallel: each rank has all experts and computes its own tokens; all gradients are summed."""
    everything = Placement.spread(config.own(Options).experts, 4 * config.width, copies=mesh.group.size())
    distribute(model, everything, mesh.group, NoDispatch(mesh.group.rank()), MixtureOfExperts)
    simulate_compute(model, everything, config)
    buckets = GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20)
    return Replica(model, config, buckets)


class NoDispatch:
    """Sends nothing: this rank has all experts, so its rows are only sorted by them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send_order(self, admitted: list[list[int]]) -> Tensor:
        """Keep the order of the rows."""
        return torch.arange(sum(admitted[self.rank]))

    def __call__(self, rows: Tensor, admitted: list[list[int]], compute: Compute) -> Tensor:
        """Let each expert compute the rows that chose it."""
        return compute(rows, admitted[self.rank])


# --- experts on ranks ---


def expert_parallel(model: MixtureModel, mesh: Mesh, config: Config, *, name: str) -> Strategy:
    """Some experts on each rank; tokens travel by our own all_to_all."""
    return expert_strategy(model, mesh, config, name, MixtureOfExperts, AllToAll)


def expert_strategy(
    model: MixtureModel, mesh: Mesh, config: Config, name: str, layer: Callable[..., nn.Module],
    swap: Callable[[dist.ProcessGroup], Swap],
) -> Strategy:  # fmt: skip
    """Each rank stores its part of the experts; tokens travel by `swap` among the ranks of one copy, and gradients of
    experts are summed over the copies."""
    world, placement = mesh.group, placements(config, mixing(config))[name]
    among, copies = world, None
    if placement.copies > 1:
        sizes = {"edp": placement.copies, "ep": placement.ranks_of_a_copy}
        grid = Mesh.grid(sizes, world, config.collective_timeout_s)
        among, copies = grid["ep"], grid["edp"]
    members = placement.members(world.rank())
    experts_by_rank = [placement.experts_of(member) for member in members]
    dispatch = Dispatch(experts_by_rank, members, members.index(world.rank()), swap(among))
    distribute(model, placement, world, dispatch, layer)
    simulate_compute(model, placement, config)
    return ExpertParallel(model, placement, world, config, copies)


GRID_VARIANTS = {  # variants that differ in the grid of the experts alone
    "ep": "Some experts on each rank; tokens travel among all ranks.",
    "ep_dp": "Several copies of the experts: tokens travel within a copy, gradients are summed over the copies.",
    "ep_tp": "Some hidden units of some experts on each rank: a row goes to all ranks with a part of its expert, and"
    " its own rank adds up their results.",
    "ep_dp_tp": "Several copies of the experts, each expert cut over ranks.",
}


def ep_torch(model: MixtureModel, mesh: Mesh, config: Config) -> Strategy:
    """ep with PyTorch's all_to_all_single."""
    return expert_strategy(model, mesh, config, "ep_torch", MixtureOfExperts, AllToAllSingle)


def plain(model: MixtureModel, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: ep with PyTorch's all_to_all_single."""
    return expert_strategy(model, mesh, config, "plain", LessonLayer, AllToAll)


class LessonLayer(lesson.MixtureOfExperts):
    """The lesson's layer, which appends what it routes to `seen`, where that is a list."""

    def __init__(self, router: Router, experts: Experts, rules: Mixing, world: dist.ProcessGroup, _: Dispatch) -> None:
        options = (rules.num_experts, rules.top_k, rules.capacity_factor, rules.balance, rules.z)
        super().__init__(router, experts, options, world)
        self.seen: list[Routed] | None = None

    def route(self, wanted_here: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        kept, admitted = super().route(wanted_here, scores)
        if self.seen is not None:
            self.seen.append(Routed(self.queue.transpose(0, 1).tolist(), admitted.tolist(), self.places))
        return kept, admitted


def simulate_compute(model: MixtureModel, placement: Placement, config: Config) -> None:
    """With LAB_ROW_US, let a rank's experts sleep for each row, so that two cores show the cost of imbalance on four
    ranks.

    Ranks that compute on shared cores take turns, so a step takes the sum of all ranks' compute, however it is shared
    out. Ranks that sleep do not take turns. LAB_ROW_US is the time of a row through a whole expert forward, twice that
    backward; a part of an expert sleeps for its share. The real experts still compute, and their time comes on top.
    """
    row_s = config.own(Options).row_us / 1e6 / len(placement.hidden) / config.slowed_to
    for mixture in model.mixtures.values() if row_s else ():
        mixture.compute = partial(compute_and_sleep, mixture.compute, row_s)


def compute_and_sleep(compute: Compute, row_s: float, rows: Tensor, counts: list[int]) -> Tensor:
    """Compute the rows, then sleep, in both passes."""
    forward_s = row_s * len(rows)
    computed: Tensor = Sleep.apply(compute(rows, counts), forward_s, (PASSES - 1) * forward_s)  # type: ignore[no-untyped-call]
    return computed


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove, measure, and draw who computed how much."""
    config, rules = lab.config, mixing(lab.config)
    lab.say(summary(config, rules), "predict")
    lab.note("holds", stored_experts(config, rules, lab.rank))
    routes = Routes()
    lab.mode = routes.watching(lab.mode)
    measured = measure(lab, also=partial(check_copies, lab), timed=routes.timed_steps_are_done)
    routes.all_is_done()
    check_capacity(lab, routes, rules)
    last = {
        name: by_step(notes, config.num_microbatches)[-1]
        for name, notes in routes.counted.items()
        if name in measured and notes
    }
    routed = {name: [each.admitted for each in layers] for name, layers in last.items()}
    placed = placements(config, rules)
    note_tokens(
        lab,
        {name: (last[name], placed[name].experts_of(lab.rank)) for name in last if name in placed},
    )
    predictions = predict(config, rules, routed)
    lab.compare_predictions(predictions, measured)
    draw(lab, routes, placed, rules)
    compare_pace(lab, routes, placed, config.own(Options).row_us / 1e6)


def summary(config: Config, rules: Mixing) -> str:
    tokens, itemsize = max(tokens_of(config)), config.itemsize
    places = expert_places(tokens, rules.top_k, rules.num_experts, rules.capacity_factor)
    bound = f"takes at most {places}" if rules.capacity_factor else "drops none"
    sent = even_row_bytes(config.world_size, tokens, rules.top_k, config.width, itemsize)
    return (
        f"{tokens} tokens that are routed together choose {rules.top_k} of {rules.num_experts} experts: with even"
        f" routing each is chosen {tokens * rules.top_k / rules.num_experts:.4g} times and {bound}; in ep a rank"
        f" then sends {sent / 1e6:.3g} MB of rows per layer"
    )


def stored_experts(config: Config, rules: Mixing, rank: int) -> str:
    """Describe the experts of a rank in `ep`, for its own log."""
    mine = placements(config, rules)["ep"].experts_of(rank)
    which = ", ".join(map(str, mine)) or "none"
    return f"with ep, {len(mine)} of {rules.num_experts} experts per layer: {which}"


def note_tokens(lab: Lab, last: Mapping[str, tuple[Sequence[Routed], range]]) -> None:
    """Log for the headline variant, of the last counted microbatch, the rows that this rank sent to each expert, the
    choices that were dropped, and the rows that its own experts took."""
    name = next((name for name in (lab.mode.headline[0], *last) if name in last), "")
    if not name:
        return
    layers, mine = last[name]
    admitted = [each.admitted for each in layers]
    sent = [sum(layer_rows[lab.rank][expert] for layer_rows in admitted) for expert in range(len(admitted[0][0]))]
    wanted = sum(sum(map(sum, each.wanted[lab.rank])) for each in layers)
    computed = [sum(rank_rows[expert] for layer_rows in admitted for rank_rows in layer_rows) for expert in mine]
    computed_text = f"{mine[0]}-{mine[-1]} took {' '.join(map(str, computed))}" if mine else "took none"
    sent_text = f"from me to experts 0-{len(sent) - 1}: {' '.join(map(str, sent))}, {wanted - sum(sent)} dropped"
    lab.note("tokens", f"{sent_text}; my experts {computed_text}")


def check_copies(lab: Lab, name: str, strategy: Strategy) -> None:
    """Check that copies of an expert are bitwise equal."""
    if not isinstance(strategy, ExpertParallel) or strategy.placement.copies == 1:
        return
    digests = lab.exchange.gather("copies", digest_of(strategy.parts.values()))
    if digests is None:
        return
    wanted = digests[: strategy.placement.ranks_of_a_copy] * strategy.placement.copies
    differing = sum(own != other for own, other in zip(digests, wanted, strict=True))
    lab.check("copies", differing, 0, name, "ranks whose experts differ from the first copy")


MODE = Mode(
    variants=(
        Variant("replicated", replicated, formerly="naive"),
        *(
            Variant(name, partial(expert_parallel, name=name), sentence=sentence)
            for name, sentence in GRID_VARIANTS.items()
        ),
        Variant("ep_torch", ep_torch, by_torch=True),
        Variant("plain", plain, by_name=True),
    ),
    headline=("ep", "send each token to the ranks of its experts, and receive the results"),
    run=run,
    claims=claims,
    batches=PartedBatches,
    model=lambda config, seed: build_mixture(config, seed, mixing(config)),
    more_parameters=lambda config: more_parameters(config, config.own(Options).experts),
    title=lambda config: outline_mixture(config, mixing(config)).describe(),
    options=Options,
    predict=lambda config: predict(config, mixing(config)),
    refuse=lambda config: refuse(config, config.own(Options).experts, config.own(Options).top_k),
    cannot=cannot,
    mistakes=mistake | checkpoints.mistake,
    gone={
        "lost_residual": "LAB_BUG=left_sorted fails the same check",
        "routers_apart": "LAB_BUG=experts_times_ep fails the same check",
        "late_sums": "all sums of experts begin after the backward pass now; see RUN_MODE=dp LAB_BUG=late_launch",
        "biased_gates": "no bias balances the choice any more; LAB_BUG=gate_over_itself has wrong gates too",
        "bias_apart": "no bias balances the choice any more; LAB_BUG=copies_apart lets ranks diverge too",
    },
    in_lesson={
        "gate_over_itself": ("keepdim=True) if self.top_k > 1 else gates", "keepdim=True)"),
        "local_capacity": ("self.capacity * int(queue.sum())", "self.capacity * int(chosen.sum())"),
    },
    reading=(
        "experiments/moe/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/moe/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/expert_parallel/layer.py: routing, rows to their experts and back, the layer itself",
        "distlab/techniques/expert_parallel/strategy.py: the step, and which gradients are summed over which ranks",
    ),
)
