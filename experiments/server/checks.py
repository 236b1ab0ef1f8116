"""The proofs of the server mode, and one process that computes the same: pushes in a drawn order, and rounds.

The process shares only the model, the data and the rule for distributing samples with the workers; the tests compare
these with their definition. So a worker that takes another's shard, weights a loss twice or pushes N times differs from
it:

    gradient  sum over a shard's loss terms / terms of the whole batch
    push      of n steps: sum of n gradients, each at weights that include the earlier ones (Dean et al. 2012,
              algorithm 7.1)

`downpour`: asynchrony only changes the weights at which a gradient is computed and the updates in between, and both
follow from the order in which workers start and push. So LAB_SEED draws an order: workers compute in parallel, the
server takes their messages in that order, and the process follows event by event, with its own weights that only its
own gradients change. Every push and the final weights must be equal.

`local_sgd` and `diloco`: for H > 1 their result differs from one process's by design. So they are proven twice: at H =
1 against one process with the whole batch, and at the given H, on one layer, against all workers in one process. The
first rounds of the timed pass are compared with the same process in LAB_DTYPE.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from distlab.contract import Build
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import digest_of, larger, largest_difference
from distlab.lab.verify.proof import TOLERANCE, check_replicas, summed_losses
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import Model, build_model
from distlab.lab.workload.reference import LEARNING_RATE, OneProcess, gradients, plain
from distlab.techniques.parameter_server.server import (
    PUSH,
    START,
    Client,
    Event,
    Link,
    Local,
    Ordered,
    ParameterServer,
    Recorder,
    Remote,
    Server,
    Threads,
    Worker,
    draw_order,
)

from .options import Options
from .predictions import DOWNPOUR, MOST_PROVEN

# Learning rate and momentum of the outer step: averaging (Stich 2019, algorithm 1), and Nesterov's with the paper's
# values (Douillard et al. 2023, section 3.1). Repeated here, since the proof takes the variants' own numbers.
PUBLISHED = {"local_sgd": (1.0, 0.0), "diloco": (0.7, 0.9)}
PUSHES = 2  # per worker in the drawn order, on average
MAX_STEPS_PER_PUSH = 4  # steps between a fetch and its push in that order


class Workers(OneProcess):
    """The dense `model`, owned by this object, and the samples of all workers of `config`."""

    def __init__(self, model: Model, config: Config, batches: Batches) -> None:
        super().__init__(model, config)
        self.batches, self.parameters = batches, self.trained

    def dealt(self, step: int, rank: int) -> tuple[list[Microbatch], float]:
        """Return the samples of `rank` at `step`, and its share of the batch's loss terms."""
        parts = self.batches.microbatches(step, rank, self.config.world_size)
        return parts, sum(part.share * part.targets.numel() for part in parts)

    def push(self, weights: Tensor, first_step: int, steps: int, rank: int) -> tuple[Tensor, float]:
        """Return `rank`'s expected push after `steps` steps from `weights` [P]: update [P] and mean loss."""
        weights = weights.to(self.parameters[0].device)
        update, losses = torch.zeros_like(weights), 0.0
        for step in range(first_step, first_step + steps):
            vector_to_parameters(weights.clone(), self.parameters)
            parts, share = self.dealt(step, rank)
            loss, found = gradients(self.model, parts)
            gradient = parameters_to_vector(found)
            update, weights, losses = update + gradient, weights - LEARNING_RATE * gradient, losses + loss / share
        return update.cpu(), losses / steps

    def digest(self, first_step: int, steps: int, rank: int) -> str:
        parts = [part for step in range(first_step, first_step + steps) for part in self.dealt(step, rank)[0]]
        return digest_of(tensor for part in parts for tensor in part[:2])


def shallow(config: Config) -> Config:
    """Return the same with one layer, for proofs where one process does the work of all workers and many steps."""
    return config.model_copy(update={"depth": 1})


def model_of(lab: Lab, config: Config) -> Model:
    return build_model(config, config.seed).to(lab.device, torch.float64)


# --- checks from a server's events ---


