"""The proof of `local_sgd` and `diloco`, whose workers train apart for H steps, a round.

What they compute is on purpose not what one process computes, but for H = 1. So they are proven twice: at H = 1
against one process with the whole batch, and at the H given, on one layer, against all workers in one process, written
down from the formula with nothing sent.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from workers.config import Config
from workers.contract import Build
from workers.lab import Lab
from workers.passes.replicas import check_replicas
from workers.workload.data import Batches, Microbatch
from workers.workload.model import Model, build_model
from workers.workload.optimizer import make_optimizer

TOLERANCE = 1e-12
LEARNING_RATE = 0.01
MOST_PROVEN = 12  # local steps of the proof: two rounds of them are run, whatever H is


class Rounds(NamedTuple):
    """Steps of a round, and learning rate and momentum of the outer step at its end."""

    local_steps: int
    lr: float
    momentum: float


def prove_rounds(lab: Lab, rounds: Rounds, name: str, build: Build) -> None:
    """Check the variant that `build` makes at H = 1 and at the H given."""
    plain = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
    check_against(lab, name, build, plain, rounds._replace(local_steps=1), workers=1)
    proven = rounds._replace(local_steps=min(rounds.local_steps, MOST_PROVEN))
    if proven.local_steps > 1:
        check_against(lab, name, build, shallow(plain), proven, workers=lab.world_size)
    if lab.config.optimizer == "adamw" or lab.config.clip is not None:
        tuned = shallow(lab.config)
        check_against(lab, name, build, tuned, proven, workers=lab.world_size, when=" as trained")


def shallow(config: Config) -> Config:
    """The same with one layer, for proofs in which one process does the work of all workers, and of many steps."""
    return config.model_copy(update={"depth": 1})


def model_of(lab: Lab, config: Config) -> Model:
    """The model of `config`, as a proof trains it."""
    return build_model(config, config.seed).to(lab.device, torch.float64)


def check_against(
    lab: Lab, name: str, build: Build, config: Config, rounds: Rounds, *, workers: int, when: str = ""
) -> None:  # fmt: skip
    """Losses and weights of two rounds against `workers` workers in one process; last, all ranks are equal."""
    config = config.with_own(local_steps=rounds.local_steps)
    when, steps = f" at H = {rounds.local_steps}{when}", 2 * rounds.local_steps
    batches = lab.batches(torch.float64, proof=True)
    wanted = (
        in_one_process(model_of(lab, config), batches, config, rounds, workers, steps)
        if lab.rank == 0
        else ([], torch.zeros(0))
    )
    strategy = build(model_of(lab, config), lab.mesh, config)
    losses = []
    for step in range(steps):
        lab.at(step, f"proof of {name}{when}")
        share = strategy.backward(lab.dealt(batches, step))
        assert share is not None
        losses.append(share.item())
        strategy.update()
        lab.stepped()
    everyone = lab.exchange.gather(f"losses of {name}", losses)
    weights = torch.cat([weight.flatten() for _, weight in strategy.full("weights")])
    if everyone is not None:
        summed = [sum(of_step) for of_step in zip(*everyone, strict=True)]
        worst = max(abs(one - other) for one, other in zip(summed, wanted[0], strict=True))
        lab.check(f"losses{when}", worst, TOLERANCE, variant=name)
        difference = (weights - wanted[1]).abs().max().item()
        lab.check(f"weights{when}", difference, TOLERANCE, variant=name)
    check_replicas(lab, name, strategy)


def in_one_process(
    model: Model, batches: Batches, config: Config, rounds: Rounds, workers: int, steps: int
) -> tuple[list[float], Tensor]:
    """`workers` workers one after the other, by the formula: the batch's loss at each step, the common weights [P]."""
    local_steps, lr, momentum = rounds
    names = [name for name, _ in model.named_parameters()]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    common, velocity = start, {name: torch.zeros_like(weight) for name, weight in start.items()}
    replicas = [Single(model, config) for _ in range(workers)]
    losses = []
    for step in range(steps):
        shards = [batches.dealt(step, worker, workers) for worker in range(workers)]
        losses.append(sum(replica.step(shard) for replica, shard in zip(replicas, shards, strict=True)))
        if (step + 1) % local_steps:
            continue
        samples = [replica.seen for replica in replicas]
        for name in names:
            moved = sum(
                number / sum(samples) * (common[name] - replica.weights[name])
                for number, replica in zip(samples, replicas, strict=True)
            )
            velocity[name] = momentum * velocity[name] + moved
            common = common | {name: common[name] - lr * (moved + momentum * velocity[name])}
        for replica in replicas:
            replica.begin_round(common)
    return losses, torch.cat([common[name].flatten() for name in names])


class Single:
    """One of several workers in one process: its own copy of the model, its optimizer, the samples seen this round."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model, self.config = copy.deepcopy(model), config
        self.model.recompute = False
        self.optimizer = make_optimizer(self.model.parameters(), config)
        self.seen = 0

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self, shard: list[Microbatch]) -> float:
        """A step on the mean over `shard`; returns its share of the batch's loss."""
        terms = sum(part.targets.numel() for part in shard)
        self.optimizer.zero_grad()
        total = torch.stack([self.model(part.inputs, part.targets) for part in shard]).sum()
        (total / terms).backward()
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.seen += len(torch.cat([part.inputs for part in shard]))
        return total.item() * shard[0].share

    def begin_round(self, common: dict[str, Tensor]) -> None:
        """Go on from the common weights."""
        self.seen = 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(common[name])
