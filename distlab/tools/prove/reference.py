"""The single process: the whole batch, plain SGD in float64, and the order of parameters in its backward pass."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distlab.lab.cluster import name_ranks
from distlab.lab.measure.tensors import factor, raw
from distlab.lab.workload.data import Batches, Microbatch, shard_sizes
from distlab.lab.workload.reference import OneProcess, Snapshot, backward, fill, plain
from distlab.tools.prove.locate import CPU, local, plain_name
from distlab.tools.prove.user_file import Refused, UserFile

# The whole batch of a step, and each rank's microbatches of it, uneven if the batch allows it.
#
# Equal parts hide a mean of means: a loss averaged over a rank's samples, or a microbatch's tokens, is right with them
# and wrong otherwise. A file whose strategy needs equal parts sets `even = True`.


class BatchSplit:
    """The batches of a proof, distributed along the axis dp, on the model's `device`."""

    def __init__(self, file: UserFile, num_shards: int, device: torch.device = CPU) -> None:
        self.file, self.num_shards, self.device = file, num_shards, device
        config = file.config
        self._batches = Batches(config, proof=True, device=device, dtype=torch.float64)
        self.even = bool(file.found.get("even", False))

    def whole(self, step: int) -> Microbatch:
        inputs, targets = self._from_file(step) if "batch" in self.file else self._batches.full(step)[:2]
        terms = self.file.terms(targets)
        if terms < 1:
            raise Refused(f"batch({self.file.config.seed}, {step}) has no loss term: all of its targets are padding")
        return Microbatch(inputs, targets, 1 / terms)

    def microbatches(self, step: int, shard: int) -> list[Microbatch]:
        """Return the microbatches of one shard."""
        inputs, targets, share = self.whole(step)
        sizes = self.sizes(len(inputs))
        start = sum(sum(each) for each in sizes[:shard])
        parts = []
        for size in sizes[shard]:
            parts.append(Microbatch(inputs[start : start + size], targets[start : start + size], share))
            start += size
        return parts

    def sizes(self, batch: int) -> list[list[int]]:
        """Return the samples of each microbatch of each shard; raises Refused if they cannot be distributed."""
        shards, parts = self.num_shards, self.file.config.num_microbatches
        if self.even and batch % (shards * parts):
            raise Refused(
                f"a batch of {batch} samples is no multiple of {shards} shards x {parts} microbatches, which the file's"
                " even = True requires"
            )
        if batch < shards:
            raise Refused(f"a batch of {batch} samples is smaller than its {shards} shards: every rank needs a sample")
        uneven = not self.even
        of_shards = shard_sizes(batch, shards, uneven=uneven)
        return [shard_sizes(size, min(parts, size), uneven=uneven) for size in of_shards]

    def _from_file(self, step: int) -> tuple[Tensor, Tensor]:
        seed = self.file.config.seed
        found = self.file["batch"](seed, step)
        parts = found if isinstance(found, tuple | list) else []
        two = len(parts) == 2 and all(isinstance(each, Tensor) for each in parts)
        if not two or len(parts[0]) != len(parts[1]):
            each_shown = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in parts]
            shown = each_shown if parts is found else type(found).__name__
            raise Refused(
                f"batch({seed}, {step}) returned {shown}: expected inputs and targets, two tensors of equally many"
                " samples"
            )
        inputs, targets = (each.double() if each.is_floating_point() else each for each in found)
        return inputs.to(self.device), targets.to(self.device)


# Buffers: a model's tensors that are no parameters, such as a mask, a frequency table or a running mean.
#
# No gradient reaches them, so gradients do not show errors in them. Buffers that one process does not change must not
# change on any rank, to the bit. Buffers that its forward pass writes depend on the samples, which differ per rank:
# there a rank must end with one process's, or with what one process would get from the rank's own microbatches in
# order. Anything else is reported.

BUFFERS = "buffers"
ROUNDED = 1e-11  # relative to the largest value of a buffer


class Buffers(NamedTuple):
    """The buffers of a process, by name, before the first step and after the last."""

    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    own: Mapping[str, Tensor]  # one process's result from only this rank's samples
    uncompared: str = ""  # why written ones cannot be compared on this rank


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the current buffers, named without wrappers' parts."""
    return {plain_name(name): local(each) for name, each in model.named_buffers(remove_duplicate=False)}


def wrong_buffers(ranks: Sequence[Buffers], dense: Buffers) -> Iterator[tuple[str, list[int]]]:
    """Yield sentences for buffers that ranks change and one process does not, with the ranks."""
    for name, start in dense.start.items():
        stored = {rank: mine for rank, mine in enumerate(ranks) if name in mine.start and name in mine.end}
        whole = {rank: mine.start[name] for rank, mine in stored.items() if mine.start[name].shape == start.shape}
        other = [rank for rank, begun in whole.items() if not same(begun.to(start.dtype), start)]
        if other:  # of the model's shape: a sharded one may be the rank's own
            numbers = f"{first_values(whole[other[0]].double())}, not {first_values(start)}"
            yield (
                f"buffer {name} begins with other values on {name_ranks(other)} than the model's ({numbers}): a"
                " non-persistent buffer is in no state_dict, and to_empty leaves it uninitialized",
                other,
            )
            continue
        if same(start, dense.end[name]):
            moved = [rank for rank, mine in stored.items() if not same(mine.start[name], mine.end[name])]
            if moved:
                yield (
                    f"buffer {name} changes on {name_ranks(moved)}, but not in one process; if train_step updates it on"
                    " purpose, such as an average of weights, define after_step(model) to do the same in one process",
                    moved,
                )
            continue
        wrong_ranks = [
            rank for rank, mine in stored.items()
            if not mine.uncompared and not any(near(mine.end[name], end[name]) for end in (dense.end, mine.own))
        ]  # fmt: skip
        if wrong_ranks:
            mine = stored[wrong_ranks[0]]
            yield (
                f"buffer {name} ends as {first_values(mine.end[name])} on rank {wrong_ranks[0]}, but one process ends"
                f" with {first_values(dense.end[name])}, or {first_values(mine.own[name])} from this rank's samples"
                f" alone{distance(start, mine.end[name], mine.own[name])} (on {name_ranks(wrong_ranks)})",
                wrong_ranks,
            )


