"""A run's position, and the manifest of a checkpoint: `manifest.json`, written last, so that a folder with one is
complete.

It has all that a resumed run needs besides the tensors: the settings that define weights and data, the steps done, the
position in the data, the losses so far, the random states, and the size and checksum of every file. It is JSON, so that
people can read it and every rank can compare settings without opening a tensor. Its last field is the checksum of all
before it: without it 382 of 500 flipped bits went unnoticed.
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

SCHEMA, UNSEALED = 3, 2  # the current one, and the one before, which had no checksum
FILE = "manifest.json"
MOST_BYTES = 1 << 30  # a sample of an epoch is a number, a loss another
SEAL = b', "sha256": "'
DEFINING = (
    "run_mode", "model", "width", "depth", "heads", "seq", "tie", "dtype", "optimizer", "clip", "seed",
)  # fmt: skip


class Unreadable(Refusal):
    """Raised for a folder that is no good checkpoint; the sentence follows the folder's name."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint, without its tensors."""

    schema: int
    run_id: str
    world_size: int
    settings: dict[str, Any]  # by variable name: what a resumed run must have too
    data: str  # sha256 of the text, empty where the settings define the samples
    versions: dict[str, str]
    step: int  # steps done by all variants
    steps: dict[str, int]  # steps done by each: a rank may have failed between two
    epoch: int  # of the next batch
    batch: int  # within the epoch
    seen: list[int]  # samples of this epoch that were trained on
    losses: dict[str, list[float | None]]  # of each step from 0 on; None where no rank knew all shares
    generators: dict[str, list[str]]  # by rank: states of torch's generators, CPU first, in hex
    # By rank: each generator's next numbers, drawn from a copy: a resumed run must draw them.
    draws: dict[str, list[list[float]]]
    files: dict[str, tuple[int, str]]  # by path within the checkpoint: [bytes, sha256]

    @property
    def name(self) -> str:
        return folder_name(self.step)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files except the manifest."""
        return sum(size for size, _ in self.files.values())


def with_current_names(saved: Manifest, formerly: Mapping[str, str]) -> Manifest:
    """Return the manifest with variants' current names; `formerly` maps former names to them."""
    steps, losses = (
        {formerly.get(name, name): of for name, of in each.items()} for each in (saved.steps, saved.losses)
    )
    return msgspec.structs.replace(saved, steps=steps, losses=losses)


def folder_name(step: int) -> str:
    """`step-00000020`: 20 steps are done, and step 20 is the next one."""
    return f"step-{step:08d}"


def defining(config: Config) -> dict[str, Any]:
    """Return the settings that determine a run's weights, by variable name; defaults resolved."""
    named = {str(Config.model_fields[name].alias): getattr(config, name) for name in DEFINING}
    return named | {"LAB_LR": config.learning_rate, "LAB_BATCH": config.batch}


def data_digest(config: Config) -> str:
    """Return the sha256 of gpt's text; empty for samples that are drawn from LAB_SEED."""
    return hashlib.sha256(text.read_text(config)).hexdigest() if reads_text(config.model) else ""


def differences(manifest: Manifest, config: Config) -> str:
    """Return the settings in which the run differs from the checkpoint, with both values."""
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
    """Write the manifest into its checkpoint's folder; return its path."""
    path = folder / FILE
    path.write_bytes(sealed(to_json(msgspec.structs.asdict(manifest)).encode()))
    return path


