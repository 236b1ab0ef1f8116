"""Who gets which samples: DistributedSampler, its arithmetic by hand, and what it does where N leaves a rest.

Every rank shuffles all indices alike, by (seed, epoch), and takes each N-th of them, starting at its own rank. No rank
asks another: the shards are disjoint because all ranks drew the same order. Two things are easily missed:

  set_epoch   the epoch is part of the seed. Without it every epoch deals the same shards in the same order
  padding     shards must be equally long, or a collective would wait for a rank that has finished. Where N does not
              divide the length, the first samples of the order are dealt again: "no overlap" is then not quite true

  shapes      indices [ceil(1000 / N)] a rank; a batch [4] a rank; gathered [4 N]
  predicted   the all_gather of a batch sends (N-1) x 4 x 8 B a rank, over again for each of the two epochs
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
    """The lesson's data: sample i is the number i, so that one sees who got what."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def by_hand(epoch: int, rank: int, world_size: int) -> list[int]:
    """The sampler by hand, the indices of `rank`: each N-th of the epoch's order, begun again to fill the rest."""
    order: list[int] = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    return (order + repeats(order, world_size))[rank::world_size]


def repeats(order: list[int], world_size: int) -> list[int]:
    """The samples that are dealt twice, so that all shards are equally long."""
    return order[: -LENGTH % world_size]


def pytorchs(rank: int, world_size: int) -> Sampler[Any]:
    """PyTorch's own, as in the lesson."""
    return DistributedSampler(Numbers(), num_replicas=world_size, rank=rank, shuffle=True, seed=SEED)


def on_one_page(rank: int, world_size: int) -> Sampler[Any]:
    """The lesson's, which LAB_VARIANT=plain deals by."""
    return lesson.DistributedSampler(LENGTH, rank, world_size, SEED)  # type: ignore[return-value]


# --- the run ---

# Parts that a mistake replaces: which sampler a rank has, and how it hears of an epoch.
MakeSampler: TypeAlias = Callable[[int, int], Sampler[Any]]
BeginEpoch: TypeAlias = Callable[[Any, int], None]


def told(sampler: Any, epoch: int) -> None:
    """Of the epoch that begins, where it asks for it: a sampler that deals all to everyone does not."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def predict(config: Config) -> list[Prediction]:
    """Bytes of the all_gathers of the whole lesson."""
    value = float(EPOCHS * (config.world_size - 1) * BATCH * 8)
    return [Prediction("", "called bytes", "B", "2 x (N-1) x 4 x 8 B", (value,) * config.world_size, EPOCHS)]


def run(lab: Lab, sampler_of: MakeSampler = pytorchs, begin_epoch: BeginEpoch = told) -> None:
    """The lesson's two epochs, then what is true of all their shards."""
    if "plain" in lab.config.variant and sampler_of is pytorchs:
        sampler_of = on_one_page
    prediction = predict(lab.config)[0]
    lab.say(f"two all_gathers send {prediction.formula} = {prediction.value[0]:g} B a rank", "predict")
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
    lab.hold_one(prediction, traffic.called_bytes)
    everyone = lab.exchange.gather("shards", epochs)
    if everyone is not None:
        check(lab, everyone)


def show(lab: Lab, epoch: int, batch: Tensor) -> None:
    """The lesson's computation on the first batch, gathered on all ranks, and its printed lines."""
    data = batch.to(lab.device)
    result, gathered = computed(lab, data)
    lab.note("I get", f"epoch {epoch}, batch 0")
    for name, tensor in {"Local data": data, "Local result": result, "Gathered result": gathered}.items():
        lab.note("", f"{name}: {tensor.tolist()}, shape {list(tensor.shape)}")
    wanted = [
        sample * (rank + 1) for rank in range(lab.world_size) for sample in by_hand(epoch, rank, lab.world_size)[:BATCH]
    ]
    detail = "places that differ from rank + 1 times the samples of our own arithmetic"
    lab.check("gathered", places_apart(gathered.tolist(), wanted), 0, detail=detail)


