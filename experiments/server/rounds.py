"""Local steps and rounds: `local_sgd` and `diloco` as strategies, and their proof.

What they compute is on purpose not what one process computes, but for H = 1. So they are proven twice: at H = 1 against one process
with the whole batch, and at the H given, on one layer, against all workers in one process, written down from the formula with
nothing sent.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.server.synchronous import Alone
from workers.config import Config
from workers.lab import Lab, Variant
from workers.parallel.local_sgd import OuterStep
from workers.parallel.vectors import Vectors
from workers.passes.replicas import check_replicas
from workers.strategies.replica import Replica
from workers.workload.data import Batches, Microbatch
from workers.workload.model import Model, build_model
from workers.workload.optimizer import make_optimizer

TOLERANCE = 1e-12
LEARNING_RATE = 0.01
MOST_PROVEN = 12  # local steps of the proof: two rounds of them are run, whatever H is

Outer = tuple[float, float]  # learning rate and momentum of the outer step


class Apart(Replica):
    """A Strategy: a worker that steps by its own gradients, with an optimizer of its own, and now and then meets the others."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config, lr: float, momentum: float) -> None:
        self.vectors = Vectors(model.parameters())
        super().__init__(model, config, Alone(self.vectors))
        self.outer = OuterStep(self.vectors.weights, group, config.local_steps, lr=lr, momentum=momentum)
        self.repeats_after = config.local_steps  # steps, the last of which makes a call
        self.share = 0.0

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """The gradient of the mean over this worker's own samples; the loss returned is its share of the batch's."""
        self.share = sum(part.share * part.targets.numel() for part in microbatches)
        self.scale = 1 / self.share
        return super().backward(microbatches)

    def update(self) -> None:
        """A step of its own; every H-th time the outer step."""
        super().update()
        self.outer.step(self.share)


def prove_rounds(lab: Lab, name: str, outer: Outer, build: Variant) -> None:
    """Check the variant that `build` makes at H = 1 and at the H given."""
    plain = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
    check_against(lab, name, build, with_steps(plain, 1), outer, workers=1)
    local_steps = min(lab.config.local_steps, MOST_PROVEN)
    if local_steps > 1:
        check_against(lab, name, build, with_steps(shallow(plain), local_steps), outer, workers=lab.world_size)
    if lab.config.optimizer == "adamw" or lab.config.clip is not None:
        tuned = with_steps(shallow(lab.config), local_steps)
        check_against(lab, name, build, tuned, outer, workers=lab.world_size, when=" as trained")


def with_steps(config: Config, local_steps: int) -> Config:
    """The same with another H."""
    return config.model_copy(update={"local_steps": local_steps})


def shallow(config: Config) -> Config:
    """The same with one layer, for proofs in which one process does the work of all workers, and of many steps."""
    return config.model_copy(update={"depth": 1})


def model_of(lab: Lab, config: Config) -> Model:
    """The model of `config`, as a proof trains it."""
    return build_model(config, config.seed).to(lab.device, torch.float64)


def check_against(
    lab: Lab, name: str, build: Variant, config: Config, outer: Outer, *, workers: int, when: str = ""
) -> None:  # fmt: skip
    """Losses and weights of two rounds on all ranks, against `workers` workers in one process on rank 0; last all ranks are equal."""
    when, steps = f" at H = {config.local_steps}{when}", 2 * config.local_steps
    batches = lab.batches(torch.float64, proof=True)
    wanted = (
        in_one_process(model_of(lab, config), batches, config, outer, workers, steps)
        if lab.rank == 0
        else ([], torch.zeros(0))
    )
    strategy = build(model_of(lab, config), lab.group, config)
    losses = []
    for step in range(steps):
        lab.at(step, f"proof of {name}{when}")
        share = strategy.backward(batches.dealt(step, lab.rank, lab.world_size))
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
    model: Model, batches: Batches, config: Config, outer: Outer, workers: int, steps: int
) -> tuple[list[float], Tensor]:
    """`workers` workers one after the other, from the formula: the batch's loss at each step, and the common weights [P]."""
    lr, momentum = outer
    names = [name for name, _ in model.named_parameters()]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    common, velocity = start, {name: torch.zeros_like(weight) for name, weight in start.items()}
    replicas = [Single(model, config) for _ in range(workers)]
    losses = []
    for step in range(steps):
        shards = [batches.dealt(step, worker, workers) for worker in range(workers)]
        losses.append(sum(replica.step(shard) for replica, shard in zip(replicas, shards, strict=True)))
        if (step + 1) % config.local_steps:
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
    """One of several workers in one process: its own copy of the model, its optimizer, and the samples seen this round."""

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
