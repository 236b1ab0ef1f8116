"""The classic mistakes of a server, of its workers and of rounds, made on purpose by LAB_BUG, and what hides them."""

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.config import Config
from distlab.contract import Instead, Mistake, Needs
from distlab.parameter_server.local_sgd import OuterStep
from distlab.parameter_server.server import Client, ParameterServer

from .worker import Worker


class Unbounded(ParameterServer):
    """Lets nobody wait for the slowest.

    Who is ahead by how much would depend on the machine, and the mistake might not show. So the last worker takes its
    first step only once another is too far ahead: a straggler, the same each time.
    """

    def may_start(self, worker: int) -> bool:
        """Always, but for the straggler."""
        straggler, bound = max(self.clocks), (self.staleness or 0) + 1
        return self.spent or worker != straggler or max(self.clocks.values()) > bound


class Forgetful(ParameterServer):
    """Counts every second push of a worker, from its first on, and does not apply it."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, torch.zeros_like(update) if number % 2 else update)


class OneShard(Worker):
    """Trains on worker 0's samples, whoever it is: what DistributedSampler is forgotten for."""

    def backward(self) -> float:
        mine, self.rank = self.rank, 0
        loss = super().backward()
        self.rank = mine
        return loss


class Repeating(Worker):
    """Pushes its update as often as there are workers, as if the server took a mean: all in one message."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        loss = super().accumulate(update, steps)
        update *= self.num_workers
        return loss


class Unheard(Worker):
    """Goes on from its own weights, and never takes those that the server sends."""

    def fetch(self, client: Client, most: int) -> int:
        return client.start(most, torch.empty_like(self.vectors.weights))


class Unaveraged(OuterStep):
    """Steps by what this worker moved, and asks nobody else."""

    def average(self, moved: Tensor) -> None:
        """Leave it as it is."""
        moved.mul_(dist.get_world_size(self.group))


class Unweighted(OuterStep):
    """Takes the mean over workers, as if all had seen as many samples."""

    def step(self, share: float) -> None:  # noqa: ARG002
        super().step(1 / dist.get_world_size(self.group))


class Memoryless(OuterStep):
    """Forgets its momentum between two rounds."""

    def step(self, share: float) -> None:
        if self.done == 0 and self.velocity is not None:
            self.velocity.zero_()
        super().step(share)


class HeavyBall(OuterStep):
    """Steps along the momentum as it is, which is Polyak's and looks no step ahead."""

    def along(self, moved: Tensor) -> Tensor:
        assert self.velocity is not None
        return self.velocity.mul_(self.momentum).add_(moved)


def too_few_steps(config: Config) -> str:
    """Nobody gets too far ahead in fewer steps than the bound and two."""
    least = config.options.model_dump()["staleness"] + 2
    if config.steps >= least:
        return ""
    return f"LAB_STEPS={config.steps}: to be too far ahead takes LAB_STALENESS + 2 = {least}"


def all_alike(config: Config) -> str:
    """Shards of one sample each cannot be uneven, as those of a proof are wherever they can."""
    if config.batch > config.world_size:
        return ""
    return f"LAB_BATCH={config.batch}: every worker has one sample, and all weigh the same"


APART = ("ssp", "downpour")
ROUNDS = ("local_sgd", "diloco")

MISTAKES = {
    "stale_unbounded": Mistake(
        "the server forgets to let the fast wait: gradients of a slow worker get as old as they like",
        "staleness",
        Instead(run={"rules": Unbounded}),
        Needs(proof=False, variants=("ssp",), unless=too_few_steps),
    ),
    "update_lost": Mistake(
        "the server counts every second push of a worker and does not apply it",
        "weights",
        Instead(run={"rules": Forgetful}),
        Needs(ranks=1, variants=APART),
    ),
    "one_shard": Mistake(
        "every worker trains on worker 0's samples: the others' are never seen",
        "samples",
        Instead(run={"worker": OneShard}),
        Needs(variants=APART),
    ),
    "pushed_n_times": Mistake(
        "each worker pushes its gradient N times: the run takes N times the learning rate",
        "gradients",
        Instead(run={"worker": Repeating}),
        Needs(variants=APART),
    ),
    "never_fetched": Mistake(
        "a worker continues from its own weights and ignores those that it fetched",
        "losses",
        Instead(run={"worker": Unheard}),
        Needs(variants=APART),
    ),
    "never_averaged": Mistake(
        "a round ends without the all_reduce: every worker trains a model of its own",
        "replicas",
        Instead(ROUNDS, {"outer": Unaveraged}),
    ),
    "mean_of_workers": Mistake(
        "a round takes the mean over workers, not over samples: who has few counts as much as who has many",
        "weights at H = 1",
        Instead(ROUNDS, {"outer": Unweighted}),
        Needs(unless=all_alike),
    ),
    "momentum_forgotten": Mistake(
        "DiLoCo's outer momentum begins anew every round",
        "weights at H = 1",
        Instead(("diloco",), {"outer": Memoryless}),
        Needs(ranks=1),
    ),
    "no_nesterov": Mistake(
        "DiLoCo's outer step is plain momentum, without Nesterov's look ahead",
        "weights at H = 1",
        Instead(("diloco",), {"outer": HeavyBall}),
        Needs(ranks=1),
    ),
}
