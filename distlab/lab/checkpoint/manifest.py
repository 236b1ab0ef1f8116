"""Where a run stands, and what a checkpoint says of it: `manifest.json`, written last, so that a folder with one is
whole.

It holds all that a resumed run needs beside the tensors, and what has to be the same for its result to be: the
settings that define weights and data, the steps done, the position in the data, the losses so far, the random states,
and the size and checksum of every file. JSON, so that a person can read it, and every rank can compare settings
without opening a tensor. Its last field is the checksum of all that stands before it: of 500 flipped bits 382 were
read as good where there was none.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from distlab.contract import where_it_was
from distlab.lab.config import Config, Refusal
from distlab.lab.report.reading import from_json, read_regular, to_json
from distlab.lab.workload import data as text
from distlab.lab.workload.data import Batches
from distlab.lab.workload.user_model import reads_text

SCHEMA, UNSEALED = 3, 2  # the one that is written, and the one before, which had no checksum
FILE = "manifest.json"
MOST_BYTES = 1 << 30  # a sample of an epoch is a number, a loss another
SEAL = b', "sha256": "'
DEFINING = (
    "run_mode", "model", "width", "depth", "heads", "seq", "tie", "dtype", "optimizer", "clip", "seed",
)  # fmt: skip


class Unreadable(Refusal):
    """A folder that is no good checkpoint; the sentence goes on after the folder's name."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint, without its tensors."""

    schema: int
    run_id: str
    world_size: int
    settings: dict[str, Any]  # by variable name: what a resumed run must have too
    data: str  # sha256 of the text, empty where the settings define the samples
    versions: dict[str, str]
    step: int  # how many steps all variants have done
    steps: dict[str, int]  # and each of them: a rank that failed may have been between two
    epoch: int  # where the data go on
    batch: int  # within the epoch
    seen: list[int]  # samples of this epoch that were trained on
    losses: dict[str, list[float | None]]  # of each step from 0 on; None where no rank knew all shares
    generators: dict[str, list[str]]  # by rank: states of torch's generators, CPU first, in hex
    # By rank: the numbers that each of these generators gives next, drawn from a copy: a resumed run must draw them.
    draws: dict[str, list[list[float]]]
    files: dict[str, tuple[int, str]]  # by path within the checkpoint: [bytes, sha256]

    @property
    def name(self) -> str:
        return folder_name(self.step)

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest apart."""
        return sum(size for size, _ in self.files.values())


def with_names_of_today(saved: Manifest, formerly: Mapping[str, str]) -> Manifest:
    """The same, where variants were saved under names that they had before: `formerly` has those of today by them."""
    steps, losses = (
        {formerly.get(name, name): of for name, of in each.items()} for each in (saved.steps, saved.losses)
    )
    return msgspec.structs.replace(saved, steps=steps, losses=losses)


def folder_name(step: int) -> str:
    """`step-00000020`: 20 steps are done, and step 20 is the next one."""
    return f"step-{step:08d}"


def defining(config: Config) -> dict[str, Any]:
    """The settings that make a run's weights what they are, by variable name; defaults resolved."""
    named = {str(Config.model_fields[name].alias): getattr(config, name) for name in DEFINING}
    return named | {"LAB_LR": config.learning_rate, "LAB_BATCH": config.batch}


def data_digest(config: Config) -> str:
    """The sha256 of the text that gpt reads; empty for samples that are drawn from LAB_SEED."""
    return hashlib.sha256(text.read_text(config)).hexdigest() if reads_text(config.model) else ""


def differences(manifest: Manifest, config: Config) -> str:
    """What the run of `config` has otherwise than the checkpoint, both values each; empty if nothing."""
    now = defining(config)
    pairs = [(f"{name}=", manifest.settings.get(name), now[name]) for name in now]
    pairs.append(("a text of sha256 ", manifest.data[:12], data_digest(config)[:12]))
    differing = [(label, _shown(then), _shown(here)) for label, then, here in pairs if then != here]
    if not differing:
        return ""
    then, here = (", ".join(pair[0] + pair[side] for pair in differing) for side in (1, 2))
    return f"was saved with {then}, and this run has {here}"


def _shown(value: Any) -> str:
    if value in (None, ""):
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


