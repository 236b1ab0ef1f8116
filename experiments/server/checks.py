"""What is proven here, and one process that computes it: asynchronous pushes in a drawn order, and rounds.

The process shares nothing with the workers but the model's layers, the bytes of the text and the sentence that says how
a batch is dealt; so a worker that takes another's shard, weighs a loss twice or pushes N times differs from it:

    epoch     a permutation of the samples, of the seed 1000003·LAB_SEED + epoch; step s takes the next B of it
    shard     B divided by N, the first ones larger; where a proof or `line` asks for it, rank 1 gives up to two away
    gradient  sum over a shard's loss terms / terms of the whole batch, one backward pass
    push      of n steps: sum of n gradients, each at weights that the ones before have moved (Dean et al. 2012,
              algorithm 7.1)

`ssp` and `downpour`: which weights a gradient was computed at, and which updates came between, is all that asynchrony
adds to SGD, and both follow from the order in which workers start and push. So the order is drawn by LAB_SEED: workers
compute where they are, the server takes their messages in that order, and the process goes along, event by event, with
weights of its own that only its own gradients move. Every push and the weights at the end must be its own.

`local_sgd` and `diloco`: what their workers compute is on purpose not what one process computes, but for H = 1. So they
are proven twice: at H = 1 against one process with the whole batch, and at the H given, on one layer, against all
workers in one process. The first rounds of the timed pass are held against the same process in LAB_DTYPE.
"""

import hashlib
import math
import random
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from distlab.config import Config
from distlab.contract import Build
from distlab.lab import Lab
from distlab.measure.tensors import larger
from distlab.parameter_server.server import (
    Client,
    Link,
    Local,
    Ordered,
    ParameterServer,
    Remote,
    Server,
    Threads,
    draw_order,
)
from distlab.verify.proof import check_replicas
from distlab.workload import data
from distlab.workload.data import OWN_BATCHES, UserBatches
from distlab.workload.model import Model, build_model
from distlab.workload.user_model import is_own, reads_text

from .worker import Recorder, Scheme, Worker, audit

MOST_BATCHES = {"line": 1, "mlp": 8, "gpt": 1024}  # of an epoch; a proof has two
TOLERANCE = 1e-12
LEARNING_RATE = 0.01
# Learning rate and momentum of the outer step: the mean (Stich 2019, algorithm 1), and Nesterov's with the paper's own
# (Douillard et al. 2023, section 3.1). Written down once more, since what is proven takes the variants' own numbers.
PUBLISHED = {"local_sgd": (1.0, 0.0), "diloco": (0.7, 0.9)}
PUSHES = 2  # of a worker in the drawn order, in the mean
MOST_AT_ONCE = 4  # steps between a fetch and its push there
MOST_PROVEN = 12  # local steps of a proven round: two rounds of them are run, whatever H is
ASYNCHRONOUS = "tests/experiments/test_server_asynchronous.py::{}"
ROUNDS = "tests/experiments/test_server.py::{}"


