"""The global batch of a step, and each shard's part of it: a function of (seed, step, shard), without state.

An epoch is a permutation of the samples, drawn from (seed, epoch). Step s uses the next LAB_BATCH samples, which are
split into one contiguous part per shard; parts may differ in length. Each loss term of a shard has the weight `share`,
1 / (loss terms of the global batch), so that the shards' weighted sums add up to the mean over the batch, however
uneven the shards are. A mean of the shards' means would be wrong: samples in a shard of 6 would count 8/6 of those in a
shard of 8.
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

# By default gpt is trained on the source of Python's standard library; LAB_TEXT names another file or folder. Files are
# read in sorted order up to `MAX_BYTES`, so that every rank reads the same bytes in well under 0.3 s. Only regular
# files are read: a pipe or a device may block, never end, or give each rank different text.

MAX_BYTES = 4 * 2**20  # 20 steps of 16 samples of 64 bytes read 20 KiB: more text only costs time
MAX_ENTRIES = 20_000  # of a folder, until MAX_BYTES are read: a larger tree is refused


class NoText(Exception):
    """Raised if LAB_TEXT cannot be read; the message continues the sentence that begins with its value."""


def read_text(config: Config) -> bytes:
    """Return the first MAX_BYTES of the text; raises OSError for an unreadable file, NoText for no regular files."""
    text = bytearray()
    for path in _files(config.text):
        text += _regular_bytes(path, MAX_BYTES - len(text))
        if len(text) == MAX_BYTES:
            break
    return bytes(text)


def digest(config: Config) -> str:
    """Return the sha256 of the text, which must be equal on all ranks; empty if it cannot be read."""
    try:
        return hashlib.sha256(read_text(config)).hexdigest()
    except (OSError, NoText):
        return ""


def text_refusals(config: Config) -> list[str]:
    """Return a sentence if LAB_TEXT cannot be read or is shorter than a sample (LAB_SEQ bytes and the next one)."""
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
        return [f"{where} has {num_bytes} bytes, but a sample of LAB_SEQ={config.seq} needs at least {needed}"]
    return []


def _files(text: Path | None) -> Iterator[Path]:
    if text is None:
        yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif stat.S_ISDIR(text.stat().st_mode):
        yield from _inside(text)
    elif stat.S_ISREG(text.stat().st_mode):
        yield text
    else:
        raise NoText("is neither a file nor a folder: each rank would read other text from a pipe or a device")


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the regular files of a folder and its subfolders, sorted; links to folders are not followed."""
    waiting, seen = [folder], 0
    while waiting:
        path = waiting.pop()
        if path.is_dir() and (path == folder or not path.is_symlink()):
            entries = sorted(path.iterdir(), reverse=True)
            seen += len(entries)
            if seen > MAX_ENTRIES:
                raise NoText(f"has more than {MAX_ENTRIES} files and folders: name a smaller folder, or a file")
            waiting += entries
        elif path.is_file():
            yield path


def _regular_bytes(path: Path, most: int) -> bytes:
    """Return at most `most` bytes, and no more than the file's size, which is 0 for files that the kernel generates."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise NoText(f"has become a pipe or a device: {quoted(path)}")
        return file.read(min(most, state.st_size))


OWN_BATCHES = 8  # of an epoch
PROOF_STEPS = 3  # the third begins the second epoch


class Microbatch(NamedTuple):
    """`model(inputs, targets) * share`, summed over all microbatches of all shards, is the mean loss of the batch."""

    inputs: Tensor  # gpt [B, S] tokens; mlp [B, D]; line [B, 1]
    targets: Tensor  # of the same shape
    share: float


class Samples(Protocol):
    """A data set, whose samples have numbers."""

    terms: int  # loss terms of one sample

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...


class Text:
    """Windows of LAB_SEQ bytes; the target of each byte is the next byte."""

    def __init__(self, config: Config) -> None:
        self.bytes = torch.frombuffer(bytearray(read_text(config)), dtype=torch.uint8)
        self.terms = config.seq

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.terms

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        starts = ids * self.terms % (len(self.bytes) - self.terms)  # wraps around: a text of one sample is enough
        windows = self.bytes[starts[:, None] + torch.arange(self.terms + 1)].long()  # [B, S+1]
        return windows[:, :-1], windows[:, 1:]


class Points:
    """Points y = 2x + 1 with noise of 0.1 and x uniform in (-1, 1); a sample of mlp has LAB_WIDTH points."""

    def __init__(self, num_samples: int, terms: int, seed: int) -> None:
        self.terms = terms
        points = draw_points(num_samples * terms, seed).view(num_samples, terms, 2)
        self.x, self.y = points[..., 0], points[..., 1]  # [N, D]

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]


@lru_cache(maxsize=2)  # for the proof and the timed steps: seven passes of a run need them
def draw_points(count: int, seed: int) -> Tensor:
    """Return x and y as [count, 2]."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        x = draw.uniform(-1.0, 1.0)
        pairs.append((x, 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)))
    return torch.tensor(pairs, dtype=torch.float64)


class UserBatches:
    """The batches of a user's file, concatenated."""

    def __init__(self, spec: str, seed: int, num_batches: int) -> None:
        made = [user_model.find_in_file(spec, "batch")(seed, step) for step in range(num_batches)]
        self.inputs, self.targets = (torch.cat([each[side] for each in made]) for side in (0, 1))
        self.terms = self.targets[0].numel()

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[ids], self.targets[ids]


