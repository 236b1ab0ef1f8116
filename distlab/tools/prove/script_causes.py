"""Explain why a script's gradients differ from one rank's: a phrase after "gradients of X are ...".

The optimizer's gradients and one rank's are both expressed as sums of all ranks' backward passes before any reduction.
Their comparison gives the cause: only a rank's own samples, one factor for all, each rank divided by its own number of
terms.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.lab.cluster import name_ranks
from distlab.tools.prove.locate import Place

CLOSE = 2e-3  # relative, for coefficients
MOST_ELEMENTS = 2048  # of a tensor that are used for solving
SHOWN = 4

Source = tuple[int, int]  # a rank and its backward pass


class StepData(NamedTuple):
    """One step: each rank's records and tensor positions, and the reference's full gradients."""

    ranks: Sequence[Mapping[str, Any]]
    places: Sequence[Mapping[str, Place]]
    dense: Mapping[str, Tensor]
    local: Mapping[str, Tensor]  # the reference's, before clipping
    outputs: Mapping[str, Any]  # of the reference's modules, in the first step
    gathered: str  # where tensors were gathered in a forward pass, if anywhere

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gradient(self, rank: int, name: str) -> Tensor | None:
        found = self.ranks[rank]["gradients"].get(name)
        return None if found is None else found[2].double()

    def wanted(self, rank: int, name: str) -> Tensor:
        place = self.places[rank][name]
        shape = self.ranks[rank]["before"][name][2].shape
        return place.of(self.dense[place.name], shape).double()


def cause(step: StepData, rank: int, names: Sequence[str]) -> str:
    """Return why these wrong gradients of a rank are what they are."""
    if any(step.places[rank][name].name not in step.dense for name in names):
        return "present, but one rank has none: its loss does not depend on them"
    if any(step.gradient(rank, name) is None for name in names):
        return "missing when the optimizer steps, but one rank has them: no forward pass used them, or zero_grad came"
    whole = [name for name in names if is_whole(step, name)]
    if whole and len(whole) == len(names):
        found = in_sums(step, rank, whole)
        if found:
            return found
    known = scaled(step, rank, names) or parts_of_sum(step, rank, names)
    return known or f"no sum of the gradients of the ranks' samples{first_wrong_module(step, rank)}"


def first_wrong_module(step: StepData, rank: int) -> str:
    """Return the first module whose input equals one rank's and whose output does not, with its excess."""
    mine = step.ranks[rank]
    for name, (input_hash, found) in mine["outputs"].items():
        wanted_hash, wanted = step.outputs.get(name, (0, found))
        rounded = CLOSE * float(wanted.abs().max())
        if input_hash != wanted_hash or found.shape != wanted.shape or float((found - wanted).abs().max()) <= rounded:
            continue
        more = (found - wanted).double()
        for own, (_, shape, tensor) in mine["before"].items():
            if own.startswith(name) and len(shape) == 1 and shape[0] == found.shape[-1]:
                times = ratio(more, tensor.double().expand_as(more))
                if times is not None:
                    return (
                        f"; the forward pass first differs at {name or 'the model'}, whose output contains {own}"
                        f" {times + 1:.4g} times: add it once, after the sum over the ranks"
                    )
        return f"; the forward pass first differs at {name or 'the model'}"
    return ""


def is_whole(step: StepData, name: str) -> bool:
    """Return whether every rank has all of it, and has reported its own part of the gradient."""
    return all(
        name in places and places[name].rows.dim < 0 and not places[name].begin and record["parts"].get(name)
        for places, record in zip(step.places, step.ranks, strict=True)
    )