def changed_buffers(ranks: Sequence[Buffers], dense: Buffers) -> Iterator[str]:
    """Yield a sentence for each buffer that one process writes: whether ranks agree, and why not."""
    for name, end in dense.end.items():
        if same(dense.start[name], end):
            continue
        stored = {rank: mine for rank, mine in enumerate(ranks) if name in mine.end}
        reasons = {rank: mine.uncompared for rank, mine in stored.items() if mine.uncompared}
        others = [rank for rank, mine in stored.items() if rank not in reasons and not near(mine.end[name], end)]
        text = f"as by one process from their own samples on {name_ranks(others)}" if others else ""
        text = text or ("as in one process on all others" if reasons else "as in one process on all ranks")
        more = f"; not compared on {name_ranks(list(reasons))}: {next(iter(reasons.values()))}" if reasons else ""
        yield f"{name} is changed by the steps: {text}{more}"


def distance(start: Tensor, found: Tensor, wanted: Tensor) -> str:
    """Return by how much it changed relative to the right change, if that is a multiple."""
    if found.shape != wanted.shape or start.shape != wanted.shape:
        return ""
    far = factor(found.double() - start.double(), wanted.double() - start.double())
    return f": it changed {far:.4g} x as much" if far else ""


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether they are equal to the bit; any NaN equals any other."""
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    largest = max(1.0, other.double().abs().max().item() if other.numel() else 0.0)
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=ROUNDED * largest, equal_nan=True)


def first_values(tensor: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())


STEPS = 3


class Dense(NamedTuple):
    """The complete training of one process."""

    start: dict[str, Tensor]
    steps: list[Snapshot]
    order: list[str]  # in the backward pass
    buffers: Buffers = Buffers({}, {}, {})

    def before(self, step: int) -> dict[str, Tensor]:
        """Return the weights before a step."""
        return self.steps[step - 1].weights if step else self.start


def one_process(file: UserFile, split: BatchSplit) -> Dense:
    """Train in one process; raises Refused if nothing is trained."""
    model = file.model(file.config.seed)
    named = dict(model.named_parameters())
    start = {name: local(each) for name, each in named.items()}
    buffers = copy_buffers(model)
    order: list[str] = []
    hooks = [
        each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, each in named.items()
        if each.requires_grad
    ]
    one = OneProcess(model, plain(file.config, clip=file.found.get("clip")), loss=file.loss)
    steps = []
    for step in range(STEPS):
        one.step([split.whole(step)])
        for hook in hooks if step == 0 else ():
            hook.remove()
        file.after_step(model)
        steps.append(one.snapshot(CPU))
        if not steps[-1].gradients:
            raise Refused("the loss depends on no parameter of the model: nothing is trained")
    in_order = [*order, *(name for name in named if name not in order)]
    return Dense(start, steps, in_order, Buffers(buffers, copy_buffers(model), {}))


def by_own_samples(file: UserFile, dense: Dense, microbatches: Sequence[Sequence[Microbatch]]) -> dict[str, Tensor]:
    """Return the buffers of one process after only these microbatches of each step, with the right weights."""
    model = file.model(file.config.seed)
    for step, parts in enumerate(microbatches):
        fill(model, dense.before(step))
        for part in parts:
            file.loss(model, part.inputs, part.targets)
        fill(model, dense.steps[step].weights)
        file.after_step(model)
    return copy_buffers(model)


def contributions(
    file: UserFile, split: BatchSplit, weights: Mapping[str, Tensor], step: int, name: str
) -> dict[tuple[str, int, int], Tensor]:
    """Return the part of each microbatch of each shard in the gradient of one parameter, by use, shard and microbatch.

    A tied parameter has one use per name: the sum of all is its gradient.
    """
    model = file.model(file.config.seed)
    aliases = [alias for alias, canonical in names_of(model).items() if canonical == name]
    fill(model, weights)
    for alias in aliases[1:]:
        holder, _, last = alias.rpartition(".")
        own = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model.get_submodule(holder), last, own)
    found = {}
    for shard in range(split.num_shards):
        for index, part in enumerate(split.microbatches(step, shard)):
            backward(model, [part], None, file.loss)
            for alias in aliases:
                gradient = model.get_parameter(alias).grad
                found[alias, shard, index] = torch.zeros_like(weights[name]) if gradient is None else local(gradient)
    return found


def names_of(model: nn.Module) -> dict[str, str]:
    """Return all names of all parameters, each with the first name of a tied one."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found