class Batches:
    """The batch of every step. With `proof` the data make mistakes visible:

    An epoch has two global batches, so that the third step begins the second epoch, where a forgotten set_epoch shows.
    Shards and microbatches are uneven if the batch allows it, because equal ones hide a mean of means.
    """

    def __init__(self, config: Config, *, proof: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.batch = config.batch
        self.uneven = proof or config.model == "line"
        self.samples, self.num_batches = _data_set(config, self.batch, proof)
        self.proof_steps = PROOF_STEPS

    def full(self, step: int) -> Microbatch:
        """Return the global batch as one microbatch."""
        return self._microbatch(self._order(step), 1 / (self.batch * self.samples.terms))

    def alone(self, step: int) -> list[Microbatch]:
        """Return the microbatches of a single process, whose gradients add up to those of the step."""
        return [self.full(step)]

    def microbatches(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """Return the LAB_MICROBATCHES microbatches of `shard` at `step` (fewer if it has fewer samples)."""
        ids = self.sample_ids(step, shard, num_shards)
        return self.parts(ids, self.share(len(ids), num_shards))

    def parts(self, ids: list[int], share: float) -> list[Microbatch]:
        """Split the samples `ids` into LAB_MICROBATCHES parts (fewer if there are fewer); each loss term has the weight
        `share`."""
        num_parts = min(self.config.num_microbatches, len(ids))
        sizes = shard_sizes(len(ids), num_parts, uneven=self.uneven)
        return [self._microbatch(part, share) for part in torch.tensor(ids).split(sizes)]

    def share(self, num_samples: int, num_shards: int) -> float:  # noqa: ARG002  the same for every split of the batch
        """Return the weight of each loss term of a shard of `num_samples`: 1 / (terms of the global batch)."""
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
        """Return the numbers of `count` samples, at most LAB_BATCH, after the `first` ones of all epochs in a row."""
        step, begin = divmod(first, self.batch)
        return [*self.full_ids(step), *self.full_ids(step + 1)][begin : begin + count]

    def kept_sizes(self, num_shards: int) -> list[int]:
        """Return the sizes of the first `num_shards` shards of LAB_BATCH among WORLD_SIZE."""
        return shard_sizes(self.batch, self.config.world_size, uneven=self.uneven)[:num_shards]

    def _order(self, step: int) -> Tensor:
        if self.config.model == "line":
            return torch.arange(self.batch)  # every step uses all points, and each rank always has the same shard
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
    """Return the order of an epoch: it differs between epochs and is equal in all processes."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def shard_sizes(batch: int, num_shards: int, *, uneven: bool = False) -> list[int]:
    """Return the number of samples of each shard: as equal as possible, the first ones larger.

    With `uneven`, if all would be equal, up to two samples of shard 1 go to other shards, the last ones first, as in
    the lesson's 8, 6, 9, 9; no shard loses its last sample.
    """
    sizes = [batch // num_shards + (shard < batch % num_shards) for shard in range(num_shards)]
    if uneven and num_shards > 1 and batch % num_shards == 0:
        receivers = [shard for shard in reversed(range(num_shards)) if shard != 1]
        for moved in range(min(2, sizes[1] - 1)):
            sizes[1] -= 1
            sizes[receivers[moved % len(receivers)]] += 1
    return sizes


def effective_batch(config: Config, num_replicas: int) -> str:
    """Describe a step's samples as microbatch x accumulation x replicas, or as a sum if they do not divide evenly."""
    batch, accumulated = config.batch, config.num_microbatches
    samples, sizes = f"{batch} samples per step", shard_sizes(batch, num_replicas, uneven=config.model == "line")
    if len(set(sizes)) == 1 and sizes[0] % accumulated == 0:
        micro = sizes[0] // accumulated
        return f"{samples} = {micro} x {accumulated} x {num_replicas} (microbatch, accumulated, replicas)"
    parts = f"{accumulated} microbatch{'es' if accumulated != 1 else ''}"
    return f"{samples} = {' + '.join(map(str, sizes))} on the replicas, {parts} each"


def refusals(config: Config, num_shards: int) -> list[str]:
    """Return sentences if the batch cannot be split into `num_shards` with LAB_MICROBATCHES parts each."""
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
    """Batches that are first split into LAB_MICROBATCHES parts, and then each part into shards.

    For a mixture of experts it matters which samples are together: capacity and balance depend on all tokens that are
    routed at once. So a single process computes the same microbatches, each as a whole.
    """

    def alone(self, step: int) -> list[Microbatch]:
        """Return the microbatches of a step for a single process."""
        share = self.share(self.batch, 1)
        return [self._microbatch(part, share) for part in self._order(step).split(self.sizes())]

    def microbatches(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """Return this shard's part of each microbatch."""
        share = self.share(self.batch, num_shards)
        return [self._microbatch(torch.tensor(part), share) for part in self._parts(step, shard, num_shards)]

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        return [number for part in self._parts(step, shard, num_shards) for number in part]

    def sizes(self) -> list[int]:
        """Return the microbatches' sizes; they are uneven unless that would leave a rank without samples."""
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
