"""The global batch of a step, and each shard's part of it: a function of (seed, step, shard), with no state.

An epoch is a permutation of the samples, drawn from (seed, epoch). Step s takes the next LAB_BATCH of them, and the
shards divide these among themselves, disjoint and complete, in runs that need not be of one length. What a shard
gets is weighed by `share`, one over the loss terms of the whole global batch: sums weighed so add up to the mean over
the batch, however unevenly it was dealt. Means of shards would not (a shard of 6 beside one of 8 counts 8/6).
"""

import hashlib
import os
import random
import stat
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distlab.lab.config import Config
from distlab.lab.config.settings import quoted
from distlab.lab.workload import user_model
from distlab.lab.workload.user_model import reads_text

# The text that gpt reads is by default the sources of Python's standard library; LAB_TEXT names a file or a folder
# instead. Files are read in sorted order and cut at `MAX_BYTES`, so that every rank sees the same bytes in well under
# 0.3 s. Regular files alone are read: a pipe or a device waits, never ends, or gives each rank another text.

MAX_BYTES = 4 * 2**20  # 20 steps of 16 samples of 64 bytes read 20 KiB: more text only costs time
MAX_ENTRIES = 20_000  # of a folder, until MAX_BYTES are read: a tree without end is said, and not walked


class NoText(Exception):
    """What LAB_TEXT names cannot be read; the sentence goes on after its value."""


def read_text(config: Config) -> bytes:
    """The first MAX_BYTES of the text; raises OSError where a file cannot be read, NoText where nothing should be."""
    text = bytearray()
    for path in _files(config.text):
        text += _regular_bytes(path, MAX_BYTES - len(text))
        if len(text) == MAX_BYTES:
            break
    return bytes(text)


def digest(config: Config) -> str:
    """The sha256 of the text, which all ranks need alike; empty where none can be read."""
    try:
        return hashlib.sha256(read_text(config)).hexdigest()
    except (OSError, NoText):
        return ""


def text_refusals(config: Config) -> list[str]:
    """A sentence if LAB_TEXT cannot be read or holds less than one sample (LAB_SEQ bytes and the one that follows)."""
    if not reads_text(config.model):
        return []
    named = f"LAB_TEXT={quoted(config.text)}"
    try:
        num_bytes = len(read_text(config))
    except FileNotFoundError:
        return [f"{named} does not exist: name a file or a folder that every rank can read"]
    except NoText as error:
        return [f"{named} {error}"]
    except OSError as error:
        return [f"{named} cannot be read: {error.strerror}: {quoted(error.filename)}"]
    where = "the standard library" if config.text is None else named
    if num_bytes == 0:
        return [f"{where} is empty: name a file or a folder with text"]
    if num_bytes <= config.seq:
        needed = config.seq + 1
        return [f"{where} holds {num_bytes} bytes, and a sample of LAB_SEQ={config.seq} needs {needed} or more"]
    return []


def _files(text: Path | None) -> Iterator[Path]:
    if text is None:
        yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif stat.S_ISDIR(text.stat().st_mode):
        yield from _inside(text)
    elif stat.S_ISREG(text.stat().st_mode):
        yield text
    else:
        raise NoText("is neither a file nor a folder: a pipe or a device gives each rank another text")


def _inside(folder: Path) -> Iterator[Path]:
    """The regular files of a folder and of all within it, sorted; links to folders are not followed."""
    waiting, seen = [folder], 0
    while waiting:
        path = waiting.pop()
        if path.is_dir() and (path == folder or not path.is_symlink()):
            entries = sorted(path.iterdir(), reverse=True)
            seen += len(entries)
            if seen > MAX_ENTRIES:
                raise NoText(f"holds more than {MAX_ENTRIES} files and folders: name a smaller folder, or a file")
            waiting += entries
        elif path.is_file():
            yield path


