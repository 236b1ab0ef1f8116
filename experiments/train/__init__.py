"""Data sharding: DistributedSampler, the same by hand, and padding where N does not divide the data set.

Every rank shuffles all indices in the same way, by (seed, epoch), and takes every N-th of them, starting at its rank.
No communication is needed: shards are disjoint because all ranks drew the same order. Two things are easily missed:

  set_epoch   the epoch is part of the seed. Without it every epoch has the same shards in the same order
  padding     shards must be equally long, or a collective would wait for a rank that has finished. If N does not
              divide the length, the first samples of the order are used again: so "no overlap" is not quite true

  shapes      indices [ceil(1000 / N)] per rank; a batch [4] per rank; gathered [4 N]
  predicted   the all_gather of a batch sends (N-1) x 4 x 8 B per rank, once in each of the two epochs
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from distlab.contract import Claims, Mistakes, Mode, Needs, Variant, untrained
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import Prediction

from . import lesson

LENGTH, BATCH, SEED, EPOCHS = 1000, 4, 42, 2  # the lesson's


class Numbers(Dataset[Tensor]):
    """The lesson's data: sample i is the number i, which shows which rank got it."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def by_hand(epoch: int, rank: int, world_size: int) -> list[int]:
    """Return the indices of `rank`: every N-th of the epoch's order, which is repeated to fill the last shards."""
    order: list[int] = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    return (order + repeats(order, world_size))[rank::world_size]


def repeats(order: list[int], world_size: int) -> list[int]:
    """Return the samples that are used twice to make all shards equally long."""
    return order[: -LENGTH % world_size]


def pytorchs(rank: int, world_size: int) -> Sampler[Any]:
    """Return PyTorch's sampler, as in the lesson."""
    return DistributedSampler(Numbers(), num_replicas=world_size, rank=rank, shuffle=True, seed=SEED)


def lesson_sampler(rank: int, world_size: int) -> Sampler[Any]:
    """Return the lesson's sampler, for LAB_VARIANT=plain."""
    return lesson.DistributedSampler(LENGTH, rank, world_size, SEED)  # type: ignore[return-value]


# --- the run ---

# Parts that a bug replaces: the sampler of a rank, and how it gets the epoch.
MakeSampler: TypeAlias = Callable[[int, int], Sampler[Any]]
BeginEpoch: TypeAlias = Callable[[Any, int], None]


def set_epoch(sampler: Any, epoch: int) -> None:
    """Set the sampler's epoch, if it has one."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def predict(config: Config) -> list[Prediction]:
    """Return the bytes of all all_gathers of the lesson."""
    value = float(EPOCHS * (config.world_size - 1) * BATCH * 8)
    return [Prediction("", "called bytes", "B", "2 x (N-1) x 4 x 8 B", (value,) * config.world_size, EPOCHS)]


def run(lab: Lab, sampler_of: MakeSampler = pytorchs, begin_epoch: BeginEpoch = set_epoch) -> None:
    """Run the lesson's two epochs, then check all shards."""
    if "plain" in lab.config.variant and sampler_of is pytorchs:
        sampler_of = lesson_sampler
    prediction = predict(lab.config)[0]
    lab.say(f"two all_gathers send {prediction.formula} = {prediction.value[0]:g} B per rank", "predict")
    sampler = sampler_of(lab.rank, lab.world_size)
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)
    epochs = []
    with lab.count() as traffic:
        for epoch in range(EPOCHS):
            lab.at(epoch, "epoch")
            begin_epoch(sampler, epoch)
            batches = list(loader)
            show(lab, epoch, batches[0])
            epochs.append([int(sample) for batch in batches for sample in batch])
    lab.compare_prediction(prediction, traffic.called_bytes)
    shards_by_rank = lab.exchange.gather("shards", epochs)
    if shards_by_rank is not None:
        check(lab, shards_by_rank)


def show(lab: Lab, epoch: int, batch: Tensor) -> None:
    """Run the lesson's computation on the first batch, gather it on all ranks, and log its lines."""
    data = batch.to(lab.device)
    result, gathered = computed(lab, data)
    lab.note("I get", f"epoch {epoch}, batch 0")
    for name, tensor in {"Local data": data, "Local result": result, "Gathered result": gathered}.items():
        lab.note("", f"{name}: {tensor.tolist()}, shape {list(tensor.shape)}")
    wanted = [
        sample * (rank + 1) for rank in range(lab.world_size) for sample in by_hand(epoch, rank, lab.world_size)[:BATCH]
    ]
    detail = "positions that differ from rank + 1 times the samples computed by hand"
    lab.check("gathered", count_differences(gathered.tolist(), wanted), 0, detail=detail)


