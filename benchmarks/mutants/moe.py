"""Experts on ranks: queues, places, the way of rows there and back, balance, and whose gradients are summed."""

from benchmarks.mutants import Mutant

RUN = "RUN_MODE=moe LAB_MODEL=mlp LAB_BATCH=25 LAB_EXPERTS=5 LAB_VARIANT="
MESH = "WORLD_SIZE=4 " + RUN
ROUTING = DISPATCH = EXPERTS = "distlab/expert_parallel/layer.py"
STRATEGY = "distlab/expert_parallel/strategy.py"

MUTANTS = [
    Mutant(ROUTING, "in_turn = table.transpose(0, 1)", "in_turn = table.transpose(0, 1).flip(1)", RUN + "ep"),
    Mutant(ROUTING, "place[by_expert] < places", "place[by_expert] <= places", RUN + "ep"),
    Mutant(
        ROUTING,
        "place += queued(table)[rank].flatten()[parts]",
        "place += queued(table)[0].flatten()[parts]",
        RUN + "ep",
    ),
    Mutant(ROUTING, "math.ceil(factor * top_k", "math.floor(factor * top_k", RUN + "ep"),
    Mutant(ROUTING, "if top_k > 1 else gates", "if top_k > 2 else gates", RUN + "replicated"),
    Mutant(
        ROUTING,
        "wanted = table.sum((0, 1)).to(probabilities.dtype)",
        "wanted = table[:, 0].sum(0).to(probabilities.dtype)",
        RUN + "ep",
    ),
    Mutant(ROUTING, "(wanted.mean() - wanted)", "(wanted - wanted.mean())", "LAB_BALANCE=bias " + RUN + "ep"),
    Mutant(ROUTING, "scores.logsumexp(-1).square().sum()", "scores.logsumexp(-1).square().mean()", RUN + "ep"),
    Mutant(
        DISPATCH,
        "lambda x: self.swap(x, give, take), lambda x: self.swap(x, take, give))\n        mine",
        "lambda x: self.swap(x, give, take), lambda x: 2 * self.swap(x, take, give))\n        mine",
        RUN + "ep",
    ),
    Mutant(
        DISPATCH,
        "order = expert_of.argsort(stable=True)",
        "order = expert_of.argsort(stable=True, descending=True)",
        RUN + "ep",
    ),
    Mutant(DISPATCH, "return done[order.argsort()]", "return done[order]", RUN + "ep"),
    Mutant(EXPERTS, "token = leaving % len(tokens)", "token = leaving // self.rules.top_k", RUN + "ep"),
    Mutant(EXPERTS, "num_tokens = int(table[:, 0].sum())", "num_tokens = int(table.sum())", RUN + "ep"),
    Mutant(
        EXPERTS,
        "gates = choices.gates.flatten()[leaving]",
        "gates = choices.gates.detach().flatten()[leaving]",
        RUN + "ep",
    ),
    Mutant(
        STRATEGY,
        "if name in self.parts and tensor.dim() else rank == 0",
        "if name in self.parts and tensor.dim() else True",
        "LAB_CLIP=0.05 " + RUN + "ep",
    ),
    Mutant(STRATEGY, "return rank < self.placement.ranks_of_a_copy", "return True", "LAB_CLIP=0.05 " + MESH + "ep_dp"),
    Mutant(
        DISPATCH,
        "rank % self.ranks_of_a_copy // len(self.hidden)",
        "rank % len(self.experts)",
        MESH + "ep_tp",
    ),
]
