"""The lessons' exercises and classic bugs by name: their numbers, computed by the lab's own mechanisms on real
ranks."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlab.techniques.large_batch as optimizers
from distlab.experiments.dp import OneByOne
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import build_model
from distlab.lab.workload.optimizer import PlainSGD
from distlab.techniques.collectives.by_hand import ALGORITHMS, Collective
from distlab.techniques.collectives.costs import all_reduce_rounds
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.sharded.costs import MIXED_PRECISION, mixed_precision_bytes
from distlab.tools.testing.warm_ranks import Ranks

# --- the exercises: each rank is one of the lesson's workers ---


def averaged(group: dist.ProcessGroup, of_workers: list[list[float]]) -> list[list[float]]:
    """This worker's gradient averaged with the others', by buckets over gloo, by our ring and one parameter at a
    time."""
    share = 1 / group.size()
    found = []
    for all_reduce in (None, partial(Collective(group, "ring").all_reduce, async_op=True)):
        weights = nn.Parameter(torch.zeros(len(of_workers[0]), dtype=torch.float64))
        buckets = GradientBuckets([weights], group, 1 << 20, all_reduce=all_reduce)
        buckets.zero()
        with buckets.accumulate(last=True):
            (slope(of_workers[group.rank()]) @ weights * share).backward()
        buckets.finish()
        found.append(numbers(weights.grad))
    layer: Any = nn.Linear(len(of_workers[0]), 1, bias=False, dtype=torch.float64)
    (layer(slope(of_workers[group.rank()])).sum() * share).backward()
    OneByOne(layer, group).finish()
    return [*found, numbers(layer.weight.grad)]


def slope(gradient: list[float]) -> Tensor:
    """A loss of slope·w has this gradient."""
    return torch.tensor(gradient, dtype=torch.float64)


def numbers(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return [float(value) for value in tensor.flatten()]


def test_exercise_1_two_workers_average_to_5_and_6(ranks: Ranks) -> None:
    for of_rank in ranks(2, averaged, [[4.0, 10.0], [6.0, 2.0]]):
        assert of_rank == [[5.0, 6.0]] * 3


def synchronous_step(group: dist.ProcessGroup) -> tuple[list[float], list[float]]:
    """The mini-challenge: w = [0.5, 0.5], gradients [1, 1], [2, 2], [3, 3], a learning rate of 0.1."""
    weights = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))
    buckets = GradientBuckets([weights], group, 1 << 20)
    buckets.zero()
    with buckets.accumulate(last=True):
        (slope([group.rank() + 1.0] * 2) @ weights / group.size()).backward()
    buckets.finish()
    PlainSGD([weights], lr=0.1).step()
    return numbers(weights.grad), numbers(weights.detach())


def test_mini_challenge_average_2_and_weights_of_0_3(ranks: Ranks) -> None:
    for gradient, weights in ranks(3, synchronous_step):
        assert gradient == pytest.approx([2.0, 2.0], rel=1e-15)
        assert weights == pytest.approx([0.3, 0.3], rel=1e-15)


def accumulated(group: dist.ProcessGroup, share: float) -> tuple[list[float], int]:
    """Four microbatches with gradients 2, 4, 6 and 8, added up on one worker; and how often anything was summed over
    ranks."""
    weights, calls = nn.Parameter(torch.zeros(1, dtype=torch.float64)), 0

    def all_reduce(bucket: Tensor) -> None:
        nonlocal calls
        calls += 1
        dist.all_reduce(bucket, group=group)

    buckets = GradientBuckets([weights], group, 1 << 20, all_reduce=all_reduce)
    buckets.zero()
    for gradient in (2.0, 4.0, 6.0, 8.0):
        with buckets.accumulate(last=gradient == 8.0):
            (slope([gradient]) @ weights * share).backward()
    buckets.finish()
    return numbers(weights.grad), calls


def test_exercise_2_four_microbatches_sum_to_20_and_average_to_5(ranks: Ranks) -> None:
    """Micro-batches of 4 in 4 steps are a batch of 16; the division is in the share of each, not in the number of
    steps."""
    assert ranks(1, accumulated, 1.0) == [([20.0], 1)]
    assert ranks(1, accumulated, 0.25) == [([5.0], 1)]
    # On two ranks that each accumulate the same four the mean stays, and the sum over ranks is still one call.
    assert ranks(2, accumulated, 0.25 / 2) == [([5.0], 1)] * 2


def test_exercise_2_the_learning_rate_grows_as_the_batch_does() -> None:
    """Four times the batch: four times the rate (linear), twice (square root); a warmup begins at the base rate, not
    near zero."""
    groups = [{"lr": 0.1}, {"lr": 0.02}]
    optimizers.set_rates(groups, optimizers.linear(4))
    assert [group["lr"] for group in groups] == [4 * 0.1, 4 * 0.02]
    optimizers.set_rates(groups, optimizers.linear(4))  # of the base rate, however often
    assert groups[0]["lr"] == 4 * 0.1
    assert (optimizers.sqrt(4), optimizers.unscaled(4)) == (2, 1)
    assert [optimizers.warmup(4, step, 300) for step in (0, 150, 300, 9999)] == [1, 2.5, 4, 4]


def by_hand(group: dist.ProcessGroup) -> list[list[float]]:
    """Three parameters, summed by every algorithm of the lab; worker r's gradients are 1, 10 and 100 times r + 1."""
    sums = []
    for algorithm in ALGORITHMS:
        gradients = slope([1.0, 10.0, 100.0]) * (group.rank() + 1)
        Collective(group, algorithm).all_reduce(gradients)
        sums.append(numbers(gradients / group.size()))
    return sums