def in_sums(step: StepData, rank: int, names: Sequence[str]) -> str:
    """Explain it by how often each rank's backward passes count in it."""
    sources: list[Source] = sorted(
        {(each, index) for name in names for each in range(step.size) for index, _ in step.ranks[each]["parts"][name]}
    )
    found, wanted, columns = [], [], []
    for name in names[:64]:
        gradient = step.gradient(rank, name)
        assert gradient is not None
        every = max(1, gradient.numel() // MOST_ELEMENTS)
        by_index = [dict(record["parts"][name]) for record in step.ranks]
        nothing = torch.zeros_like(gradient)
        found.append(gradient.flatten()[::every])
        wanted.append(step.wanted(rank, name).flatten()[::every])
        parts = [by_index[each].get(index, nothing).double().flatten()[::every] for each, index in sources]
        columns.append(torch.stack(parts, 1))
    table = torch.cat(columns)
    counts = solved(table, torch.cat(found))
    target = solved(table, torch.cat(wanted))
    times = ratio(torch.cat(found), torch.cat(wanted))
    if counts is None:
        return ""
    mine = dict(zip(sources, counts, strict=True))
    used = {each for (each, _), value in mine.items() if abs(value) > CLOSE * max(map(abs, counts))}
    if step.size > 1 and used == {rank}:
        return f"those of rank {rank}'s own samples alone: never averaged over the {step.size} ranks"
    if len(used) < step.size and used:
        left = sorted(set(range(step.size)) - used)
        return f"without the samples of {name_ranks(left)}: they were never added to the sum"
    if times is not None:
        return factor(step, times)
    if target is None:
        return ""
    return weighted(step, sources, counts, target)


def solved(table: Tensor, found: Tensor) -> list[float] | None:
    """Return how often each column is in it; None if it is no sum of them, or not a unique one."""
    if table.shape[0] < table.shape[1]:
        return None
    scale = table.norm(dim=0).clamp_min(1e-30)
    answer = torch.linalg.lstsq(table / scale, found[:, None], driver="gelsd", rcond=1e-6)
    if int(answer.rank) < table.shape[1]:
        return None
    rest = (table / scale @ answer.solution - found[:, None]).norm()
    return (answer.solution.flatten() / scale).tolist() if rest <= CLOSE * found.norm() else None


def ratio(found: Tensor, wanted: Tensor) -> float | None:
    """Return the factor between two tensors, if there is one."""
    square = float((wanted * wanted).sum())
    if not square or not torch.isfinite(found).all():
        return None
    times = float((found * wanted).sum()) / square
    return times if (found - times * wanted).norm() <= CLOSE * found.norm() else None


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE)


def factor(step: StepData, times: float) -> str:
    """Return a sentence on one factor for all of it."""
    size = step.size
    if close(times, size):
        return (
            f"{times:.4g} x those of one rank: summed over the {size} ranks and never divided, or the loss was summed"
            " over the ranks before its backward pass (its gradient is summed there as well)"
        )
    if close(times * size, 1) and step.gathered:
        return (
            f"{times:.4g} x those of one rank: each rank's loss uses the other ranks' tensors, gathered at"
            f" {step.gathered}, but no gradient flows back to those ranks; gather with"
            " torch.distributed.nn.functional.all_gather, or sum the gradients instead of averaging them"
        )
    if close(times * size, 1):
        return f"{times:.4g} x those of one rank: divided by the {size} ranks once too often, or never summed"
    if close(times, size**2) or close(times * size**2, 1):
        return f"{times:.4g} x those of one rank: scaled twice by the {size} ranks"
    return f"{times:.4g} x those of one rank"


def weighted(step: StepData, sources: Sequence[Source], counts: Sequence[float], target: Sequence[float]) -> str:
    """Return a sentence if each source has its own factor: a mean of means, or wrongly weighted microbatches."""
    factors = [one / other if other else math.inf for one, other in zip(counts, target, strict=True)]
    by_rank = {
        each: [value for (of, _), value in zip(sources, factors, strict=True) if of == each] for each, _ in sources
    }
    if any(max(values) - min(values) > CLOSE * max(map(abs, values)) for values in by_rank.values()):
        shown = ", ".join(
            f"backward pass {index} of rank {each} counts {value:.3f} times"
            for (each, index), value in list(zip(sources, factors, strict=True))[:SHOWN]
        )
        return f"weighted by backward pass: {shown}; on one rank each counts once"
    times = {each: values[0] for each, values in by_rank.items()}
    worst = max(times, key=lambda each: abs(math.log(max(abs(times[each]), 1e-9))))
    equal = max(counts) - min(counts) <= CLOSE * max(map(abs, counts))
    terms = matching_terms(step, {each: value for (each, _), value in zip(sources, target, strict=True)})
    if not equal and not terms:
        shown = ", ".join(f"rank {each}'s {value:.3f} times" for each, value in list(times.items())[:SHOWN])
        return f"weighted by rank: the samples count: {shown}; on one rank each counts once"
    what, numbers = terms or ("terms", ())
    own = f" ({', '.join(map(str, numbers))})" if numbers else ""
    return (
        f"a mean of the ranks' means: each rank divides by its own {what}{own}, and the average by {step.size}, so"
        f" samples of rank {worst} count {times[worst]:.3g} times; divide by the {what} of all ranks, and multiply by"
        f" {step.size}"
    )


