"""Classic bugs of a server, of its workers and of rounds, injected by LAB_BUG."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.techniques.parameter_server.local_sgd import OuterStep
from distlab.techniques.parameter_server.server import Client, ParameterServer, Worker

from .options import Options
from .predictions import DOWNPOUR, ROUNDS

mistake = Mistakes()
wrong_worker = partial(mistake, part="worker", needs=Needs(variants=(DOWNPOUR,)))
wrong_diloco = partial(mistake, check="weights at H = 1", part="OuterStep", of=("diloco",), needs=Needs(ranks=1))


# --- settings that hide a bug ---


def too_few_steps(config: Config) -> str:
    """No worker gets too far ahead without a bound, or in too few steps: the bound, one more and those of a start."""
    own = config.own(Options)
    if own.staleness is None:
        return "LAB_STALENESS unset: nobody is bound"
    least = own.staleness + 1 + own.local_steps
    too_far = (
        f"LAB_STEPS={config.steps}: to get too far ahead takes LAB_STALENESS + 1 + LAB_LOCAL_STEPS = {least} steps"
    )
    return too_far if config.steps < least else ""


def equal_shards(config: Config) -> str:
    """Shards of one sample each cannot be uneven; those of a proof are uneven if possible."""
    single_samples = config.batch <= config.world_size
    return f"LAB_BATCH={config.batch}: every worker has one sample, so all have equal weight" if single_samples else ""


# --- the bugs ---


@mistake(
    "stale_unbounded",
    check="staleness",
    part="rules",
    needs=Needs(proof=False, variants=(DOWNPOUR,), unless=too_few_steps),
)
class Unbounded(ParameterServer):
    """The server never lets fast workers wait: a slow worker's gradients become arbitrarily old.

    The lead would depend on the machine, and the bug might not show. So the last worker takes its first step only once
    another is too far ahead: a reproducible straggler.
    """

    def may_start(self, worker: int) -> bool:
        straggler, bound = max(self.clocks), (self.staleness or 0) + 1
        return self.spent or worker != straggler or max(self.clocks.values()) > bound


@mistake("update_lost", check="weights", part="rules", needs=Needs(ranks=1, variants=(DOWNPOUR,)))
class Forgetful(ParameterServer):
    """The server counts every second push of a worker but does not apply it."""

    def push(self, worker: int, number: int, update: Tensor) -> None:
        super().push(worker, number, torch.zeros_like(update) if number % 2 else update)


@wrong_worker("one_shard", check="samples")
class OneShard(Worker):
    """Every worker trains on worker 0's samples: the others' are never seen."""

    def backward(self) -> float:
        mine, self.rank = self.rank, 0
        loss = super().backward()
        self.rank = mine
        return loss


@wrong_worker("pushed_n_times", check="gradients")
class PushesNTimes(Worker):
    """Each worker pushes its gradient N times: the run takes N times the learning rate."""

    def accumulate(self, update: Tensor, steps: int) -> float:
        loss = super().accumulate(update, steps)
        update *= self.num_workers
        return loss


@wrong_worker("never_fetched", check="losses")
class IgnoresFetch(Worker):
    """A worker continues from its own weights and ignores those that it fetched."""

    def fetch(self, client: Client, most: int) -> int:
        return client.start(most, torch.empty_like(self.vectors.weights))


@mistake("never_averaged", check="replicas", part="OuterStep", of=ROUNDS)
class Unaveraged(OuterStep):
    """A round ends without the all_reduce: every worker trains its own model."""

    def average(self, moved: Tensor) -> None:
        """Leave it unchanged."""
        moved.mul_(dist.get_world_size(self.group))


@mistake("mean_of_workers", check="weights at H = 1", part="OuterStep", of=ROUNDS, needs=Needs(unless=equal_shards))
class Unweighted(OuterStep):
    """A round averages over workers, not over samples: a worker with few samples counts as much as any."""

    def step(self, share: float) -> None:  # noqa: ARG002
        super().step(1 / dist.get_world_size(self.group))


@wrong_diloco("momentum_forgotten")
class ForgetsMomentum(OuterStep):
    """DiLoCo's outer momentum restarts every round."""

    def step(self, share: float) -> None:
        if self.done == 0 and self.velocity is not None:
            self.velocity.zero_()
        super().step(share)


@wrong_diloco("no_nesterov")
class HeavyBall(OuterStep):
    """DiLoCo's outer step is plain momentum, without Nesterov's look-ahead."""

    def outer_direction(self, moved: Tensor) -> Tensor:
        assert self.velocity is not None
        return self.velocity.mul_(self.momentum).add_(moved)
