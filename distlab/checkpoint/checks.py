"""What a save claims beside the checksums of its files, each looked at by another way than it was made.

what was written   a digest of each tensor, taken while the training stands still, is that of what the disk gives back:
                   a copy that still belongs to the training has moved on by the time that it is written
what is kept       the newest of the checkpoints that a folder lists, and no more of them than were asked for
what was taken     no newer checkpoint that is good was passed over
standing still     what the saves say that they held the training up for is what its loop saw
"""

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from distlab.checkpoint import dcp, locate, manifest
from distlab.collectives.sharded_tensor import LocalShard
from distlab.measure.tensors import hash_of

MOST_BYTES = 64 << 20  # that are read back at once, beside what is trained
PREFIX = "step-"
# What the loop sees of a save beyond what it is held up for: a record and lines of the log, on a machine that is busy.
LOG_S, LOG_SHARE = 0.5, 0.2

Digests = dict[str, list[int]]  # of each entry of a state, a hash a part


def digests(state: dcp.State) -> Digests:
    """A hash of each part of what this rank holds of each entry."""
    return {name: [hash_of(part) for part in parts(held)] for name, held in state.items()}


def parts(held: object) -> list[Tensor]:
    """The tensors of an entry: a piece's boxes, a DTensor's own part, or itself."""
    if isinstance(held, LocalShard):
        return [box for _, box in held.boxes]
    local = held.to_local() if hasattr(held, "to_local") else held
    assert isinstance(local, Tensor)
    return [local]


def blank(held: object) -> object:
    """Memory of the same shape, in which nothing has been written."""
    if isinstance(held, LocalShard):
        return LocalShard(held.shape, [(offset, torch.empty_like(box, device="cpu")) for offset, box in held.boxes])
    assert isinstance(held, Tensor)
    return torch.empty_like(held, device="cpu") if dcp.is_whole(held) else torch.empty_like(held)


def unlike(state: dcp.State, wanted: Digests, folder: Path, group: dist.ProcessGroup | None) -> list[str]:
    """The entries of which `folder` gives something else back than was `wanted`."""
    wrong = []
    for names in bundles(state):
        again = {name: blank(state[name]) for name in names}
        try:
            dcp.load(again, folder, group)
        except (dcp.Damaged, OSError):  # which the checksums of the files tell
            continue
        found = digests(again)
        wrong += [name for name in names if found[name] != wanted[name]]
    return wrong


def bundles(state: dcp.State) -> Iterator[list[str]]:
    """The names, some at a time, so that what is read at once is bounded."""
    names: list[str] = []
    nbytes = 0
    for name, held in state.items():
        names.append(name)
        nbytes += dcp.num_bytes(held)
        if nbytes >= MOST_BYTES:
            yield names
            names, nbytes = [], 0
    if names:
        yield names


def listed_steps(folder: Path) -> set[int]:
    """The steps of all checkpoints in a folder, by their names."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return {int(name) for name in names if name.isdecimal()}


def wrongly_kept(folder: Path, before: Collection[int], saved: int, keep: int) -> tuple[int, str]:
    """How many checkpoints are missing or should be gone after the save of `saved`, beside what was there `before`;
    what another run reads may stay."""
    wanted, found = sorted({*before, saved})[-keep:], listed_steps(folder)
    missing = sorted(set(wanted) - found)
    surplus = [step for step in found - set(wanted) if not locate.is_held(folder / manifest.folder_name(step))]
    detail = f"after step {saved} there are {sorted(found)}, of which the newest {keep} are kept"
    return len(missing) + len(surplus), detail


def passed_over(source: Path, taken: int, good: Callable[[Path], bool]) -> list[int]:
    """The steps of checkpoints of a run that are newer than the one that was taken, and good."""
    folders = {step: folder for folder in (source, source / "checkpoints") for step in listed_steps(folder)}
    return [
        step for step, folder in sorted(folders.items()) if step > taken and good(folder / manifest.folder_name(step))
    ]


def allowed_s(stood_s: float) -> float:
    """How much of what the loop stood may be in no save."""
    return LOG_S + LOG_SHARE * stood_s


def unaccounted_s(stood_s: float, held_s: float) -> float:
    """Seconds that the loop stood in the saves beyond what these say, or the other way; infinite if more was said than
    there was."""
    return math.inf if held_s > stood_s * (1 + 1e-9) else stood_s - held_s
