"""Batches from a script's DataLoaders: recorded on N ranks, and replayed together on one rank.

A pass over a loader is identified by the script's line and its number there. The reference reads nothing itself: batch
b of a pass is what the N ranks read there, concatenated, and ranks that read the same samples count once. If a script
makes its batches itself, `distlab.batch(x, y)` around them counts as a pass.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.tools.check.watch.patches import Function, Patch, after, harmless, put
from distlab.tools.check.watch.replicas import checksum
from distlab.tools.prove.script_steps import ScriptSteps

MOST_READ_BYTES = 1 << 28
MOST_INDICES = 1_000_000
IGNORED = -100  # a target outside the loss


class NotCombinable(Exception):
    """Batches that cannot be combined; the message says why."""


class Unrecorded(Exception):
    """A batch after all that the ranks recorded."""


class Samples:
    """The batches of this process; `install` once. Without `replay` batches are recorded, else they come from it."""

    def __init__(self, steps: ScriptSteps, replay: "RecordedBatches | None" = None) -> None:
        self.steps, self.recorder, self.replay = steps, steps.recorder, replay
        self.passes: list[dict[str, Any]] = []
        self.lengths: dict[str, list[int]] = defaultdict(list)
        self._read = 0, 0  # backward passes, and samples since then
        self._turns = Counter[str]()
        self._bytes = 0
        self._by_hand: dict[str, dict[str, Any]] = {}

    def install(self) -> None:
        from torch.utils.data import dataloader

        reading = dataloader._BaseDataLoaderIter
        put(
            Patch(reading, "__next__", self._next),
            Patch(reading, "_next_index", after(self._record_indices)),
            Patch(dataloader.DataLoader, "__len__", self._length),
        )

    def _record_indices(self, indices: Any, loading: Any) -> None:
        loading.__dict__.setdefault("_distlab_drawn", []).append(indices)

    def _length(self, length: Function, loader: Any) -> int:
        """Return the length on the ranks, since schedules and loops depend on it."""
        line = self.recorder.places.line_of(2)
        turn = len(self.lengths[line])
        recorded = self.replay.length(line, turn) if self.replay else None
        self.lengths[line].append(length(loader) if recorded is None else recorded)
        return self.lengths[line][-1]

    def _pass(self, line: str, length: int) -> dict[str, Any]:
        found = {
            "line": line, "turn": self._turns[line], "length": length, "batches": 0, "ended": False, "indices": [],
            "hashes": [], "sizes": [], "begun": self.steps.all_backwards, "trains": False, "reduced": "",
        }  # fmt: skip
        self._turns[line] += 1
        self.passes.append(found)
        return found

    def _next(self, method: Function, loading: Any) -> Any:
        record = loading.__dict__.get("_distlab_pass")
        if record is None:
            whole, chosen = dataset_behind(loading._dataset)
            record = loading.__dict__["_distlab_pass"] = self._pass(self.recorder.places.line_of(2), size_of(whole))
            loading.__dict__["_distlab_chosen"] = chosen
        record["trains"] = record["trains"] or self.steps.all_backwards > record["begun"]
        try:
            fetch = partial(fetch_batch, loading)
            batch = self._replayed(record, fetch) if self.replay else method(loading)
        except StopIteration:
            record["ended"] = True
            loading.__dict__.pop("_distlab_pass")
            raise
        drawn = (loading.__dict__.get("_distlab_drawn") or [None]).pop(0)
        chosen = loading.__dict__["_distlab_chosen"]
        if chosen is not None and isinstance(drawn, list | tuple):
            record["indices"] += [int(chosen[index]) for index in drawn]
        return self._finish(record, batch, drawn)

    def batch(self, *tensors: Any) -> Any:
        """distlab.batch: return these tensors on the ranks, and those of all ranks in the reference."""
        line = self.recorder.places.line_of(1)
        record = self._by_hand.get(line) or self._by_hand.setdefault(line, self._pass(line, -1))
        record["trains"] = True
        batch: Any = self._replayed(record, None) if self.replay else tensors
        found = self._finish(record, batch, None)
        return found[0] if len(tensors) == 1 else tuple(found)

    def read_since(self) -> int:
        """Return the samples read since the last backward pass."""
        backwards, count = self._read
        return count if backwards == self.steps.all_backwards else 0

    def _replayed(self, record: dict[str, Any], fetch: Callable[[list[Any]], Any] | None) -> Any:
        assert self.replay is not None
        try:
            return self.replay.batch(record, fetch)
        except Unrecorded:
            self.steps.stop()

    def _finish(self, record: dict[str, Any], batch: Any, indices: Any) -> Any:
        batch = map_tensors(batch, doubled) if self.steps.settings.double else batch
        if not self.replay:
            self._record(record, batch, indices)
        record["batches"] += 1
        return batch

    @harmless
    def _record(self, record: dict[str, Any], batch: Any, indices: Any) -> None:
        size = len(indices) if isinstance(indices, list | tuple) else rows_in(batch)
        record["sizes"].append(size)
        self._read = self.steps.all_backwards, self.read_since() + size
        if self.steps.number >= self.steps.most or self._bytes > MOST_READ_BYTES:
            return
        record["hashes"].append(checksum([batch]))
        record["drawn"] = [*record.get("drawn", []), list(indices) if isinstance(indices, list | tuple) else None]
        self.steps.note_terms(terms_in(batch))
        file = self.steps.settings.own_folder / name_of(record, record["batches"])
        torch.save(batch, file)
        self._bytes += file.stat().st_size


class RecordedBatches:
    """The ranks' recorded samples, for the reference; with `reordered` the samples of a batch change their order."""

    def __init__(self, folders: Sequence[Path], part: Sequence[int], *, reordered: bool) -> None:
        self._folders, self._reordered = folders, reordered
        self._part, self._parts = part
        self._ledgers = [json.loads((each / "ledger.json").read_text()) for each in folders]
        self._passes = [{(each["line"], each["turn"]): each for each in one["passes"]} for one in self._ledgers]
        self.chunks: list[int] = []  # samples of each rank in the last batch

    def length(self, line: str, turn: int) -> int | None:
        found = self._ledgers[0]["lengths"].get(line, [])
        return int(found[turn]) if turn < len(found) else None

    def batch(self, record: Mapping[str, Any], fetch: Callable[[list[Any]], Any] | None) -> Any:
        """Return the next batch of a pass: all that the ranks read; raises StopIteration after the last."""
        number = record["batches"]
        recorded = [each.get((record["line"], record["turn"])) for each in self._passes]
        available = {rank: each for rank, each in enumerate(recorded) if each is not None and each["batches"] > number}
        if not available:
            raise StopIteration
        seen = set[int]()
        parts, drawn = [], []
        for rank, each in available.items():
            if number >= len(each["hashes"]):
                raise Unrecorded
            if each["hashes"][number] not in seen:
                seen.add(each["hashes"][number])
                parts.append(torch.load(self._folders[rank] / name_of(record, number), weights_only=False))
                drawn.append(each["drawn"][number])
        parts, drawn = (of[self._part :: self._parts] or of[:1] for of in (parts, drawn))
        if self._reordered:
            parts, drawn = [map_tensors(each, reversed_samples) for each in reversed(parts)], drawn[::-1]
        self.chunks = [rows_in(each) for each in parts]
        try:
            return concatenated(parts)
        except NotCombinable:
            if fetch is None or None in drawn:
                raise
            indices = [index for each in drawn for index in (each[::-1] if self._reordered else each)]
            return fetch(indices)


