"""What a checkpoint says of itself: `manifest.json`, written last, so that a folder with one is whole.

It holds all that a resumed run needs beside the tensors, and what has to be the same for its result to be: the
settings that define weights and data, the steps done, the position in the data, the losses so far, the random states,
and the size and checksum of every file. JSON, so that a person can read it, and every rank can compare settings
without opening a tensor. Its last field is the checksum of all that stands before it: of 500 flipped bits 382 were
read as good where there was none.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from distlab.config import Config
from distlab.report.reading import from_json, read_regular, to_json
from distlab.workload import data as text
from distlab.workload.user_model import reads_text

SCHEMA, UNSEALED = 3, 2  # the one that is written, and the one before, which had no checksum
FILE = "manifest.json"
MOST_BYTES = 1 << 30  # a sample of an epoch is a number, a loss another
SEAL = b', "sha256": "'
DEFINING = (
    "run_mode", "model", "width", "depth", "heads", "seq", "tie", "dtype", "optimizer", "clip", "seed",
)  # fmt: skip


class Unreadable(Exception):
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
        """The folder's name."""
        return folder_name(self.step)

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest apart."""
        return sum(size for size, _ in self.files.values())


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
    """The checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
