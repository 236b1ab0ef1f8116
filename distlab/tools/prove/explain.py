"""Explain a wrong gradient by how often each rank's and microbatch's samples count in it.

A gradient is a sum over samples. So a wrong one is expressed as another sum of the same parts, by least squares over
each microbatch's gradient (and for a tied weight each of its uses): one factor for all is an error of scale, only the
rank's own part is a missing sum, only the last microbatch is an overwritten sum, and weights of 1 / a part's number of
terms are a mean of means. If it is no such sum, the sum over the neighbours along each axis of the mesh is tried.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from distlab.lab.cluster import name_ranks
from distlab.lab.measure.tensors import NEAR, factor
from distlab.tools.prove.locate import LocatedTensor

Part = tuple[str, int, int]  # the use of a tied parameter, the shard, the microbatch
Key = TypeVar("Key", bound=Hashable)
SHOWN = 4
UNEXPLAINED = "no sum of the samples' gradients"


class Context(NamedTuple):
    """The context of a wrong gradient."""

    rank: int
    shard: int  # of the rank, along dp
    axes: Mapping[str, int]  # sizes
    neighbours: Mapping[str, Sequence[int]]  # ranks along each axis, including this one
    terms: Mapping[tuple[int, int], int]  # loss terms of each microbatch of each shard
    world_size: int


def why(context: Context, found: Sequence[LocatedTensor | None], wanted: Tensor, parts: Mapping[Part, Tensor]) -> str:
    """Return a phrase after "gradients of X on rank r are ..."; `found` is by rank, `wanted` one process's."""
    mine = found[context.rank]
    assert mine is not None
    if mine.tensor is None:
        return "missing: .grad is None when the optimizer steps"
    if not torch.isfinite(mine.tensor).all():
        return "not finite (nan or infinite)"
    if not mine.tensor.any():
        return "zero"
    own = mine.tensor.double()
    target = mine.rows.of(wanted)
    counts = solve_counts(own, {part: mine.rows.of(each) for part, each in parts.items()})
    text = in_parts(context, counts) if counts is not None else ""
    times = factor(own, target)
    if not text and times is not None:
        text = scaled(context, times)
    return text or neighbours_have_rest(context, found, wanted) or in_rows(own, target) or UNEXPLAINED


def solve_counts(found: Tensor, parts: Mapping[Part, Tensor]) -> dict[Part, float] | None:
    """Return how often each part counts in `found`; None if it is no sum of them, or not a unique one."""
    columns = torch.stack([each.flatten() for each in parts.values()], dim=1)  # [numel, parts]
    if columns.shape[0] < columns.shape[1]:
        return None
    solved = torch.linalg.lstsq(columns, found.flatten()[:, None], driver="gelsy")
    if int(solved.rank) < columns.shape[1]:
        return None
    rest = (columns @ solved.solution - found.flatten()[:, None]).norm()
    if rest > NEAR * found.norm():
        return None
    return dict(zip(parts, solved.solution.flatten().tolist(), strict=True))


def in_parts(context: Context, counts: Mapping[Part, float]) -> str:
    values = list(counts.values())
    if equal(values):
        return scaled(context, sum(values) / len(values))
    if len({use for use, _, _ in counts}) > 1:
        return of_uses(counts)
    shards = grouped(counts, lambda part: part[1])
    if all(equal(each) for each in shards.values()):
        return of_shards(context, {shard: each[0] for shard, each in shards.items()})
    return of_microbatches(context, grouped(counts, lambda part: (part[1], part[2])))


def of_uses(counts: Mapping[Part, float]) -> str:
    uses = grouped(counts, lambda part: part[0])
    if all(equal(each) for each in uses.values()):
        shown = " and ".join(f"the use as {use} counts {times(each[0])}" for use, each in uses.items())
        return f"not the sum over the uses of a tied weight: {shown}"
    parts = grouped(counts, lambda part: (part[0], part[1]))
    texts = [f"{use} on shard {shard} {times(sum(each) / len(each))}" for (use, shard), each in parts.items()]
    return f"not the sum over the uses of a tied weight and the shards of dp: these count: {', '.join(texts)}"


def of_shards(context: Context, shards: Mapping[int, float]) -> str:
    used = [shard for shard, value in shards.items() if abs(value) > NEAR]
    terms = {shard: sum(context.terms[key] for key in context.terms if key[0] == shard) for shard in shards}
    if used == [context.shard]:
        value = shards[context.shard]
        scale = "" if near(value, 1) else f", {value:.3f} x"
        return f"those of this rank's own samples alone{scale}: never summed over the {len(shards)} ranks of dp"
    if len(used) < len(shards):
        left = [shard for shard in shards if shard not in used]
        return f"without the samples of shard {', '.join(map(str, left))} of dp: they were never added to the sum"
    if equal([value * terms[shard] for shard, value in shards.items()]):
        return (
            f"a mean of the ranks' means: {numbers(shards, 'shard')}; they have {joined(terms)} loss terms; divide by"
            " the terms of all ranks (share), or weight each rank by its number of terms"
        )
    return f"weighted by rank: {numbers(shards, 'shard')}"