class Audit(NamedTuple):
    lead: int  # the largest lead in finished steps over the slowest worker at a start
    staleness: list[int]  # of each push: updates of others since the worker's fetch
    steps: dict[int, list[int]]  # of each worker's pushes
    granted: int  # steps that the server granted to all
    wrong_numbers: int  # pushes that are not their worker's next
    versions: dict[int, list[tuple[int, int]]]  # of each worker's pushes: the updates before its fetch, and before it


def audit(seen: Iterable[Event], workers: Iterable[int]) -> Audit:
    """Evaluate the events of `workers` from the first on."""
    clocks = dict.fromkeys(workers, 0)
    steps: dict[int, list[int]] = {worker: [] for worker in clocks}
    staleness: list[int] = []
    versions: dict[int, list[tuple[int, int]]] = {worker: [] for worker in clocks}
    lead, granted, wrong_numbers, fetched_at = 0, 0, 0, {}
    for event in seen:
        worker = event.worker
        if event.kind == START:
            lead = max(lead, clocks[worker] - min(clocks.values()))
            fetched_at[worker] = len(staleness)
            granted += event.steps
        elif event.kind == PUSH:
            versions[worker].append((fetched_at[worker], len(staleness)))
            staleness.append(len(staleness) - fetched_at[worker])
            steps[worker].append(event.steps)
            wrong_numbers += event.number != len(steps[worker])
            clocks[worker] += event.steps
        else:
            del clocks[worker]
    return Audit(lead, staleness, steps, granted, wrong_numbers, versions)


# --- pushes in a drawn order ---


class Replay(Recorder):
    """A recorder at a server that computes every push itself, and compares it with the received one."""

    def __init__(self, one: Workers, weights: Tensor, workers: int) -> None:
        super().__init__(range(workers))
        self.one, self.weights = one, weights.clone()
        self.gradients = self.losses = 0.0  # the largest differences
        self._began: dict[int, Tensor] = {}

    def started(self, worker: int, steps: int) -> None:
        super().started(worker, steps)
        self._began[worker] = self.weights

    def pushed(self, worker: int, number: int, update: Tensor, loss: float) -> None:
        first_step = self.finished[worker]
        super().pushed(worker, number, update, loss)
        steps = self.finished[worker] - first_step
        own, own_loss = self.one.push(self._began.pop(worker), first_step, steps, worker)
        self.gradients = larger(self.gradients, largest_difference(own, update))
        self.losses = larger(self.losses, abs(own_loss - loss))
        self.weights = self.weights - LEARNING_RATE * own


def prove_asynchronous(
    lab: Lab, links: dict[int, Link], kind: type[ParameterServer], make_worker: type[Worker]
) -> None:
    """Run in a drawn order under rules of `kind`, with one process on rank 0 that follows it."""
    name, own = DOWNPOUR, lab.config.own(Options)
    lab.at(0, f"proof of {name}")
    most = min(own.local_steps, MAX_STEPS_PER_PUSH)
    budget, ranks = PUSHES * most * lab.world_size, range(lab.world_size)
    rules = ParameterServer(torch.zeros(1), ranks, lr=0.0, budget=budget, staleness=own.staleness)
    order = draw_order(lab.config.seed, rules, most)
    config, batches = shallow(lab.config), lab.batches(torch.float64, proof=True)
    worker = make_worker(model_of(lab, config), config, batches, lab.rank, LEARNING_RATE)
    client: Client
    if lab.rank == 0:
        start = worker.vectors.weights.cpu()
        replay = Replay(Workers(model_of(lab, config), config, batches), start, lab.world_size)
        ordered_rules = type("InOrder", (Ordered, kind), {})
        ordered = ordered_rules(order, start.clone(), ranks, lr=LEARNING_RATE, budget=budget)
        server = Server(ordered, lab.config.collective_timeout_s, replay)
        threads = Threads(server, links)
        client = Local(server, 0)
    else:
        client = Remote(links[lab.rank], worker.vectors.weights)
    worker.train(client, most)
    lab.stepped()
    samples = lab.exchange.gather(f"samples of {name}", worker.samples)
    if samples is not None:
        threads.join()
        for check, off in differences(replay, ordered.weights, samples).items():
            lab.check(check, off, 0 if check == "samples" else TOLERANCE, name)
        wrong = misordered(replay.seen, order, lab.world_size, own.staleness)
        detail = f"{len(order)} events; difference: those in another place than drawn, or before the bound allows"
        lab.check("order of events", wrong, 0, name, detail)
    lab.exchange.barrier(f"proof of {name}")


