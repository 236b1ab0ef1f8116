"""The lessons' exercises and classic bugs, with numbers computed by the lab's own code."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import distlab.techniques.large_batch as optimizers
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import build_model
from distlab.techniques.collectives.by_hand import ALGORITHMS, Collective
from distlab.techniques.collectives.costs import all_reduce_rounds
from distlab.techniques.sharded.costs import MIXED_PRECISION, mixed_precision_bytes
from distlab.tools.puzzle.tasks import TASKS
from tests.warm_ranks import Ranks

# --- the exercises, which are puzzles: tests/tools/puzzle/test_verify.py has answers on real ranks ---


def test_the_exercises_have_the_lessons_numbers() -> None:
    """Two workers: 5 and 6. Four: 4 steps, a sum of 20, a mean of 5, four times the rate. Three: a mean of 2, weights
    of 0.3."""
    assert TASKS[21].expected(2)[0]["lesson"].tolist() == [5.0, 6.0]
    assert {name: float(each[0]) for name, each in TASKS[22].expected(1)[0].items()} == {
        "steps": 4.0, "sum": 20.0, "mean": 5.0, "rate": 0.4,
    }  # fmt: skip
    of_three = TASKS[23].expected(3)[0]
    assert of_three["lesson gradient"].tolist() == pytest.approx([2.0, 2.0], rel=1e-15)
    assert of_three["lesson weights"].tolist() == pytest.approx([0.3, 0.3], rel=1e-15)


def numbers(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return [float(value) for value in tensor.flatten()]


def test_exercise_2_the_learning_rate_grows_with_the_batch() -> None:
    """Four times the batch: four times the rate (linear) or twice (square root); warmup starts at the base rate, not
    near zero."""
    groups = [{"lr": 0.1}, {"lr": 0.02}]
    optimizers.set_rates(groups, optimizers.linear(4))
    assert [group["lr"] for group in groups] == [4 * 0.1, 4 * 0.02]
    optimizers.set_rates(groups, optimizers.linear(4))  # always from the base rate
    assert groups[0]["lr"] == 4 * 0.1
    assert (optimizers.sqrt(4), optimizers.unscaled(4)) == (2, 1)
    assert [optimizers.warmup(4, step, 300) for step in (0, 150, 300, 9999)] == [1, 2.5, 4, 4]


def by_hand(group: dist.ProcessGroup) -> list[list[float]]:
    """Sum three parameters with every algorithm of the lab; worker r's gradients are 1, 10 and 100 times r + 1."""
    sums = []
    for algorithm in ALGORITHMS:
        gradients = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64) * (group.rank() + 1)
        Collective(group, algorithm).all_reduce(gradients)
        sums.append(numbers(gradients / group.size()))
    return sums


def test_all_reduce_by_hand_over_three_parameters(ranks: Ranks) -> None:
    """There are four workers, so one has no chunk."""
    for of_rank in ranks(4, by_hand):
        assert of_rank == [[2.5, 25.0, 250.0]] * len(ALGORITHMS)


# --- the numbers of the first and second lesson ---


def test_first_lesson_gradients_of_a_point() -> None:
    """2·error·x, 2·error, error²: sums, never means."""
    line = build_model(Config.read({"LAB_MODEL": "line"}), 1)  # begins at zero
    loss = line(torch.tensor([[0.5], [1.0]]), torch.tensor([[2.0], [1.0]]))
    loss.backward()
    assert loss.item() == 4.0 + 1.0
    assert [numbers(weight.grad) for weight in line.parameters()] == [[2 * -2 * 0.5 + 2 * -1 * 1.0], [2 * -2 + 2 * -1]]


def test_first_lesson_a_mean_of_means_overweighs_small_shards() -> None:
    sizes = shard_sizes(32, 4, uneven=True)
    assert sizes[:2] == [8, 6]
    of_means = [1 / (size * len(sizes)) for size in sizes]  # as with LAB_BUG=means_of_shards
    assert round(of_means[1] / of_means[0], 2) == 1.33
    assert sum(share * size for share, size in zip(of_means, sizes, strict=True)) == 1


def test_first_lesson_a_ring_of_four_takes_6_rounds() -> None:
    assert all_reduce_rounds("ring", 4) == 3 + 3  # test_comm.py::test_the_rings_rounds has the chunks of each round


def test_second_lesson_the_memory_rule_forgets_half() -> None:
    """7 billion parameters in 16 bits are 14 GB, four times that 56 GB; Adam in mixed precision needs 16 bytes per
    parameter."""
    weights = MIXED_PRECISION["weights"] * 7e9
    assert (weights, 4 * weights) == (14e9, 56e9)
    assert mixed_precision_bytes(7e9) == 2 * 4 * weights == 112e9


# --- the classic bugs: each can be injected (tests/experiments/test_bugs.py runs all) ---

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
    ("a norm of one shard only", "fsdp", "per_rank_norm", "clipped gradients"),
    ("no error feedback", "compress", "no_error_feedback", "sent + residual"),
    ("a different seed per rank for random-k", "compress", "unshared_seed", "formula"),
    ("sums of codes that wrap", "compress", "int8_overflow", "formula"),
    ("a different low-rank factor per rank", "compress", "per_rank_powersgd", "rank"),
    ("weights that are staler than allowed", "server", "stale_unbounded", "staleness"),
]


@pytest.mark.parametrize(
    ("mode", "bug", "check"), [bug[1:] for bug in CLASSIC_BUGS], ids=[bug[0] for bug in CLASSIC_BUGS]
)
def test_classic_bug(mode: str, bug: str, check: str) -> None:
    """Its mode has the bug, and names the check that catches it."""
    assert load(mode).mistakes[bug].check == check


def test_classic_bug_fork_bomb_is_prevented() -> None:
    """Spawned processes import the main module again; the guard stops them from starting their own ranks."""
    program = "import distlab.cli.run, multiprocessing; print(multiprocessing.active_children())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