def of_microbatches(context: Context, counts: Mapping[tuple[int, int], list[float]]) -> str:
    values = {key: each[0] for key, each in counts.items()}
    last = {key: max(other[1] for other in values if other[0] == key[0]) for key in values}
    only_last = all((abs(value) > NEAR) == (key[1] == last[key]) for key, value in values.items())
    if only_last:
        return "those of the last microbatch alone: the earlier ones were zeroed or overwritten"
    own = [key for key in values if key[0] == context.shard]
    if all(abs(values[key]) <= NEAR for key in values if key not in own):
        return "those of some of this rank's own microbatches alone: never summed over the ranks of dp"
    terms = {key: context.terms[key[0], key[1]] for key in values}
    if equal([value * terms[key] for key, value in values.items()]):
        return (
            f"a mean of the microbatches' means: this rank's have {joined({key: terms[key] for key in own})} loss"
            f" terms and count {joined({key: values[key] for key in own}, 'x')}; divide the sum over all microbatches"
            " by the number of their terms"
        )
    if not any(abs(values[key]) > NEAR for key in values if key[1] == 0):
        return "without the first microbatch of each rank"
    if {round(value, 6) for value in values.values()} <= {0.0, 1.0}:
        missing = [f"{key[1]} of shard {key[0]}" for key, value in values.items() if abs(value) <= NEAR]
        return f"without microbatch {', '.join(missing[:SHOWN])} of dp: it was added after the sum, or never"
    by_index = {key[1]: [value for other, value in values.items() if other[1] == key[1]] for key in values}
    if all(equal(each) for each in by_index.values()):
        each = ", ".join(f"microbatch {index} {times(found[0])}" for index, found in by_index.items())
        return f"weighted by microbatch: {each}"
    return "weighted: " + ", ".join(
        f"microbatch {key[1]} of shard {key[0]} {times(value)}" for key, value in list(values.items())[:SHOWN]
    ) + (", ..." if len(values) > SHOWN else "")  # fmt: skip


def scaled(context: Context, value: float) -> str:
    """Return a sentence on one factor for all, and what has that size."""
    known = [(f"the {size} ranks of {axis}", size) for axis, size in context.axes.items() if size > 1]
    if len(context.axes) > 1:
        known.append((f"all {context.world_size} ranks", context.world_size))
    microbatches = max(index for _, index in context.terms) + 1
    if microbatches > 1:
        known.append((f"the {microbatches} microbatches", microbatches))
    known.append((f"the {sum(context.terms.values())} loss terms", sum(context.terms.values())))
    more = " or ".join(what for what, size in known if near(value, size))
    if more:
        return f"{value:.3f} x one process's: summed over {more} once too often, or never divided by them"
    less = " or ".join(what for what, size in known if near(value * size, 1))
    if less:
        return f"{value:.4g} x one process's: divided by {less} once too often, or never summed over them"
    twice = " or ".join(what for what, size in known if near(value, size**2) or near(value * size**2, 1))
    return f"{value:.4g} x one process's" + (f": scaled twice by {twice}" if twice else "")


def neighbours_have_rest(context: Context, found: Sequence[LocatedTensor | None], wanted: Tensor) -> str:
    """Return a sentence if the neighbours along an axis have the rest of it."""
    mine = found[context.rank]
    assert mine is not None
    for axis, ranks in context.neighbours.items():
        row = [found[rank] for rank in ranks]
        tensors = [each.tensor.double() for each in row if each is not None and each.tensor is not None]
        if len(ranks) < 2 or len(tensors) < len(ranks) or any(each.shape != tensors[0].shape for each in tensors):
            continue
        times_all = factor(torch.stack(tensors).sum(0), mine.rows.of(wanted))
        if times_all is not None:
            scale = "" if near(times_all, 1) else f", {times_all:.3f} x"
            return (
                f"only a part: those of {name_ranks(list(ranks))} add up to one process's{scale}, but were never summed"
                f" over {axis}"
            )
    return ""


def in_rows(found: Tensor, wanted: Tensor) -> str:
    """Return where it is wrong, if some of it is right."""
    for dim in range(found.dim()):
        off = (found - wanted).movedim(dim, 0).reshape(found.shape[dim], -1).abs().amax(1) > NEAR * wanted.abs().max()
        wrong = off.nonzero().flatten().tolist()
        if 0 < len(wrong) < len(off):
            return f"wrong in only {len(wrong)} of {len(off)} rows along dim {dim}, the first is row {wrong[0]}"
    return ""


def blocks(found: Tensor, wanted: Tensor) -> list[tuple[range, float]]:
    """Return ranges of rows along dim 0 with their factors relative to the wanted ones, in order; zero rows join those
    before. Empty if a row is no multiple."""
    seen: list[tuple[range, float]] = []
    for row, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        if not mine.any() and not right.any():
            times_it = seen[-1][1] if seen else None
        else:
            times_it = factor(mine, right)
            if times_it is None:
                return []
        if seen and times_it is not None and near(times_it, seen[-1][1]):
            seen[-1] = range(seen[-1][0].start, row + 1), seen[-1][1]
        elif times_it is not None:
            seen.append((range(row, row + 1), times_it))
    return seen


def grouped(counts: Mapping[Part, float], key: Callable[[Part], Key]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for part, value in counts.items():
        found.setdefault(key(part), []).append(value)
    return found


def near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 * max(abs(other), NEAR)


def equal(values: Sequence[float]) -> bool:
    largest = max(map(abs, values))
    return largest <= NEAR or max(values) - min(values) <= 1e-5 * largest


def times(value: float) -> str:
    """Return "0.889 times", "not at all" or "once"."""
    return "not at all" if abs(value) <= NEAR else "once" if near(value, 1) else f"{value:.3f} times"


def numbers(values: Mapping[int, float], what: str) -> str:
    shown = ", ".join(f"{what} {key} counts {times(value)}" for key, value in list(values.items())[:SHOWN])
    return shown + (", ..." if len(values) > SHOWN else "")


def joined(values: Mapping[Any, float], unit: str = "") -> str:
    shown = [f"{value:.3f}{unit}" if isinstance(value, float) else str(value) for value in values.values()]
    return ", ".join(shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")
