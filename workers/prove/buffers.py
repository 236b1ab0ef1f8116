"""Buffers: what a model carries beside its weights, a mask, a table of frequencies, a running mean.

No gradient reaches them, so no gradient shows by itself that they are wrong. What one process leaves as it was is to be
so on every rank, to the bit. What its forward pass writes comes from the samples that it saw, and a rank has seen
others: there a rank has to end with what one process has, or with what one process would make of the rank's own
microbatches, one after another. All else is named.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workers.cluster import name_ranks
from workers.measure.difference import factor
from workers.measure.hashing import raw
from workers.prove.held import local, plain_name

BUFFERS = "buffers"
ROUNDED = 1e-11  # of the largest value of a buffer


class Kept(NamedTuple):
    """The buffers of a process, by name, before the first step and after the last."""

    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    own: Mapping[str, Tensor]  # what one process would make of this rank's samples alone
    uncompared: str = ""  # why those that are written say nothing about this rank


def of(model: nn.Module) -> dict[str, Tensor]:
    """As they are now, wrappers left out of their names."""
    return {plain_name(name): local(each).clone() for name, each in model.named_buffers(remove_duplicate=False)}


def wrong(ranks: Sequence[Kept], dense: Kept) -> Iterator[tuple[str, list[int]]]:
    """Sentences for what one process leaves as it was and ranks do not, each with the ranks."""
    for name, start in dense.start.items():
        held = {rank: mine for rank, mine in enumerate(ranks) if name in mine.start and name in mine.end}
        other = [rank for rank, mine in held.items() if begins_otherwise(mine.start[name], start)]
        if other:
            wrong = held[other[0]].start[name].double()
            sentence = (
                f"{name}, a buffer, begins with other numbers on {name_ranks(other)} than the model's"
                f" ({shown(wrong)}, not {shown(start)}): no state_dict has it where it is not persistent, and to_empty"
                " leaves what was in memory"
            )
            yield sentence, other
            continue
        if same(start, dense.end[name]):
            moved = [rank for rank, mine in held.items() if not same(mine.start[name], mine.end[name])]
            if moved:
                yield (
                    f"{name}, a buffer that one process leaves as it was, changes on {name_ranks(moved)}; what"
                    " train_step means to write, as an average of weights, after_step(model) beside it says",
                    moved,
                )
            continue
        odd = [rank for rank, mine in held.items() if not mine.uncompared and not explained(name, mine, dense)]
        if odd:
            mine = held[odd[0]]
            yield (
                f"{name}, a buffer that one process writes, ends as {shown(mine.end[name])} on rank {odd[0]}, which is"
                f" neither one process's {shown(dense.end[name])} nor what it makes of this rank's samples,"
                f" {shown(mine.own[name])}{times(start, mine.end[name], mine.own[name])} (on {name_ranks(odd)})",
                odd,
            )


def written(ranks: Sequence[Kept], dense: Kept) -> Iterator[str]:
    """Of each buffer that one process writes a sentence: whether ranks have the same, and why not."""
    for name, end in dense.end.items():
        if same(dense.start[name], end):
            continue
        held = {rank: mine for rank, mine in enumerate(ranks) if name in mine.end}
        reasons = {rank: mine.uncompared for rank, mine in held.items() if mine.uncompared}
        others = [rank for rank, mine in held.items() if rank not in reasons and not near(mine.end[name], end)]
        said = f"as one process makes them of their own samples on {name_ranks(others)}" if others else ""
        said = said or ("as in one process on all others" if reasons else "as in one process on all ranks")
        more = f"; not compared on {name_ranks(list(reasons))}: {next(iter(reasons.values()))}" if reasons else ""
        yield f"{name} is written by the steps: {said}{more}"


def explained(name: str, mine: Kept, dense: Kept) -> bool:
    """Whether a rank ends with what one process has, or with what it would make of the rank's samples."""
    return near(mine.end[name], dense.end[name]) or near(mine.end[name], mine.own[name])


def times(start: Tensor, found: Tensor, wanted: Tensor) -> str:
    """How many times as far it went as it had to, where it is that."""
    if found.shape != wanted.shape or start.shape != wanted.shape:
        return ""
    far = factor(found.double() - start.double(), wanted.double() - start.double())
    return f": it moved {far:.4g} x as far" if far else ""


def begins_otherwise(found: Tensor, dense: Tensor) -> bool:
    """Whether a buffer of the model's shape has other numbers: one that is cut may be a rank's own."""
    return found.shape == dense.shape and not same(found.to(dense.dtype), dense)


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, whatever bits stand for no number."""
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def near(one: Tensor, other: Tensor) -> bool:
    """Within what rounding may change."""
    if one.shape != other.shape:
        return False
    largest = max(1.0, other.double().abs().max().item() if other.numel() else 0.0)
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=ROUNDED * largest, equal_nan=True)


def shown(tensor: Tensor) -> str:
    """Its first numbers."""
    return ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())