def _regular_bytes(path: Path, most: int) -> bytes:
    """At most so many bytes, and no more than the file says: what a kernel writes as it is read has none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise NoText(f"has become a pipe or a device: {quoted(path)}")
        return file.read(min(most, state.st_size))


OWN_BATCHES = 8  # of an epoch
PROOF_STEPS = 3  # the third begins another epoch


class Microbatch(NamedTuple):
    """`model(inputs, targets) * share`, summed over all microbatches of all shards, is the mean loss of the batch."""

    inputs: Tensor  # gpt [B, S] tokens; mlp [B, D]; line [B, 1]
    targets: Tensor  # of the same shape
    share: float


class Samples(Protocol):
    """A data set: some samples by number."""

    terms: int  # loss terms of one sample

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...


class Text:
    """Windows of LAB_SEQ bytes; the target of each byte is the next one."""

    def __init__(self, config: Config) -> None:
        self.bytes = torch.frombuffer(bytearray(read_text(config)), dtype=torch.uint8)
        self.terms = config.seq

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.terms

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        starts = ids * self.terms % (len(self.bytes) - self.terms)  # wraps: a text of one sample is enough
        windows = self.bytes[starts[:, None] + torch.arange(self.terms + 1)].long()  # [B, S+1]
        return windows[:, :-1], windows[:, 1:]


class Points:
    """The first lesson's: y = 2x + 1 and noise of 0.1, x uniform in (-1, 1); mlp has LAB_WIDTH of them a sample."""

    def __init__(self, num_samples: int, terms: int, seed: int) -> None:
        self.terms = terms
        points = draw_points(num_samples * terms, seed).view(num_samples, terms, 2)
        self.x, self.y = points[..., 0], points[..., 1]  # [N, D]

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]


@lru_cache(maxsize=2)  # the proof's and the timed steps': each pass asks anew, seven of a run
def draw_points(count: int, seed: int) -> Tensor:
    """[count, 2] of x and y."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        x = draw.uniform(-1.0, 1.0)
        pairs.append((x, 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)))
    return torch.tensor(pairs, dtype=torch.float64)


class UserBatches:
    """The batches of a model's own file, one after the other."""

    def __init__(self, spec: str, seed: int, num_batches: int) -> None:
        made = [user_model.find_in_file(spec, "batch")(seed, step) for step in range(num_batches)]
        self.inputs, self.targets = (torch.cat([each[side] for each in made]) for side in (0, 1))
        self.terms = self.targets[0].numel()

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[ids], self.targets[ids]


