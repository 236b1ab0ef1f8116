"""Many small trainings side by side on the same ranks, with one all_reduce a step for all of them.

Each training is data parallel in itself: every rank has a replica, and takes its part of the batch. A collective costs
its latency whatever it carries, which for a model of some thousand parameters is most of a step. So the gradients of
all trainings lie in one flat bucket, and are summed together: the same sums, a call in place of many.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.largebatch.recipes import Recipe
from experiments.largebatch.samples import Stream
from workers.config import Config
from workers.parallel.buckets import GradientBuckets
from workers.parallel.rates import set_rates
from workers.workload.data import Microbatch
from workers.workload.model import Model


class Trainee:
    """One training: a model, the samples of its seed, and a recipe for `steps` batches of k times the base."""

    def __init__(self, model: Model, stream: Stream, recipe: Recipe, k: int, steps: int, config: Config) -> None:
        self.model, self.stream, self.recipe, self.k, self.steps = model, stream, recipe, k, steps
        self.optimizer = recipe.optimizer(model, config)

    def backward(self, microbatches: list[Microbatch]) -> None:
        """Add the gradients of this rank's samples up."""
        for inputs, targets, share in microbatches:
            (self.model(inputs, targets) * share).backward()

    def update(self, step: int) -> None:
        """One step at the recipe's rate."""
        set_rates(self.optimizer.param_groups, self.recipe.factor(self.k, step, self.steps))
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss over samples that no step has seen, in float32."""
        inputs, targets, share = self.stream.held_out
        model = self.model.float()  # in place: nothing is trained any more
        loss: float = (model(inputs, targets) * share).item()
        return loss


class Lockstep:
    """Trainees, by name, that step together over the ranks of `group`; all take batches of k times the base."""

    def __init__(self, trainees: Mapping[str, Trainee], group: dist.ProcessGroup, *, uneven: bool = False) -> None:
        self.names, self.trainees = list(trainees), list(trainees.values())
        self.group, self.uneven = group, uneven
        parameters = [parameter for trainee in self.trainees for parameter in trainee.model.parameters()]
        self.buckets = GradientBuckets(parameters, group, float("inf"), overlap=False)

    def backward(self, step: int) -> None:
        """Gradients of all trainees, summed over the ranks."""
        self.buckets.zero()
        rank, ranks = self.group.rank(), self.group.size()
        for trainee in self.trainees:
            trainee.backward(trainee.stream.dealt(trainee.k, step, rank, ranks, uneven=self.uneven))
        self.buckets.finish()

    def update(self, step: int) -> None:
        """One step of every trainee."""
        for trainee in self.trainees:
            trainee.update(step)

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The summed "gradients" or the "weights" of all trainees, which all ranks hold whole."""
        for name, trainee in zip(self.names, self.trainees, strict=True):
            for parameter, weight in trainee.model.named_parameters():
                tensor = weight.detach() if kind == "weights" else weight.grad
                if tensor is not None:
                    yield f"{name}.{parameter}", tensor

    def weights(self) -> Tensor:
        """All weights of all trainees, as one vector."""
        return torch.cat([p.detach().flatten() for trainee in self.trainees for p in trainee.model.parameters()])
