"""The numbers that a rank's log prints of one step, besides its calls and spans.

These are each call's numbers before and after, from the same position on every rank; one parameter's weight before and
after the update; and each rank's part of the loss. The position is chosen after the step, from numbers that all ranks
of the call have: the sum of an all_reduce, all parts of an all_gather, a message at both of its ends. In a
reduce_scatter each rank has its own sum, so it sends its position to the others, and they return their numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.contract import Strategy
from distlab.lab.lab import Lab
from distlab.lab.measure.memory import ContainerMemory
from distlab.lab.measure.samples import SHOWN, Copies, Sample, Samples, Stretch, place_of, stretch_of
from distlab.lab.report import records
from distlab.lab.report.story import SUMS
from distlab.techniques.collectives.sharded_tensor import LocalShard, whole_piece

ALLOWED_BYTES = 256 << 20  # of copies in a step
LIMIT_SHARE = 32  # of a container's memory limit: copies for 10.9M parameters under zero3 were 196 MB of 377
MATRIX = 2  # dimensions
LAYER = re.compile(r"layers\.(\d+)\.")

Storages = Mapping[tuple[int, int], Sequence["Part"]]
Parts = list[tuple["Part", int]]  # each with its start


class Part(NamedTuple):
    """A parameter, or its gradient, in a storage."""

    name: str
    offset: int
    numel: int
    is_matrix: bool


def allowed_bytes(limit_bytes: int | None) -> int:
    """Return how many bytes of calls' contents may be copied, with this memory limit of the container."""
    return ALLOWED_BYTES if limit_bytes is None else min(ALLOWED_BYTES, limit_bytes // LIMIT_SHARE)


class LoggedStep:
    """Records one step of a strategy: its samples, and the chosen parameter."""

    def __init__(self, strategy: Strategy) -> None:
        self.samples = Samples(getattr(strategy, "layers", {}), allowed_bytes(ContainerMemory().limit_bytes))
        self._strategy = strategy
        self.weight: Tensor | None = None  # the chosen parameter itself, not a copy
        self.name, self.shape, self.before, self.rate = "", list[int](), torch.empty(0), 0.0

    def on_phase(self, what: str, kind: str) -> None:
        """Before the update, choose the parameter and copy its numbers."""
        if (what, kind) == ("begin", "optimizer"):
            self._choose()

    def _choose(self) -> None:
        pieces = {name: piece_of(tensor) for name, tensor in weights_of(self._strategy)}
        own = {name: piece for name, piece in pieces.items() if piece.boxes and len(piece.shape) >= MATRIX} or pieces
        sums = {stretch.storage for each in self.samples.found if each.op in SUMS for stretch in each.inputs.stretches}
        parts = parts_of_storages(self._strategy)
        summed = {parameter_name(part.name) for storage in sums for part in parts.get(storage, ())}
        own = {name: piece for name, piece in own.items() if name in summed} or own
        inner = {name: piece for name, piece in own.items() if name.startswith("layers.1.")} or own
        sizes = {name: sum(box.numel() for _, box in piece.boxes) for name, piece in inner.items()}
        if sizes and max(sizes.values()):
            self.name = max(sizes, key=lambda name: sizes[name])
            piece = inner[self.name]
            self.shape, self.weight = list(piece.shape), piece.boxes[0][1].detach()
            self.before = self.weight.clone().reshape(-1)
            groups = getattr(getattr(self._strategy, "optimizer", None), "param_groups", [])
            self.rate = float(groups[0]["lr"]) if groups else 0.0


# --- a rank's parts of the model ---


def weights_of(strategy: Strategy) -> Iterator[tuple[str, Any]]:
    """Yield each parameter of which this rank has a part: a Tensor, a DTensor or a LocalShard."""
    state = strategy.state_dict() if hasattr(strategy, "state_dict") else {}
    for label, tensor in state.items():
        if label.startswith("weights."):
            yield label.removeprefix("weights."), tensor


def piece_of(tensor: Any) -> LocalShard:
    """Return the position of this rank's part in the dense parameter."""
    if isinstance(tensor, LocalShard):
        return tensor
    if not hasattr(tensor, "to_local"):
        return whole_piece(tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # exists if a DTensor does

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: Tensor = tensor.to_local()
    return LocalShard(tensor.shape, [(tuple(offset), local)] if local.numel() else [])


def parts_of_storages(strategy: Strategy) -> dict[tuple[int, int], list[Part]]:
    """Return the parameters or gradients in each storage, by its key and size: memory that was freed and reused in the
    step usually has another size."""
    found: dict[tuple[int, int], list[Part]] = defaultdict(list)

    def note(name: str, tensor: Any) -> None:
        piece = piece_of(tensor)
        for _, box in piece.boxes:
            stretch = stretch_of(box)
            parts = found[stretch.storage]
            if all(part.name != name for part in parts):
                parts.append(Part(name, stretch.offset, stretch.numel, len(piece.shape) >= MATRIX))

    for name, tensor in weights_of(strategy):
        note(name, tensor)
    for named_tensor in strategy.held("gradients") if hasattr(strategy, "held") else ():
        for tensor in (each for each in named_tensor if isinstance(each, Tensor | LocalShard)):
            note(f"gradient of {named_tensor[0]}", tensor)
    return found


# --- the position of the numbers, and the other ranks' ---


class Positions(NamedTuple):
    """The start of a call's sample in its input and output, and its parameter."""

    input: int = -1
    output: int = -1
    name: str = ""


def positions_of(sample: Sample, parts: Parts, chosen: str, me: int) -> Positions:
    """Return the positions in a call on this rank, the `me`-th of its group; equal on all its ranks, except in a
    reduce_scatter."""
    inputs, outputs = sample.inputs, sample.outputs or Copies(None, [])
    if sample.op == "all_to_all":
        return Positions()
    if sample.op == "all_gather":
        return gathered_position(inputs, outputs, parts, len(sample.ranks))
    source = outputs if outputs.numbers is not None else inputs
    if source.numbers is None:
        return Positions()
    part, start = part_to_show([(part, at) for part, at in parts if source.numbers[at : at + part.numel].any()], chosen)
    position = place_of(source.numbers, start, None if part is None else part.numel)
    name = "" if part is None else part.name
    if sample.op == "reduce_scatter":
        return Positions(me * source.numbers.numel() + position, position, name)
    return Positions(position if inputs.stretches else -1, position if outputs.numbers is not None else -1, name)


def gathered_position(inputs: Copies, outputs: Copies, parts: Parts, num_ranks: int) -> Positions:
    """Return the first position in a part where all ranks' parts have useful numbers."""
    if (
        outputs.numbers is None
        or inputs.numbers is None
        or outputs.numbers.numel() != num_ranks * inputs.numbers.numel()
    ):
        return Positions(0, -1) if inputs.numbers is not None else Positions()
    all_ranks = outputs.numbers.view(num_ranks, -1)
    position = place_of(torch.where(all_ranks == 1, 0, all_ranks.abs()).amin(0))
    name = next((part.name for part, start in parts if start <= position < start + part.numel), "")
    return Positions(position, 0, name)


def parts_of(samples: Sequence[Sample], storages: Storages) -> list[Parts]:
    """Return the parameters in each call. A call with unnamed memory gets those of another with the same label and
    size: a unit's reduced gradients are laid out as its gathered weights."""
    known: dict[tuple[str, int], Parts] = {}
    for sample in samples:
        if sample.label and (parts := list(parts_in(sample.inputs.stretches, storages))):
            known.setdefault((sample.label, length_of(sample.inputs)), parts)
    found = []
    for sample in samples:
        outputs = sample.outputs or Copies(None, [])
        source = (
            sample.inputs if sample.op == "all_gather" else outputs if outputs.numbers is not None else sample.inputs
        )
        found.append(list(parts_in(source.stretches, storages)) or known.get((sample.label, length_of(source)), []))
    return found


def parts_in(stretches: Sequence[Stretch], storages: Storages) -> Iterator[tuple[Part, int]]:
    """Yield the parameters in some tensors, each with its start in their concatenation."""
    before = 0
    for stretch in stretches:
        for part in storages.get(stretch.storage, ()):
            start = part.offset - stretch.offset
            if start >= 0 and start + part.numel <= stretch.numel:
                yield part, before + start
        before += stretch.numel


def part_to_show(parts: Parts, chosen: str) -> tuple[Part | None, int]:
    """Return the chosen parameter if it is there, else the first matrix; none for unnamed tensors."""
    ranked = [each for each in parts if parameter_name(each[0].name) == chosen] or [
        each for each in parts if each[0].is_matrix
    ]
    return next(iter([*ranked, *parts]), (None, 0))


def parameter_name(name: str) -> str:
    """Return the name of the parameter, also for its gradient."""
    return name.removeprefix("gradient of ")


def keys_of(calls: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return a name for each call [op, ranks, tag, start_s] of a rank that is the same on all ranks of its group: by
    the n-th collective of a group, and the n-th receive for the n-th send."""
    turns: dict[tuple[Any, ...], count[int]] = defaultdict(count)
    keys = list[tuple[Any, ...]]()
    for op, ranks, tag, _ in calls:
        kind = (op, *ranks, tag) if op in ("send", "recv") else ("", *ranks)
        keys.append((*kind, next(turns[kind])))
    return keys


def exchange_first_numbers(
    lab: Lab, label: str, samples: Sequence[Sample], positions: Sequence[Positions]
) -> list[dict[int, float]]:  # fmt: skip
    """Return for each call the first sample number of every rank: summands, or inputs. A collective."""
    keys = keys_of([[each.op, each.ranks, each.tag, 0.0] for each in samples])
    mine = [" ".join(map(str, key)) for key in keys]
    starts = [
        (key, position.output if sample.op == "reduce_scatter" else position.input)
        for key, sample, position in zip(mine, samples, positions, strict=True)
    ]
    remote_starts = [dict(each) for each in lab.exchange.everyone(f"positions in the calls of {label}", starts)]
    reported: list[list[float | None]] = []
    for sample, key, position in zip(samples, mine, positions, strict=True):
        requested = [position.input] * len(sample.ranks)
        if sample.op == "reduce_scatter":
            chunk = length_of(sample.inputs) // len(sample.ranks)
            requested = [index * chunk + remote_starts[rank].get(key, -1) for index, rank in enumerate(sample.ranks)]
        reported.append([number_at(sample.inputs, each) for each in requested])
    numbered = list(zip(mine, reported, strict=True))
    numbers = [dict(each) for each in lab.exchange.everyone(f"numbers of the calls of {label}", numbered)]
    found = []
    for sample, key in zip(samples, mine, strict=True):
        senders = [rank for rank in sample.ranks if rank >= 0 and lab.rank in sample.ranks and key in numbers[rank]]
        first = {rank: numbers[rank][key][sample.ranks.index(lab.rank)] for rank in senders}
        found.append({rank: value for rank, value in first.items() if value is not None})
    return found


def length_of(copies: Copies) -> int:
    return 0 if copies.numbers is None else copies.numbers.numel()


def number_at(copies: Copies, position: int) -> float | None:
    return (
        float(copies.numbers[position])
        if copies.numbers is not None and 0 <= position < copies.numbers.numel()
        else None
    )


# --- the record ---


def write_numbers(
    lab: Lab, name: str, step: int, logged: LoggedStep, loss_part: float | None, storages: Storages, shift_s: float
) -> None:  # fmt: skip
    """Write the step's record; all ranks call it together. `shift_s` converts `time.perf_counter` to seconds since the
    first rank began the step."""
    samples = logged.samples.found
    parts = parts_of(samples, storages)
    positions = [
        positions_of(each, within, logged.name, each.ranks.index(lab.rank) if lab.rank in each.ranks else 0)
        for each, within in zip(samples, parts, strict=True)
    ]
    numbers = exchange_first_numbers(lab, name, samples, positions)
    loss_parts = lab.exchange.everyone(f"parts of the loss of {name}", loss_part)
    rows = []
    for sample, position, within, of_ranks in zip(samples, positions, parts, numbers, strict=True):
        names = list(dict.fromkeys(parameter_name(part.name) for part, _ in within))
        before, after, first_numbers = numbers_before_and_after(sample, position, of_ranks)
        wait = [round(each + shift_s, 6) for each in sample.wait_s] if sample.wait_s else []
        rows.append(
            records.CallSample(
                sample.op, list(sample.ranks), sample.calls, sample.label, names,
                list(sample.shape), sample.inside, sample.backward, sample.at_once, wait,
                parameter_name(position.name), before, after, list(first_numbers.items()),
                round(sample.start_s + shift_s, 6), kept_numbers(sample, position),
            )
        )  # fmt: skip
    lab.journal.write(records.Told(name, step, rows, weight_of(logged, samples, positions, parts), loss_parts))


def kept_numbers(sample: Sample, position: Positions) -> list[float]:
    return [] if sample.kept is None else list(numbers_from(sample.kept, position.input))


def numbers_before_and_after(
    sample: Sample, position: Positions, of_ranks: dict[int, float]
) -> tuple[list[float], list[float], dict[int, float]]:  # fmt: skip
    """Return the numbers before and after; for an all_gather, after are each rank's inputs, for an all_to_all the parts
    sent to this rank."""
    outputs, ranks = sample.outputs or Copies(None, []), sample.ranks
    if sample.op == "all_gather":
        return sample.inputs.at(position.input), [], of_ranks
    if sample.op == "all_to_all" and outputs.numbers is not None and len(outputs.stretches) == len(ranks):
        starts = [sum(each.numel for each in outputs.stretches[:index]) for index in range(len(ranks))]
        of_ranks = {
            rank: value
            for rank, start, stretch in zip(ranks, starts, outputs.stretches, strict=True)
            if (value := number_at(outputs, place_of(outputs.numbers, start, stretch.numel))) is not None
            and stretch.numel
        }
    return sample.inputs.at(position.input), outputs.at(position.output), of_ranks


def weight_of(
    logged: LoggedStep, samples: Sequence[Sample], positions: Sequence[Positions], parts: Sequence[Parts]
) -> records.WeightSample | None:
    """Return the chosen parameter before and after the update, at the position of its gradient if that was sent."""
    if logged.weight is None:
        return None
    after, position, gradient = logged.weight.reshape(-1), -1, list[float]()
    for sample, sampled, within in zip(samples, positions, parts, strict=True):
        if sample.op in SUMS and sample.outputs is not None and parameter_name(sampled.name) == logged.name:
            start = next(start for part, start in within if parameter_name(part.name) == logged.name)
            position, gradient = sampled.output - start, sample.outputs.at(sampled.output)
    if position < 0:
        position = place_of(after)
    return records.WeightSample(
        logged.name,
        logged.shape,
        list(numbers_from(logged.before, position)),
        gradient,
        list(numbers_from(after, position)),
        logged.rate,
    )


def numbers_from(numbers: Tensor, position: int) -> list[float]:
    found: list[float] = numbers[position : position + SHOWN].tolist()
    return found