def computed(lab: Lab, data: Tensor) -> tuple[Tensor, Tensor]:
    """Return each rank's samples times its rank + 1: this rank's [4], and those of all ranks [4 N]."""
    result = data * (lab.rank + 1)
    gathered = [torch.zeros_like(result) for _ in range(lab.world_size)]
    dist.all_gather(gathered, result, group=lab.group)
    return result, torch.cat(gathered)


def check(lab: Lab, shards_by_rank: list[list[list[int]]]) -> None:
    """Check all shards; `everyone[rank][epoch]` lists the samples in the order in which the rank got them."""
    for epoch in range(EPOCHS):
        shards = [shards_of_rank[epoch] for shards_of_rank in shards_by_rank]
        wrong, twice = wrong_shards(shards)
        names = f"used twice, so that shards are equally long: {shorten(twice)}" if twice else "no sample used twice"
        lab.say(f"epoch {epoch}, shards of {len(shards[0])}: {names}")
        lab.check(
            "shards", wrong, 0, detail=f"epoch {epoch}: samples that are missing or repeated without need; {names}"
        )
        hand = [by_hand(epoch, rank, lab.world_size) for rank in range(lab.world_size)]
        detail = f"epoch {epoch}: positions that differ from the shards computed by hand"
        lab.check("by hand", sum(map(count_differences, shards, hand)), 0, detail=detail)
    first, second = shards_by_rank[0][:2]
    same = len(first) - count_differences(first, second)
    lab.check(
        "reshuffled",
        same / len(first),
        0.1,
        detail=f"{same} of {len(first)} positions have the same sample in both epochs",
    )


def wrong_shards(shards: list[list[int]]) -> tuple[int, list[int]]:
    """Return the samples that are missing or repeated more often than padding needs, and all repeated ones."""
    times = Counter(sample for shard in shards for sample in shard)
    surplus = times.total() - LENGTH - (-LENGTH % len(shards))
    return LENGTH - len(times) + abs(surplus), [sample for sample, count in times.items() if count > 1]


def count_differences(one: list[int], other: list[int]) -> int:
    """Return the number of positions where two lists differ."""
    return sum(a != b for a, b in zip_longest(one, other))


def shorten(samples: list[int]) -> str:
    """Return at most the first seven, all that padding can need on 8 ranks."""
    return ", ".join(map(str, samples[:7])) + (f" and {len(samples) - 7} more" if len(samples) > 7 else "")


def claims(mode: Mode, config: Config) -> Sequence[Claims]:  # noqa: ARG001  whatever the settings
    """Return the checks that a run must contain, so that a missing one is noticed."""
    gather = "test_a_wrong_gather_fails_its_check"
    return (
        Claims(("called bytes",), fails_in=gather),
        Claims(("gathered",), times=EPOCHS, fails_in=gather),
        Claims(("shards",), one=True, times=EPOCHS),
        Claims(("by hand",), one=True, times=EPOCHS, fails_in="test_shards_of_blocks_fail_their_checks"),
        Claims(("reshuffled",), one=True),
    )


# --- classic bugs, injected by LAB_BUG ---

mistake = Mistakes()


@mistake("no_set_epoch", check="reshuffled", part="begin_epoch", needs=Needs(ranks=1, proof=False))
def epoch_not_set(sampler: Any, epoch: int) -> None:
    """set_epoch is never called: every epoch has the same shards in the same order."""


@mistake("no_sampler", check="shards", part="sampler_of", needs=Needs(proof=False))
def whole_data_set(rank: int, world_size: int) -> Sampler[Any]:  # noqa: ARG001  the same on every rank
    """Every rank loads the whole data set: each sample is used N times per epoch."""
    return RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(SEED))


MODE = Mode(
    variants=(Variant("plain", by_name=True, sentence="The lesson's sampler in the place of PyTorch's."),),
    run=run,
    claims=claims,
    title=lambda config: f"DistributedSampler, {LENGTH} samples",  # noqa: ARG005
    predict=predict,
    refuse=untrained,  # whatever the sizes are
    mistakes=mistake,
    unsaved="trains nothing that could be saved",
    in_lesson={
        "no_set_epoch": ("self.epoch = epoch", "pass"),
        "no_sampler": ("iter(order[self.rank :: self.ranks])", "iter(order)"),
    },
    reading=(
        "experiments/train/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/train/__init__.py: the sampler by hand and PyTorch's, two epochs, and the checks of all shards",
    ),
)