def test_all_reduce_by_hand_over_three_parameters(ranks: Ranks) -> None:
    """On four workers, of which one then has no chunk of its own."""
    for of_rank in ranks(4, by_hand):
        assert of_rank == [[2.5, 25.0, 250.0]] * len(ALGORITHMS)


# --- what the first lesson computes ---


def test_first_lesson_gradients_of_a_point() -> None:
    """2·error·x, 2·error, error²: sums, never means."""
    line = build_model(Config.read({"LAB_MODEL": "line"}), 1)  # begins at zero
    loss = line(torch.tensor([[0.5], [1.0]]), torch.tensor([[2.0], [1.0]]))
    loss.backward()
    assert loss.item() == 4.0 + 1.0
    assert [numbers(weight.grad) for weight in line.parameters()] == [[2 * -2 * 0.5 + 2 * -1 * 1.0], [2 * -2 + 2 * -1]]


def test_first_lesson_a_mean_of_means_weighs_a_shard_of_6_by_a_third_more_than_one_of_8() -> None:
    sizes = shard_sizes(32, 4, uneven=True)
    assert sizes[:2] == [8, 6]
    of_means = [1 / (size * len(sizes)) for size in sizes]  # as LAB_BUG=means_of_shards shares it out
    assert round(of_means[1] / of_means[0], 2) == 1.33
    assert sum(share * size for share, size in zip(of_means, sizes, strict=True)) == 1


def test_first_lesson_a_ring_of_four_takes_3_rounds_and_3() -> None:
    assert all_reduce_rounds("ring", 4) == 3 + 3  # who sends which chunk: test_comm.py::test_the_rings_rounds


def test_second_lessons_rule_of_memory_forgets_half() -> None:
    """7 billion in 16 bits are 14 GB; four times that is 56; Adam in mixed precision takes 16 bytes a parameter."""
    weights = MIXED_PRECISION["weights"] * 7e9
    assert (weights, 4 * weights) == (14e9, 56e9)
    assert mixed_precision_bytes(7e9) == 2 * 4 * weights == 112e9


# --- the classic bugs: each can be made on purpose (tests/experiments/test_bugs.py runs all) ---

CLASSIC_BUGS = [
    ("1: the learning rate is not scaled with the batch", "largebatch", "lr_unscaled", "learning rate"),
    ("2: the forward pass runs through the unwrapped model", "dp", "unwrapped_forward", "replicas"),
    ("3: no sampler, every worker sees all data", "train", "no_sampler", "shards"),
    ("3: no sampler, in training", "dp", "no_sampler", "samples"),
    ("no set_epoch: every epoch in the same order", "train", "no_set_epoch", "reshuffled"),
    ("no set_epoch, in training", "dp", "no_set_epoch", "losses"),
    ("means of uneven shards", "dp", "means_of_shards", "gradients"),
    ("a save that no barrier completes", "fsdp", "save_without_barrier", "checkpoint"),
    ("no broadcast of the first weights", "dp", "no_broadcast", "replicas"),
    ("the hook that launches too early", "dp", "hook_race", "gradients"),
    ("a bucket that is not emptied", "dp", "stale_bucket", "gradients"),
    ("a loss that is not divided by its microbatches", "pp", "undivided_loss", "gradients"),
    ("an all_reduce in the backward of g", "tp", "double_reduce", "gradients"),
    ("[Q; K; V] sliced in one run", "tp", "packed_qkv", "losses"),
    ("a bias that counts N times", "tp", "bias_everywhere", "losses"),
    ("the backward of the lesson's table", "comm", "wrong_backward", "gradients"),
    ("an accumulator that clips scaled gradients", "precision", "unscaled_clip", "clipped gradients"),
    ("a norm of one's own shard alone", "fsdp", "per_rank_norm", "clipped gradients"),
    ("no error feedback", "compress", "no_error_feedback", "sent + residual"),
    ("a seed of one's own for random-k", "compress", "unshared_seed", "formula"),
    ("sums of codes that wrap", "compress", "int8_overflow", "formula"),
    ("a low-rank factor of one's own", "compress", "per_rank_powersgd", "rank"),
    ("weights that are staler than was agreed", "server", "stale_unbounded", "staleness"),
]


@pytest.mark.parametrize(
    ("mode", "bug", "check"), [bug[1:] for bug in CLASSIC_BUGS], ids=[bug[0] for bug in CLASSIC_BUGS]
)
def test_classic_bug(mode: str, bug: str, check: str) -> None:
    """Its mode knows it, and names the check that sees it."""
    assert load(mode).mistakes[bug].check == check


def test_classic_bug_fork_bomb_a_rank_that_imports_the_program_starts_none() -> None:
    """Spawned processes import the main module anew; the guard keeps them from starting ranks of their own."""
    program = "import distlab.cli.run, multiprocessing; print(multiprocessing.active_children())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