def differences(replay: Replay, weights: Tensor, samples: list[list[str]]) -> dict[str, float]:
    """Return the differences between the run and the process, by check; `weights` are the server's final ones,
    `samples` the digests of each rank's pushes."""
    wrong_samples = 0
    for rank, steps in audit(replay.seen, range(len(samples))).steps.items():
        wanted = [replay.one.digest(sum(steps[:index]), number, rank) for index, number in enumerate(steps)]
        wrong_samples += count_differences(wanted, samples[rank])
    off = largest_difference(weights, replay.weights)
    return {"losses": replay.losses, "gradients": replay.gradients, "weights": off, "samples": wrong_samples}


def misordered(seen: list[Event], order: list[tuple[str, int]], workers: int, staleness: int | None) -> int:
    """Count events in another place than in `order`, and steps by which a start exceeded the staleness bound."""
    lead = audit(seen, range(workers)).lead
    beyond = 0 if staleness is None else max(0, lead - staleness)
    return count_differences([(event.kind, event.worker) for event in seen], order) + beyond


def count_differences(found: Sequence[object], wanted: Sequence[object]) -> int:
    """Count the positions where two lists differ, and those that only one of them has."""
    return sum(own != other for own, other in zip_longest(found, wanted))


# --- rounds ---


class Rounds(NamedTuple):
    """Steps of a round, and learning rate and momentum of the outer step at its end."""

    local_steps: int
    lr: float
    momentum: float


def prove_rounds(lab: Lab, rounds: Rounds, name: str, build: Build) -> None:
    """Check the variant that `build` makes at H = 1 and at the given H."""
    config = plain(lab.config)
    check_outer(lab, name, build, config)
    check_against(lab, name, build, config, rounds._replace(local_steps=1), workers=1)
    proven = rounds._replace(local_steps=min(rounds.local_steps, MOST_PROVEN))
    if proven.local_steps > 1:
        check_against(lab, name, build, shallow(config), proven, workers=lab.world_size)
    if lab.config.optimizer == "adamw" or lab.config.clip is not None:
        tuned = shallow(lab.config)
        check_against(lab, name, build, tuned, proven, workers=lab.world_size, when=" as trained")


def check_outer(lab: Lab, name: str, build: Build, config: Config) -> None:
    """Check two outer steps after rounds where every worker moved by one: lr·(1 + m) and lr·(1 + m + m²)."""
    config = shallow(config.with_own(local_steps=1))
    strategy = build(model_of(lab, config), lab.mesh, config)
    weights, (lr, momentum) = strategy.vectors.weights, PUBLISHED[name]  # type: ignore[attr-defined]
    off = 0.0
    for right in (lr * (1 + momentum), lr * (1 + momentum + momentum**2)):
        before = weights.clone()
        weights.sub_(1.0)
        strategy.outer.step(1 / lab.world_size)  # type: ignore[attr-defined]
        off = larger(off, (before - weights - right).abs().max().item())
    detail = f"of two steps of learning rate {lr:g} and momentum {momentum:g}, as published"
    lab.check("outer step", off, TOLERANCE, name, detail)