def write(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest into the folder of its checkpoint; the file's path."""
    path = folder / FILE
    path.write_bytes(sealed(to_json(msgspec.structs.asdict(manifest)).encode()))
    return path


def sealed(content: bytes) -> bytes:
    """The JSON of an object with one field more, the checksum of what stands before it."""
    body = content.removesuffix(b"}")
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises Unreadable."""
    try:
        content = read_regular(folder / FILE, MOST_BYTES)
        values = from_json(content)
    except FileNotFoundError:
        raise Unreadable(f"has no {FILE}: it is not a checkpoint of the lab, or only a part of one") from None
    except OSError as error:
        raise Unreadable(f"has a {FILE} that cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Unreadable(f"has a {FILE} that cannot be read ({error})") from None
    if not isinstance(values, dict) or "schema" not in values:
        raise Unreadable(f"has a {FILE} that is not of the lab")
    if SEAL in content:  # of whatever schema: a flipped bit makes 2 of 3
        body, _, _ = content.rpartition(SEAL)
        if content != sealed(body + b"}"):
            raise Unreadable(f"has a {FILE} whose checksum differs")
        del values["sha256"]
    if values["schema"] not in (SCHEMA, UNSEALED):
        raise Unreadable(f"is of schema {values['schema']}, and this code reads {SCHEMA} and {UNSEALED}")
    if (values["schema"] == SCHEMA) != (SEAL in content):
        raise Unreadable(f"has a {FILE} whose checksum is missing")
    try:
        return msgspec.convert(values, Manifest)
    except msgspec.ValidationError as error:
        raise Unreadable(f"has a {FILE} with missing or wrong fields ({error})") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Where a run stands: the batch that each step works on, the samples that this epoch has seen, the steps of each
# variant.
#
# The samples of a step are a function of (seed, epoch, batch), so a position in the data is these two numbers, and
# going on means going on counting. Beside the position stands what was dealt, sample by sample, before and after a
# resume: that each was seen exactly once an epoch is counted, not concluded from the position.


class TrainingPosition:
    """The way of a run through its data, from step 0 or from where a checkpoint leaves it."""

    def __init__(
        self, batches: Batches, variants: Iterable[str], resumed: Manifest | None = None,
        resumed_batch: Callable[[int], int] = where_it_was,
    ) -> None:  # fmt: skip
        """`resumed` holds all `variants`; `resumed_batch` is the batch to go on with, by the one that it names."""
        self.batches = batches
        self.first = resumed.step if resumed else 0
        self.done = {name: resumed.steps[name] if resumed else 0 for name in variants}
        self.losses: dict[str, list[float | None]] = {
            name: resumed.losses[name] if resumed else [] for name in self.done
        }
        self.heard: dict[str, list[float | None]] = {name: [] for name in self.done}  # since, see `hear`
        self.seen: list[int] = list(resumed.seen) if resumed else []
        self.miscounted = 0  # samples of finished epochs that were not seen exactly once
        self._ahead = 0  # of the step: how far the data are; 0 in a run that resumes rightly
        if resumed:
            self._ahead = resumed.epoch * batches.num_batches + resumed_batch(resumed.batch) - resumed.step

    @cached_property
    def data(self) -> str:
        """What the samples are cut from, see `data_digest`."""
        return data_digest(self.batches.config)

    def data_step(self, step: int) -> int:
        """The global batch that `step` works on, counted over all epochs."""
        return step + self._ahead

    def position(self, step: int) -> tuple[int, int]:
        """The epoch, and the batch within it, that `step` works on."""
        return divmod(self.data_step(step), self.batches.num_batches)

    def hear(self, variant: str, shares: Iterable[list[float | None] | None]) -> None:
        """The next loss of a variant, from what each rank tells of its own share; None from one that has left."""
        told = list(shares)
        known = [share for each in told if each is not None for share in each if share is not None]
        self.heard[variant].append(math.fsum(known) if None not in told else None)

    def passed(self, step: int) -> None:
        """All variants have done `step`: its samples are seen."""
        self.seen += self.batches.full_ids(self.data_step(step))
        if len(self.seen) >= self.batches.num_batches * self.batches.batch:
            self.miscounted += self._wrong(whole=True)
            self.seen = []

    def wrongly_seen(self) -> int:
        """Samples that were not seen exactly once an epoch; in the epoch that is not over, more than once."""
        return self.miscounted + self._wrong(whole=False)

    def _wrong(self, *, whole: bool) -> int:
        times = Counter(self.seen)
        left_out = self.batches.num_batches * self.batches.batch - len(times) if whole else 0
        return left_out + sum(count > 1 for count in times.values())


# The random numbers that come next: the state of each of torch's generators, and what it gives from there.

DRAWS = 4  # numbers of each generator that a checkpoint foretells


def generators(device: torch.device) -> list[torch.Generator]:
    """torch's generators on this rank, the CPU's first."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def generator_states(device: torch.device) -> list[str]:
    return [bytes(each.get_state().tolist()).hex() for each in generators(device)]


def set_generators(states: Sequence[str], device: torch.device) -> None:
    """Go on with the random numbers of these states."""
    for generator, state in zip(generators(device), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def next_draws(device: torch.device) -> list[list[float]]:
    """The numbers that each of these generators gives next, from a copy that is thrown away."""
    copies = [torch.Generator(each.device).set_state(each.get_state()) for each in generators(device)]
    return [torch.rand(DRAWS, generator=copy, device=copy.device, dtype=torch.float64).tolist() for copy in copies]