def computed(lab: Lab, data: Tensor) -> tuple[Tensor, Tensor]:
    """Each rank's samples times its rank + 1: this rank's [4], and those of all ranks [4 N]."""
    result = data * (lab.rank + 1)
    gathered = [torch.zeros_like(result) for _ in range(lab.world_size)]
    dist.all_gather(gathered, result, group=lab.group)
    return result, torch.cat(gathered)


def check(lab: Lab, everyone: list[list[list[int]]]) -> None:
    """What holds of all shards; `everyone[rank][epoch]` lists the samples in the order in which they were dealt."""
    for epoch in range(EPOCHS):
        shards = [of_rank[epoch] for of_rank in everyone]
        wrong, twice = misdealt(shards)
        names = f"dealt twice, so that shards are equally long: {shorten(twice)}" if twice else "no sample dealt twice"
        lab.say(f"epoch {epoch}, shards of {len(shards[0])}: {names}")
        lab.check("shards", wrong, 0, detail=f"epoch {epoch}: samples left out, or dealt again without need; {names}")
        hand = [by_hand(epoch, rank, lab.world_size) for rank in range(lab.world_size)]
        detail = f"epoch {epoch}: places that differ from our own arithmetic"
        lab.check("by hand", sum(map(places_apart, shards, hand)), 0, detail=detail)
    first, second = everyone[0][:2]
    same = len(first) - places_apart(first, second)
    lab.check(
        "reshuffled",
        same / len(first),
        0.1,
        detail=f"{same} of {len(first)} places hold the same sample in both epochs",
    )


def misdealt(shards: list[list[int]]) -> tuple[int, list[int]]:
    """Samples that are missing or dealt more often than padding needs, and which were dealt more than once."""
    times = Counter(sample for shard in shards for sample in shard)
    surplus = times.total() - LENGTH - (-LENGTH % len(shards))
    return LENGTH - len(times) + abs(surplus), [sample for sample, count in times.items() if count > 1]


def places_apart(one: list[int], other: list[int]) -> int:
    """At how many places two lists differ."""
    return sum(a != b for a, b in zip_longest(one, other))


def shorten(samples: list[int]) -> str:
    """At most the first seven, which is all that padding can need on 8 ranks."""
    return ", ".join(map(str, samples[:7])) + (f" and {len(samples) - 7} more" if len(samples) > 7 else "")


def claims(mode: Mode, config: Config) -> Sequence[Claims]:  # noqa: ARG001  whatever the settings
    """What a run has to claim, so that a check that vanishes is missed."""
    gather = "test_a_wrong_gather_fails_by_name"
    return (
        Claims(("called bytes",), fails_in=gather),
        Claims(("gathered",), times=EPOCHS, fails_in=gather),
        Claims(("shards",), one=True, times=EPOCHS),
        Claims(("by hand",), one=True, times=EPOCHS, fails_in="test_shards_of_blocks_fail_by_name"),
        Claims(("reshuffled",), one=True),
    )


# --- the classic mistakes, made on purpose by LAB_BUG ---

mistake = Mistakes()


@mistake("no_set_epoch", check="reshuffled", part="begin_epoch", needs=Needs(ranks=1, proof=False))
def untold(sampler: Any, epoch: int) -> None:
    """The sampler is never told the epoch: every epoch deals the same shards in the same order."""


@mistake("no_sampler", check="shards", part="sampler_of", needs=Needs(proof=False))
def unsampled(rank: int, world_size: int) -> Sampler[Any]:  # noqa: ARG001  the same, whoever asks
    """Every rank loads the whole data set: each sample is trained on N times an epoch."""
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
        "experiments/train/__init__.py: the sampler by hand and PyTorch's, two epochs, and what holds of all shards",
    ),
)