class Batches:
    """Every step's batch. `proof`: float64-sized data that sees mistakes, two global batches, uneven shards.

    Two batches, so that the third step begins the second epoch, where a forgotten set_epoch shows. Uneven shards
    and microbatches wherever the batch allows it, since equal ones hide the mean of means.
    """

    def __init__(self, config: Config, *, proof: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.batch = config.batch
        self.uneven = proof or config.model == "line"
        self.samples, self.num_batches = _data_set(config, self.batch, proof)
        self.proof_steps = PROOF_STEPS

    def full(self, step: int) -> Microbatch:
        """The whole global batch, as one process takes it."""
        return self._microbatch(self._order(step), 1 / (self.batch * self.samples.terms))

    def alone(self, step: int) -> list[Microbatch]:
        """What one process works on, whose gradients add up to those of the step: the batch as it is."""
        return [self.full(step)]

    def microbatches(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """What `shard` works on at `step`, in LAB_MICROBATCHES parts (fewer where it has fewer samples)."""
        ids = self.sample_ids(step, shard, num_shards)
        return self.parts(ids, self.share(len(ids), num_shards))

    def parts(self, ids: list[int], share: float) -> list[Microbatch]:
        """The samples `ids` in LAB_MICROBATCHES parts (fewer where there are fewer), each of whose terms counts
        `share`."""
        num_parts = min(self.config.num_microbatches, len(ids))
        sizes = shard_sizes(len(ids), num_parts, uneven=self.uneven)
        return [self._microbatch(part, share) for part in torch.tensor(ids).split(sizes)]

    def share(self, num_samples: int, num_shards: int) -> float:  # noqa: ARG002  the same however the batch is dealt
        """What each loss term of a shard of `num_samples` counts: one over the terms of the whole batch."""
        return 1 / (self.batch * self.samples.terms)

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        sizes = shard_sizes(self.batch, num_shards, uneven=self.uneven)
        start = sum(sizes[:shard])
        ids: list[int] = self._order(step)[start : start + sizes[shard]].tolist()
        return ids

    def full_ids(self, step: int) -> list[int]:
        ids: list[int] = self._order(step).tolist()
        return ids

    def ids_from(self, first: int, count: int) -> list[int]:
        """The numbers of `count` samples, at most LAB_BATCH, that follow the `first` ones of all epochs in a row."""
        step, begin = divmod(first, self.batch)
        return [*self.full_ids(step), *self.full_ids(step + 1)][begin : begin + count]

    def kept_sizes(self, num_shards: int) -> list[int]:
        """Samples of `num_shards` shards that keep what they have of LAB_BATCH among WORLD_SIZE."""
        return shard_sizes(self.batch, self.config.world_size, uneven=self.uneven)[:num_shards]

    def _order(self, step: int) -> Tensor:
        if self.config.model == "line":
            return torch.arange(self.batch)  # every step sees all points, and a worker keeps its shard
        epoch, index = divmod(step, self.num_batches)
        order = permutation(self.config.seed, epoch, self.num_batches * self.batch)
        return order[index * self.batch : (index + 1) * self.batch]

    def _microbatch(self, ids: Tensor, share: float) -> Microbatch:
        inputs, targets = (
            values.to(self.device, self.dtype if values.is_floating_point() else values.dtype)
            for values in self.samples.take(ids)
        )
        return Microbatch(inputs, targets, share)


def _data_set(config: Config, batch: int, proof: bool) -> tuple[Samples, int]:
    if user_model.is_own(config.model) and not user_model.reads_text(config.model):
        num_batches = 2 if proof else OWN_BATCHES
        return UserBatches(config.model, config.seed, num_batches), num_batches
    if config.model == "line":
        return Points(batch, 1, config.seed), 1
    if config.model == "mlp":
        num_batches = 2 if proof else 8
        return Points(num_batches * batch, config.width, config.seed), num_batches
    samples = Text(config)
    return samples, 2 if proof else max(1, min(len(samples) // batch, 1024))


def permutation(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of an epoch: another for each, the same in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def shard_sizes(batch: int, num_shards: int, *, uneven: bool = False) -> list[int]:
    """Samples of each shard: as equal as can be, the first ones larger; never none if batch >= num_shards.

    With `uneven`, shards that would be equal are not, wherever they hold more than one sample: shard 1 gives up to
    two away, as in the lesson's 8, 6, 9, 9.
    """
    sizes = [batch // num_shards + (shard < batch % num_shards) for shard in range(num_shards)]
    if uneven and num_shards > 1 and batch % num_shards == 0:
        receivers = [shard for shard in reversed(range(num_shards)) if shard != 1]
        for moved in range(min(2, sizes[1] - 1)):
            sizes[1] -= 1
            sizes[receivers[moved % len(receivers)]] += 1
    return sizes


def effective_batch(config: Config, num_replicas: int) -> str:
    """Samples of a step as microbatch x accumulation x replicas, or as a sum where they do not divide evenly."""
    batch, accumulated = config.batch, config.num_microbatches
    sizes = shard_sizes(batch, num_replicas, uneven=config.model == "line")
    if len(set(sizes)) == 1 and sizes[0] % accumulated == 0:
        micro = sizes[0] // accumulated
        return f"{batch} samples a step = {micro} x {accumulated} x {num_replicas} (microbatch, accumulated, replicas)"
    parts = f"{accumulated} microbatch{'es' if accumulated != 1 else ''}"
    return f"{batch} samples a step = {' + '.join(map(str, sizes))}, a replica each, {parts}"


def refusals(config: Config, num_shards: int) -> list[str]:
    """Sentences if the batch cannot be dealt to `num_shards` in LAB_MICROBATCHES parts each."""
    batch = config.batch
    if batch < num_shards:
        return [f"LAB_BATCH={batch} is smaller than WORLD_SIZE={num_shards}: every rank needs a sample"]
    if config.num_microbatches > batch // num_shards:
        most = batch // num_shards
        return [
            f"LAB_MICROBATCHES={config.num_microbatches} is more than the {most} samples of a rank, allowed: 1 to"
            f" {most}"
        ]
    return []


class PartedBatches(Batches):
    """In LAB_MICROBATCHES parts, each of which is dealt to all shards.

    Experts mind how samples are put together: what finds a place, and what balance asks for, is a matter of all tokens
    that are routed at once. So one process takes the same microbatches whole.
    """

    def alone(self, step: int) -> list[Microbatch]:
        """The microbatches of a step, as one process takes them."""
        share = self.share(self.batch, 1)
        return [self._microbatch(part, share) for part in self._order(step).split(self.sizes())]

    def microbatches(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """This shard's part of each microbatch."""
        share = self.share(self.batch, num_shards)
        return [self._microbatch(torch.tensor(part), share) for part in self._parts(step, shard, num_shards)]

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        return [number for part in self._parts(step, shard, num_shards) for number in part]

    def sizes(self) -> list[int]:
        """Samples of each microbatch; as equal as can be where uneven ones would leave a rank without any."""
        parts = self.config.num_microbatches
        uneven = shard_sizes(self.batch, parts, uneven=self.uneven)
        return uneven if min(uneven) >= self.config.world_size else shard_sizes(self.batch, parts)

    def _parts(self, step: int, shard: int, num_shards: int) -> list[list[int]]:
        found = []
        for part in self._order(step).split(self.sizes()):
            sizes = shard_sizes(len(part), num_shards, uneven=self.uneven)
            start = sum(sizes[:shard])
            found.append(part[start : start + sizes[shard]].tolist())
        return found
