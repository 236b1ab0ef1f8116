"""A training of a recipe: its learning rate, and fresh samples for every step.

Each training is data parallel: every rank has a replica and takes its part of the batch. Step s of a batch k times the
base has the samples of base steps k·s to k·s + k - 1. So every k uses the same samples, each once, and differs only in
how many it takes at a time.
"""

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlab.techniques.large_batch as optimizers
from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch, Points, Samples, Text, permutation
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import PlainSGD
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.large_batch import Lamb, Lars, Layerwise, set_rates, split_by_decay

# Base rates at k = 1, found by experiment on this mode's tiny models; LAB_LR sets SGD's.
SGD_RATE, LARS_RATE, LAMB_RATE = 0.05, 0.2, 0.02
LARS_TRUST = 0.02  # the paper's 0.001 is for 90 epochs of ResNet-50; here there are some 200 steps
LARS_DECAY, LAMB_DECAY = 1e-4, 1e-2
HELD_OUT = 256
Stepper: TypeAlias = PlainSGD | Layerwise


class Recipe(NamedTuple):
    """`target(k)` times the base rate for k times the batch, at once or after warm-up, with a new `optimizer`."""

    target: Callable[[float], float]
    optimizer: Callable[..., Stepper]  # (model, config), and for LARS and LAMB `sharded_over`, see `Layerwise`
    warms_up: bool = False
    warmup: Callable[[float, int, int], float] = lambda *args: optimizers.warmup(*args)

    def factor(self, k: int, step: int, steps: int) -> float:
        """Return the factor of the base rate at `step` of `steps`."""
        target = self.target(k)
        return self.warmup(target, step, warmup_steps(steps)) if self.warms_up else target


def warmup_steps(steps: int) -> int:
    """Return a quarter of the steps; Goyal et al. used 5 of 90 epochs, less than one step here."""
    return steps // 4


def base_rate(config: Config) -> float:
    return config.lr or SGD_RATE


def sgd(model: nn.Module, config: Config) -> Stepper:
    """Return plain SGD, so that an update is exactly the gradient times the rate."""
    return PlainSGD(model.parameters(), base_rate(config))


def layerwise_sgd(model: nn.Module, _: Config, sharded_over: dist.ProcessGroup | None = None) -> Stepper:
    """Return LARS, which neither scales nor decays biases and gains."""
    groups = split_by_decay(model.parameters(), LARS_DECAY)
    return Lars(groups, LARS_RATE, trust=LARS_TRUST, sharded_over=sharded_over)


def layerwise_adam(model: nn.Module, _: Config, sharded_over: dist.ProcessGroup | None = None) -> Stepper:
    """Return LAMB, which neither scales nor decays biases and gains."""
    return Lamb(split_by_decay(model.parameters(), LAMB_DECAY), LAMB_RATE, sharded_over=sharded_over)


class Stream(Batches):
    """`steps` base batches of LAB_BATCH samples in an order drawn by `seed`, and held-out samples; no epochs."""

    def __init__(
        self, config: Config, seed: int, steps: int, device: torch.device, dtype: torch.dtype, *, uneven: bool = False
    ) -> None:
        self.config, self.device, self.dtype, self.uneven, self.batch = config, device, dtype, uneven, config.batch
        self.samples, self.trained, self.held_out = draw(config, seed, steps * config.batch)

    def times(self, k: int) -> "Stream":
        """Return the same samples with k base batches per step."""
        stream = copy.copy(self)
        stream.batch = k * self.config.batch
        return stream

    def held_out_samples(self) -> Microbatch:
        """Return the held-out samples, in float32."""
        inputs, targets = self.samples.take(self.held_out)
        inputs, targets = (each.float() if each.is_floating_point() else each for each in (inputs, targets))
        return Microbatch(inputs.to(self.device), targets.to(self.device), 1 / targets.numel())

    def _order(self, step: int) -> Tensor:
        return self.trained[step * self.batch : (step + 1) * self.batch]


def draw(config: Config, seed: int, num_samples: int) -> tuple[Samples, Tensor, Tensor]:
    """Return the data set, and the numbers of training and held-out samples; a short text is repeated."""
    if config.model == "mlp":
        ids = torch.arange(num_samples + HELD_OUT)
        return Points(len(ids), config.width, seed), ids[:num_samples], ids[num_samples:]
    samples = Text(config)
    order = permutation(seed, 0, len(samples))
    num_held_out = min(HELD_OUT, max(1, len(order) // 8))
    trained_ids = order[:-num_held_out]
    repeats = -(-num_samples // len(trained_ids))
    return samples, trained_ids.repeat(repeats)[:num_samples], order[-num_held_out:]


class Trainee:
    """One training on the ranks of `group`: a model, its samples, and a recipe for `steps` batches of k times the
    base."""

    def __init__(
        self, model: Model, stream: Stream, recipe: Recipe, k: int, steps: int, config: Config,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self.model, self.stream, self.recipe, self.k, self.steps = model, stream.times(k), recipe, k, steps
        self.optimizer, self.group = recipe.optimizer(model, config), group
        self.buckets = GradientBuckets(model.parameters(), group, float("inf"), overlap=False)

    def backward(self, step: int) -> None:
        """Sum the gradients of this rank's samples over the ranks.

        Each loss term is divided by the number of terms of all k times LAB_BATCH samples: the gradient is a mean, as
        long as the base's. So with the base rate a step is no longer than before, and there are k times fewer.
        """
        self.buckets.zero()
        for inputs, targets, share in self.stream.microbatches(step, self.group.rank(), self.group.size()):
            (self.model(inputs, targets) * share).backward()
        self.buckets.finish()

    def update(self, step: int) -> None:
        set_rates(self.optimizer.param_groups, self.recipe.factor(self.k, step, self.steps))
        self.optimizer.step()

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the summed "gradients" or the "weights", which all ranks have whole."""
        for name, weight in self.model.named_parameters():
            tensor = weight.detach() if kind == "weights" else weight.grad
            if tensor is not None:
                yield name, tensor

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over held-out samples, in float32; the model cannot be trained afterwards."""
        inputs, targets, share = self.stream.held_out_samples()
        loss: float = (self.model.float()(inputs, targets) * share).item()
        return loss