def matching_terms(step: StepData, target: Mapping[int, float]) -> tuple[str, tuple[int, ...]] | None:
    """Return what the ranks have in these proportions: samples, or tokens that are not padding."""
    for what in step.ranks[0]["terms"]:
        numbers = tuple(int(record["terms"].get(what, 0)) for record in step.ranks)
        if sum(numbers) and max(numbers) > min(numbers):
            expected = [number * sum(target.values()) / sum(numbers) for number in numbers]
            if all(math.isclose(target[each], size, rel_tol=0.02) for each, size in enumerate(expected)):
                return what.partition(" of ")[0].replace("non-zeros", "tokens"), numbers
    return None


def scaled(step: StepData, rank: int, names: Sequence[str]) -> str:
    """Return a sentence on one factor for each: the number of ranks, or a common clipping norm."""
    found = {name: ratio(gradient_of(step, rank, name), step.wanted(rank, name)) for name in names}
    if None in found.values():
        return ""
    values = [value for value in found.values() if value is not None]
    if max(values) - min(values) > CLOSE * max(map(abs, values)):
        shown = ", ".join(f"{name} {value:.4g} x" for name, value in list(found.items())[:SHOWN])
        return f"each scaled by a different factor: {shown} those of one rank"
    some = len(names) < len(step.places[rank])
    if some and close(values[0], step.size):
        return f"{values[0]:.4g} x those of one rank: counted once per rank, on each of the {step.size} ranks"
    return factor(step, values[0]) if some else clipped(step, rank, values[0]) or factor(step, values[0])


def gradient_of(step: StepData, rank: int, name: str) -> Tensor:
    found = step.gradient(rank, name)
    assert found is not None
    return found


def clipped(step: StepData, rank: int, times: float) -> str:
    """Return a sentence if all of a rank's gradients were clipped by another norm than the whole model's."""
    squares = {name: float(each.double().square().sum()) for name, each in step.local.items()}
    norm = math.sqrt(sum(squares.values()))
    clip = math.sqrt(sum(float(each.double().square().sum()) for each in step.dense.values()))
    if not squares or not norm or close(norm, clip):
        return ""
    copies = {place.name: name for name, place in step.places[rank].items() if place.rows.dim < 0 and not place.begin}
    twice = math.sqrt(sum(squares.values()) + (step.size - 1) * sum(squares.get(name, 0.0) for name in copies))
    if len(copies) < len(squares) and close(times, norm / twice):
        return (
            f"{times:.4g} x those of one rank: the norm that clips them is {twice / norm:.4g} times too large, since it"
            f" counts replicated parameters once per rank ({', '.join(list(copies.values())[:SHOWN])}); add the square"
            " of each once"
        )
    own = math.sqrt(sum(
        float(place.of(step.local[place.name], step.ranks[rank]["before"][name][2].shape).double().square().sum())
        for name, place in step.places[rank].items() if place.name in step.local
    ))  # fmt: skip
    if own and own < norm and close(times, norm / own):
        return (
            f"{times:.4g} x those of one rank: each rank clips by the norm of its own part ({own:.4g}; that of all is"
            f" {norm:.4g}); sum the squares over the ranks before the root"
        )
    return ""


def parts_of_sum(step: StepData, rank: int, names: Sequence[str]) -> str:
    """Return a sentence if the ranks' tensors add up to it."""
    for name in names[:1]:
        found = [step.gradient(each, name) for each in range(step.size)]
        tensors = [each for each in found if each is not None]
        if len(tensors) < step.size or any(each.shape != tensors[0].shape for each in tensors):
            return ""
        times = ratio(torch.stack(tensors).sum(0), step.wanted(rank, name))
        if times is not None and (close(times, 1) or close(times, step.size)):
            how = "summed" if close(times, 1) else "averaged"
            return (
                f"only a part on each rank: those of {name_ranks(list(range(step.size)))} were never {how}, so the"
                " ranks' replicas diverge"
            )
    return ""
