"""Buffers: what a model carries beside its weights, a mask, a table of frequencies, a running mean.

No gradient reaches them, so no gradient shows by itself that they are wrong. What one process leaves as it was is to be
so on every rank, to the bit; what its forward pass writes comes from the samples that it saw, and a rank has seen
others: that is held where the ranks make it one process's, and else said, not counted as wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workers.cluster import name_ranks
from workers.prove.held import local, plain_name

BUFFERS = "buffers"
ROUNDED = 1e-11  # of the largest value of a buffer


class Kept(NamedTuple):
    """The buffers of a process, by name, before the first step and after the last."""

    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]


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
        moved = [rank for rank, mine in held.items() if not same(mine.start[name], mine.end[name])]
        if moved and same(start, dense.end[name]):
            yield f"{name}, a buffer that one process leaves as it was, changes on {name_ranks(moved)}", moved


def written(ranks: Sequence[Kept], dense: Kept) -> list[tuple[str, list[int]]]:
    """Buffers that one process's forward pass writes, each with the ranks that end with other numbers."""
    return [
        (name, [rank for rank, mine in enumerate(ranks) if name in mine.end and not near(mine.end[name], end)])
        for name, end in dense.end.items()
        if not same(dense.start[name], end)
    ]


def begins_otherwise(found: Tensor, dense: Tensor) -> bool:
    """Whether a buffer of the model's shape has other numbers: one that is cut may be a rank's own."""
    return found.shape == dense.shape and not same(found.to(dense.dtype), dense)


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, whatever bits stand for no number."""
    bits = (each.detach().contiguous().flatten().view(torch.uint8) for each in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def near(one: Tensor, other: Tensor) -> bool:
    """Within what rounding may change."""
    if one.shape != other.shape:
        return False
    largest = max(1.0, other.double().abs().max().item() if other.numel() else 0.0)
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=ROUNDED * largest, equal_nan=True)


def shown(tensor: Tensor) -> str:
    """Its first numbers."""
    return ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())