def check_against(
    lab: Lab, name: str, build: Build, config: Config, rounds: Rounds, *, workers: int, when: str = ""
) -> None:  # fmt: skip
    """Compare losses and weights of two rounds with `workers` workers in one process; and all ranks at the end."""
    config = config.with_own(local_steps=rounds.local_steps)
    when, steps = f" at H = {rounds.local_steps}{when}", 2 * rounds.local_steps
    batches = lab.batches(torch.float64, proof=True)
    lab.at(0, f"one process, beside {name}{when}")
    losses, weights = list[float](), torch.zeros(0)
    if lab.rank == 0:
        config_of_workers = config.model_copy(update={"world_size": workers})
        losses, weights = run_in_one_process(Workers(model_of(lab, config), config_of_workers, batches), rounds, steps)
    strategy = build(model_of(lab, config), lab.mesh, config)
    losses_here: list[float | None] = []
    for step in range(steps):
        lab.at(step, f"proof of {name}{when}")
        share = strategy.backward(lab.microbatches(batches, step))
        losses_here.append(None if share is None else share.item())
        strategy.update()
        lab.stepped()
    found = summed_losses(lab, losses_here)
    if lab.rank == 0:
        worst = max(abs(one - other) for one, other in zip(found, losses, strict=True))
        difference = largest_difference(parameters_to_vector(weight for _, weight in strategy.full("weights")), weights)
        for check, off in (("losses", worst), ("weights", difference)):
            lab.check(f"{check}{when}", off, TOLERANCE, name)
    check_replicas(lab, name, strategy)


def run_in_one_process(one: Workers, rounds: Rounds, steps: int) -> tuple[list[float], Tensor]:
    """Run all workers of `one`, one after the other; return the batch's loss at each step, and the final weights [P].

    Rounds follow local SGD (Stich 2019, algorithm 1) and DiLoCo (Douillard et al. 2023, algorithm 1): every worker
    continues from the common weights; their mean weight change over samples is the outer gradient. An incomplete last
    round changes only its workers' weights.
    """
    local_steps, lr, momentum = rounds
    workers = [OneProcess(one.model, one.config) for _ in range(one.config.world_size)]  # each with its own state
    common = parameters_to_vector(one.parameters).detach()
    velocity, losses = torch.zeros_like(common), [0.0] * steps
    for begin in range(0, steps, local_steps):
        moved, samples = torch.zeros_like(common), 0.0
        for rank, worker in enumerate(workers):
            vector_to_parameters(common.clone(), one.parameters)
            seen = 0.0
            for step in range(begin, min(begin + local_steps, steps)):
                parts, share = one.dealt(step, rank)
                losses[step] += share * worker.step([part._replace(share=part.share / share) for part in parts])
                seen += share
            moved += seen * (common - parameters_to_vector(one.parameters).detach())
            samples += seen
        if begin + local_steps > steps:
            break
        moved /= samples
        velocity = momentum * velocity + moved
        common = common - lr * (moved + momentum * velocity)
    return losses, common


def check_timed(lab: Lab, rounds: dict[str, Rounds]) -> None:
    """Compare the timed pass's losses up to the step that uses the second outer step (the first, without momentum) with
    all workers in one process."""
    lab.at(0, "one process, in rounds")
    config, dtype, found = lab.config, getattr(torch, lab.config.dtype), lab.losses()
    for name in (name for name in rounds if name in found and config.proof):
        steps = min(config.steps, rounds[name].local_steps * (2 if rounds[name].momentum else 1) + 1)
        one = Workers(lab.model(dtype), config, lab.batches(dtype))
        wanted, _ = run_in_one_process(one, rounds[name], steps)
        worst = 0.0
        for own, other in zip(wanted, found[name], strict=False):
            worst = larger(worst, abs(own - other))
        tolerance = max(wanted) * loss_rounding(dtype, config, steps, config.batch * one.batches.samples.terms)
        detail = f"steps 0 to {steps - 1} of {config.steps}, compared with {lab.world_size} workers in one process"
        lab.check("timed losses", worst, tolerance, name, detail)
    lab.exchange.barrier("rounds in one process")


def loss_rounding(dtype: torch.dtype, config: Config, steps: int, terms: int) -> float:
    """Return the relative error that rounding may cause between two losses of the same mean.

    The terms are summed in float32 or finer in another order: half an eps per level of a tree, twice. The passes in
    `dtype` have about 20 results per layer whose roundings are independent, also between steps and terms: the root of
    their number, divided by that of the terms.
    """
    summing = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (1 + math.log2(terms))
    passes = torch.finfo(dtype).eps / 2 * math.sqrt(20 * (config.depth + 2) * steps / terms)
    return summing + passes