def fetch_batch(loading: Any, indices: list[Any]) -> Any:
    """Return samples of a data set as a batch, built by the script's own code."""
    return loading._collate_fn([loading._dataset[index] for index in indices])


def dataset_behind(data: Any) -> tuple[Any, Any]:
    """Return the data set behind a Subset, also nested, and the indices in it; None if they are not numbers."""
    chosen: Any = range(size_of(data)) if size_of(data) >= 0 else None
    while isinstance(data, torch.utils.data.Subset) and chosen is not None:
        chosen = [data.indices[each] for each in chosen]
        data = data.dataset
    return data, chosen if chosen is not None and len(chosen) < MOST_INDICES else None


def size_of(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        return -1


def name_of(record: Mapping[str, Any], number: int) -> str:
    return f"batch-{zlib.crc32(record['line'].encode())}-{record['turn']}-{number}.pt"


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate several batches; raises NotCombinable."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return first
        if any(each.shape[1:] != first.shape[1:] for each in parts):
            raise NotCombinable("the ranks' samples have different shapes")
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        found = {name: concatenated([each[name] for each in parts]) for name in first}
        return found if type(first) is dict else type(first)(found)  # type: ignore[call-arg]
    if hasattr(first, "_fields"):
        return type(first)(*(concatenated(each) for each in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        if any(isinstance(each, Tensor | Mapping | list | tuple) for each in first):
            return type(first)(concatenated(each) for each in zip(*parts, strict=True))
        return type(first)(each for part in parts for each in part)
    if isinstance(first, int | float | str | None):
        return first
    raise NotCombinable(f"a batch of type {type(first).__name__} cannot be combined with others")


def map_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to each tensor of a batch, and to lists of other things."""
    if isinstance(batch, Mapping):
        found = {name: map_tensors(each, change) for name, each in batch.items()}
        return found if type(batch) is dict else type(batch)(found)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple) and any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
        changed = [map_tensors(each, change) for each in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    return change(batch)


def reversed_samples(samples: Any) -> Any:
    """Return the samples in reverse order."""
    if isinstance(samples, Tensor):
        return samples.flip(0) if samples.dim() else samples
    return samples[::-1] if isinstance(samples, list | tuple) else samples


def doubled(samples: Any) -> Any:
    """Return floating-point numbers in float64, others unchanged."""
    return samples.double() if isinstance(samples, Tensor) and samples.is_floating_point() else samples


def tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for each in inner for tensor in tensors_in(each)]


def rows_in(batch: Any) -> int:
    """Return the samples of a batch: the rows of its first tensor."""
    return next((len(each) for each in tensors_in(batch) if each.dim()), 1)


def terms_in(batch: Any) -> dict[str, int]:
    """Return possible divisors of a loss: samples, and integer elements that are not padding."""
    found = {"samples": rows_in(batch)}
    for index, each in enumerate(tensors_in(batch)):
        if each.dim() > 1 and not each.is_floating_point():
            found[f"tokens of tensor {index}"] = int((each != IGNORED).sum())
            found[f"non-zeros of tensor {index}"] = int((each != 0).sum())
    return found