class OneProcess:
    """The dense `model`, which becomes this object's own, and every worker's samples."""

    def __init__(self, model: Model, config: Config, *, proof: bool, device: torch.device, dtype: torch.dtype) -> None:
        model.recompute = False
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        from_text = reads_text(config.model)
        num_own = 2 if proof else OWN_BATCHES
        self.own = UserBatches(config.model, config.seed, num_own) if is_own(config.model) and not from_text else None
        known = {"line": 1, "mlp": config.width}
        self.terms = self.own.terms if self.own else known.get(config.model, config.seq)
        self.shards = list(pairwise(cuts(config.batch, config.world_size, uneven=proof or config.model == "line")))
        self.text = torch.frombuffer(bytearray(data.read_text(config)), dtype=torch.uint8) if from_text else None
        many = OWN_BATCHES if self.own else MOST_BATCHES.get(config.model, MOST_BATCHES["gpt"])
        most = 2 if proof and config.model != "line" else many
        whole = (len(self.text) - 1) // config.seq // config.batch if self.text is not None else most
        self.num_batches = most if proof else max(1, min(whole, most))
        if self.text is None and self.own is None:
            self.points = points(config.seed, self.num_batches * config.batch, self.terms)
        self._epoch, self._order = -1, torch.zeros(0)

    def samples(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all that `rank` trains on at `step`, one after the other."""
        begin, end = self.shards[rank]
        ids = self.order(step)[begin:end]
        if self.own is not None:
            inputs, targets = self.own.take(ids)
            return inputs.to(self.device, self.dtype if inputs.is_floating_point() else None), targets.to(
                self.device, self.dtype if targets.is_floating_point() else None
            )
        if self.text is None:
            x, y = self.points[ids].to(self.device, self.dtype).unbind(-1)  # [B/N, terms] each
            return x, y
        starts = [index * self.config.seq % (len(self.text) - self.config.seq) for index in ids.tolist()]
        windows = torch.stack([self.text[start : start + self.config.seq + 1] for start in starts])
        windows = windows.to(self.device, torch.int64)
        return windows[:, :-1], windows[:, 1:]

    def order(self, step: int) -> Tensor:
        """The numbers of the samples of the batch of `step`."""
        size = self.config.batch
        if self.config.model == "line":
            return torch.arange(size)
        epoch, index = step // self.num_batches, step % self.num_batches
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.num_batches * size, generator=generator)
        return self._order[index * size : index * size + size]

    def gradient(self, weights: Tensor, step: int, rank: int) -> tuple[Tensor, float]:
        """Of `rank`'s samples at `step`, at `weights` [P]: their gradient [P] and mean loss."""
        inputs, targets = self.samples(step, rank)
        parameters = list(self.model.parameters())
        vector_to_parameters(weights.clone(), parameters)
        total = self.model(inputs, targets)
        loss = total / (self.config.batch * self.terms)
        gradient = parameters_to_vector(torch.autograd.grad(loss, parameters))
        return gradient, total.item() / targets.numel()

    def push(self, weights: Tensor, first_step: int, steps: int, rank: int, lr: float) -> tuple[Tensor, float]:
        """What `rank` should push that has taken `weights` [P] for `steps` steps; the update [P], and the mean loss."""
        weights = weights.to(self.device)
        update, losses = torch.zeros_like(weights), 0.0
        for step in range(first_step, first_step + steps):
            gradient, loss = self.gradient(weights, step, rank)
            update, weights, losses = update + gradient, weights - lr * gradient, losses + loss
        return update.cpu(), losses / steps

    def digest(self, first_step: int, steps: int, rank: int) -> str:
        """Of the samples of `steps` steps of `rank`: first the inputs and then the targets of each sample in turn."""
        found = hashlib.blake2b(digest_size=8)
        for step in range(first_step, first_step + steps):
            for sample in zip(*self.samples(step, rank), strict=True):
                for tensor in sample:
                    found.update(tensor.cpu().double().numpy().tobytes())
        return found.hexdigest()


def cuts(batch: int, workers: int, *, uneven: bool) -> list[int]:
    """Where the shards of a batch begin, and where the last one ends."""
    sizes = [(batch - rank + workers - 1) // workers for rank in range(workers)]
    if uneven and workers > 1 and batch % workers == 0:
        others = [rank for rank in reversed(range(workers)) if rank != 1]
        for taker in (others * 2)[: min(2, sizes[1] - 1)]:
            sizes[1], sizes[taker] = sizes[1] - 1, sizes[taker] + 1
    return [sum(sizes[:rank]) for rank in range(workers + 1)]


def points(seed: int, num_samples: int, terms: int) -> Tensor:
    """y = 2x + 1 and noise of 0.1, x uniform in (-1, 1): [samples, terms, 2]."""
    draw = random.Random(seed)
    values = []
    for _ in range(num_samples * terms):
        x = draw.uniform(-1.0, 1.0)
        values.append([x, 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)])
    return torch.tensor(values, dtype=torch.float64).reshape(num_samples, terms, 2)


def shallow(config: Config) -> Config:
    """The same with one layer, for proofs in which one process does the work of all workers, and of many steps."""
    return config.model_copy(update={"depth": 1})


def model_of(lab: Lab, config: Config) -> Model:
    """The model of `config`, as a proof trains it."""
    return build_model(config, config.seed).to(lab.device, torch.float64)


# --- pushes in a drawn order ---


class Replay(Recorder):
    """A recorder at a server that computes every push itself, and compares what arrives."""

    def __init__(self, one: OneProcess, weights: Tensor, workers: int) -> None:
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
        own, own_loss = self.one.push(self._began.pop(worker), first_step, steps, worker, LEARNING_RATE)
        self.gradients = larger(self.gradients, (own - update).abs().max().item())
        self.losses = larger(self.losses, abs(own_loss - loss))
        self.weights = self.weights - LEARNING_RATE * own


def prove_asynchronous(
    lab: Lab, links: dict[int, Link], scheme: Scheme, kind: type[ParameterServer], make_worker: type[Worker]
) -> None:
    """Run a scheme in a drawn order under rules of `kind`, with one process that goes along on rank 0."""
    lab.at(0, f"proof of {scheme.name}")
    most = min(scheme.most, MOST_AT_ONCE)
    budget, ranks = PUSHES * most * lab.world_size, range(lab.world_size)
    rules = ParameterServer(torch.zeros(1), ranks, lr=0.0, budget=budget, staleness=scheme.staleness)
    order = draw_order(lab.config.seed, rules, most)
    config, batches = shallow(lab.config), lab.batches(torch.float64, proof=True)
    worker = make_worker(model_of(lab, config), config, batches, lab.rank, LEARNING_RATE)
    client: Client
    if lab.rank == 0:
        start = worker.vectors.weights.cpu()
        one = OneProcess(model_of(lab, config), config, proof=True, device=lab.device, dtype=torch.float64)
        replay, in_order = Replay(one, start, lab.world_size), type("InOrder", (Ordered, kind), {})
        ordered = in_order(order, start.clone(), ranks, lr=LEARNING_RATE, budget=budget)
        server = Server(ordered, lab.config.collective_timeout_s, replay)
        threads = Threads(server, links)
        client = Local(server, 0)
    else:
        client = Remote(links[lab.rank], worker.vectors.weights)
    worker.train(client, most)
    lab.stepped()
    samples = lab.exchange.gather(f"samples of {scheme.name}", worker.samples)
    if samples is not None:
        threads.join()
        control = ASYNCHRONOUS.format("test_a_wrong_worker_fails_by_name")
        for name, off in differences(replay, ordered.weights, samples).items():
            lab.check(name, off, 0 if name == "samples" else TOLERANCE, variant=scheme.name, control=control)
        wrong, control = (
            misordered(replay, order, scheme.staleness),
            ASYNCHRONOUS.format("test_another_order_than_the_drawn_one_fails_by_name"),
        )
        detail = f"{len(order)} events; difference: those that came elsewhere than drawn, or before the bound allows"
        lab.check("order of events", wrong, 0, variant=scheme.name, detail=detail, control=control)
    lab.exchange.barrier(f"proof of {scheme.name}")


def differences(replay: Replay, weights: Tensor, samples: list[list[str]]) -> dict[str, float]:
    """How far the run is from the process that went along, by check; `weights` are the server's at the end, `samples`
    the digests of each rank's pushes."""
    steps = audit(replay.seen, range(len(samples))).steps
    dealt = sum(misdealt(replay.one, rank, steps[rank], of_rank) for rank, of_rank in enumerate(samples))
    off = (weights - replay.weights).abs().max().item()
    return {"losses": replay.losses, "gradients": replay.gradients, "weights": off, "samples": dealt}


def misdealt(one: OneProcess, rank: int, steps: list[int], samples: list[str]) -> int:
    """Pushes of `rank`, of some steps each, that are not of the samples that `one` deals."""
    wanted = [one.digest(sum(steps[:index]), number, rank) for index, number in enumerate(steps)]
    return sum(a != b for a, b in zip(wanted, samples, strict=False)) + abs(len(wanted) - len(samples))


def misordered(replay: Replay, order: list[tuple[str, int]], staleness: int | None) -> int:
    """Events that came elsewhere than in `order`, and steps that a start was beyond the bound on staleness."""
    seen = [(event.kind, event.worker) for event in replay.seen]
    lead = audit(replay.seen, replay.finished).lead
    wrong = sum(one != other for one, other in zip(seen, order, strict=False)) + abs(len(seen) - len(order))
    return wrong + (max(0, lead - staleness) if staleness is not None else 0)


# --- rounds ---


class Rounds(NamedTuple):
    """Steps of a round, and learning rate and momentum of the outer step at its end."""

    local_steps: int
    lr: float
    momentum: float


def prove_rounds(lab: Lab, rounds: Rounds, name: str, build: Build) -> None:
    """Check the variant that `build` makes at H = 1 and at the H given."""
    plain = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
    check_outer(lab, name, build, plain)
    check_against(lab, name, build, plain, rounds._replace(local_steps=1), workers=1)
    proven = rounds._replace(local_steps=min(rounds.local_steps, MOST_PROVEN))
    if proven.local_steps > 1:
        check_against(lab, name, build, shallow(plain), proven, workers=lab.world_size)
    if lab.config.optimizer == "adamw" or lab.config.clip is not None:
        tuned = shallow(lab.config)
        check_against(lab, name, build, tuned, proven, workers=lab.world_size, when=" as trained")


def check_outer(lab: Lab, name: str, build: Build, config: Config) -> None:
    """Two outer steps after rounds in which every worker moved by one: lr·(1 + m) and lr·(1 + m + m²) far."""
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
    lab.check(
        "outer step",
        off,
        TOLERANCE,
        variant=name,
        detail=detail,
        control=ROUNDS.format("test_an_outer_step_by_other_numbers_fails_the_run"),
    )


def check_against(
    lab: Lab, name: str, build: Build, config: Config, rounds: Rounds, *, workers: int, when: str = ""
) -> None:  # fmt: skip
    """Losses and weights of two rounds against `workers` workers in one process; last, all ranks are equal."""
    config = config.with_own(local_steps=rounds.local_steps)
    when, steps = f" at H = {rounds.local_steps}{when}", 2 * rounds.local_steps
    batches = lab.batches(torch.float64, proof=True)
    wanted: tuple[list[float], Tensor] = ([], torch.zeros(0))
    lab.at(0, f"one process, beside {name}{when}")
    if lab.rank == 0:
        dealt = config.model_copy(update={"world_size": workers})
        one = OneProcess(model_of(lab, config), dealt, proof=True, device=lab.device, dtype=torch.float64)
        wanted = in_one_process(one, rounds, steps)
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
        lab.check(
            f"losses{when}",
            worst,
            TOLERANCE,
            variant=name,
            control=ROUNDS.format("test_a_wrong_mean_fails_losses_and_weights_at_every_h"),
        )
        difference = (weights - wanted[1]).abs().max().item()
        lab.check(
            f"weights{when}",
            difference,
            TOLERANCE,
            variant=name,
            control=ROUNDS.format("test_a_wrong_mean_fails_losses_and_weights_at_every_h"),
        )
    check_replicas(lab, name, strategy)


def in_one_process(one: OneProcess, rounds: Rounds, steps: int) -> tuple[list[float], Tensor]:
    """All workers of `one`, one after the other: the batch's loss at each step, and the common weights [P] at the end.

    A round as local SGD has it (Stich 2019, algorithm 1) and DiLoCo (Douillard et al. 2023, algorithm 1): every worker
    goes on from the common weights; what they moved in the mean over samples is the outer gradient. A last round that
    is not complete moves only its workers.
    """
    config, parameters, (local_steps, lr, momentum) = one.config, list(one.model.parameters()), rounds
    optimizers = [local_optimizer(parameters, config) for _ in range(config.world_size)]
    common = parameters_to_vector(parameters).detach()
    velocity, losses = torch.zeros_like(common), [0.0] * steps
    for begin in range(0, steps, local_steps):
        moved, samples = torch.zeros_like(common), 0
        for rank, optimizer in enumerate(optimizers):
            vector_to_parameters(common.clone(), parameters)
            seen = 0
            for step in range(begin, min(begin + local_steps, steps)):
                inputs, targets = one.samples(step, rank)
                losses[step] += local_step(one, optimizer, inputs, targets)
                seen += len(inputs)
            moved += seen * (common - parameters_to_vector(parameters).detach())
            samples += seen
        if begin + local_steps > steps:
            break
        moved /= samples
        velocity = momentum * velocity + moved
        common = common - lr * (moved + momentum * velocity)
    return losses, common


def hold_timed(lab: Lab, rounds: dict[str, Rounds]) -> None:
    """The losses of the timed pass up to the step that sees the second outer step (the first, where it has no
    momentum), against all workers in one process."""
    lab.at(0, "one process, in rounds")
    config, dtype, found = lab.config, getattr(torch, lab.config.dtype), lab.losses()
    for name in (name for name in rounds if name in found and config.proof):
        steps = min(config.steps, rounds[name].local_steps * (2 if rounds[name].momentum else 1) + 1)
        one = OneProcess(lab.model(dtype), config, proof=False, device=lab.device, dtype=dtype)
        wanted, _ = in_one_process(one, rounds[name], steps)
        worst = 0.0
        for own, other in zip(wanted, found[name], strict=False):
            worst = larger(worst, abs(own - other))
        tolerance = max(wanted) * loss_rounding(dtype, config, steps, config.batch * one.terms)
        detail = f"steps 0 to {steps - 1} of {config.steps}, against {lab.world_size} workers in one process"
        lab.check(
            "timed losses",
            worst,
            tolerance,
            variant=name,
            detail=detail,
            control=ROUNDS.format("test_a_wrong_mean_fails_losses_and_weights_at_every_h"),
        )
    lab.exchange.barrier("rounds in one process")


def loss_rounding(dtype: torch.dtype, config: Config, steps: int, terms: int) -> float:
    """What rounding may put between two losses of the same mean, as a share of them.

    The sum of the terms, in float32 or finer and in another order: half an eps for each level of a tree, twice. And
    the passes in `dtype`, of about 20 results in each layer whose roundings have nothing to do with each other, nor
    those of one step with another's or of one term with another's: their root, over that of the terms.
    """
    summing = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (1 + math.log2(terms))
    passes = torch.finfo(dtype).eps / 2 * math.sqrt(20 * (config.depth + 2) * steps / terms)
    return summing + passes


def local_step(one: OneProcess, optimizer: torch.optim.Optimizer | None, inputs: Tensor, targets: Tensor) -> float:
    """A worker's own step on the mean over its samples, plain SGD without an `optimizer`; returns its share of the
    batch's loss."""
    parameters, config = list(one.model.parameters()), one.config
    for parameter in parameters:
        parameter.grad = None
    total = one.model(inputs, targets)
    (total / targets.numel()).backward()
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
    if optimizer is not None:
        optimizer.step()
    else:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data -= config.learning_rate * parameter.grad
    share: float = total.item() / (config.batch * one.terms)
    return share


def local_optimizer(parameters: list[torch.nn.Parameter], config: Config) -> torch.optim.Optimizer | None:
    """AdamW, with a state for each worker; None is plain SGD."""
    return torch.optim.AdamW(parameters, lr=config.learning_rate) if config.optimizer == "adamw" else None