def sealed(content: bytes) -> bytes:
    """Return an object's JSON with one more field, the checksum of all before it."""
    body = content.removesuffix(b"}")
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; raises Unreadable."""
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
        raise Unreadable(f"has a {FILE} that the lab did not write")
    if SEAL in content:  # in any schema: a flipped bit turns 3 into 2
        body, _, _ = content.rpartition(SEAL)
        if content != sealed(body + b"}"):
            raise Unreadable(f"has a {FILE} whose checksum differs")
        del values["sha256"]
    if values["schema"] not in (SCHEMA, UNSEALED):
        raise Unreadable(f"has schema {values['schema']}, and this version reads {SCHEMA} and {UNSEALED}")
    if (values["schema"] == SCHEMA) != (SEAL in content):
        raise Unreadable(f"has a {FILE} whose checksum is missing")
    try:
        return msgspec.convert(values, Manifest)
    except msgspec.ValidationError as error:
        raise Unreadable(f"has a {FILE} with missing or wrong fields ({error})") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A run's position: the batch of each step, the samples that this epoch has used, the steps of each variant.
#
# The samples of a step are a function of (seed, epoch, batch), so a position in the data is these two numbers, and
# resuming means to continue counting. The samples are also recorded one by one, before and after a resume, so that a
# check counts whether each is used exactly once per epoch.


class TrainingPosition:
    """A run's progress through its data, from step 0 or from a checkpoint."""

    def __init__(
        self, batches: Batches, variants: Iterable[str], resumed: Manifest | None = None,
        resumed_batch: Callable[[int], int] = where_it_was,
    ) -> None:  # fmt: skip
        """`resumed` has all `variants`; `resumed_batch` maps the saved batch to the one to resume with."""
        self.batches = batches
        self.first = resumed.step if resumed else 0
        self.done = {name: resumed.steps[name] if resumed else 0 for name in variants}
        self.losses: dict[str, list[float | None]] = {
            name: resumed.losses[name] if resumed else [] for name in self.done
        }
        self.new_losses: dict[str, list[float | None]] = {name: [] for name in self.done}  # see `record_loss`
        self.seen: list[int] = list(resumed.seen) if resumed else []
        self.miscounted = 0  # samples of finished epochs not used exactly once
        self._ahead = 0  # by how many batches the data are ahead of the step; 0 if resumed correctly
        if resumed:
            self._ahead = resumed.epoch * batches.num_batches + resumed_batch(resumed.batch) - resumed.step

    @cached_property
    def data(self) -> str:
        """Return the digest of the samples' source, see `data_digest`."""
        return data_digest(self.batches.config)

    def data_step(self, step: int) -> int:
        """Return the global batch of `step`, counted over all epochs."""
        return step + self._ahead

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of `step`, and the batch within it."""
        return divmod(self.data_step(step), self.batches.num_batches)

    def record_loss(self, variant: str, parts: Iterable[list[float | None] | None]) -> None:
        """Record a variant's next loss, the sum of the ranks' parts; a lost rank has None."""
        of_ranks = list(parts)
        known = [part for each in of_ranks if each is not None for part in each if part is not None]
        self.new_losses[variant].append(math.fsum(known) if None not in of_ranks else None)

    def finish_step(self, step: int) -> None:
        """Record that all variants have done `step`, and its samples."""
        self.seen += self.batches.full_ids(self.data_step(step))
        if len(self.seen) >= self.batches.num_batches * self.batches.batch:
            self.miscounted += self._count_wrong(complete=True)
            self.seen = []

    def wrongly_seen(self) -> int:
        """Count samples not used exactly once per epoch; in the current epoch, used more than once."""
        return self.miscounted + self._count_wrong(complete=False)

    def _count_wrong(self, *, complete: bool) -> int:
        times = Counter(self.seen)
        left_out = self.batches.num_batches * self.batches.batch - len(times) if complete else 0
        return left_out + sum(count > 1 for count in times.values())


# The next random numbers: the state of each of torch's generators, and the numbers it draws from there.

DRAWS = 4  # numbers of each generator that a checkpoint stores


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators on this rank, the CPU's first."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def generator_states(device: torch.device) -> list[str]:
    return [bytes(each.get_state().tolist()).hex() for each in generators(device)]


def set_generators(states: Sequence[str], device: torch.device) -> None:
    """Restore the generators to these states."""
    for generator, state in zip(generators(device), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def next_draws(device: torch.device) -> list[list[float]]:
    """Return each generator's next numbers, drawn from a copy."""
    copies = [torch.Generator(each.device).set_state(each.get_state()) for each in generators(device)]
    return [torch.rand(DRAWS, generator=copy, device=copy.device, dtype=torch.float64).tolist() for copy in copies]
