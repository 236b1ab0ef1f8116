"""One checkpoint, written by all ranks into one folder: everything of it or nothing.

    .step-00000020.partial/   made by rank 0; every rank writes its shards of all variants, and syncs them to the disk
    manifest.json             written last, by rank 0, when all ranks have said that their files are there
    step-00000020/            the same folder under its own name: a rename, which happens or does not

So a process killed at any moment leaves the checkpoint before this one as it was, and a partial folder that the next
start removes. An error of any rank reaches all, so nobody waits for files that never come; then the partial folder goes
at once, since the disk may be full of it.
"""

import errno
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from distlab.checkpoint import dcp, manifest
from distlab.checkpoint.manifest import Manifest
from distlab.contract import ShardsWritten, all_there
from distlab.report.units import human_bytes
from distlab.transport import store

Result = TypeVar("Result")
ENTRY_BYTES = 2048  # torch's archive around a tensor, and its line in the metadata
DRAWS = 4  # numbers of each generator that a checkpoint foretells
SPARE_BYTES = 1 << 20  # a checkpoint leaves so much of the disk to the logs and records of the run


class Unsaved(Exception):
    """A checkpoint that could not be written, on every rank; the disk's own words."""


@dataclass(frozen=True)
class Plan:
    """The names that this rank writes, and the bytes of all ranks together; the same for every save of a run."""

    mine: set[str]
    total_bytes: int


def plan(state: dcp.State, group: dist.ProcessGroup) -> Plan:
    """Share the writing out, a collective."""
    held = {name: (dcp.is_whole(part), dcp.num_bytes(part)) for name, part in state.items()}
    everyone = store.all_gather_plain(held, group)
    written = [dcp.dealt(everyone, rank) for rank in range(group.size())]
    total_bytes = sum(everyone[rank][name][1] + ENTRY_BYTES for rank, names in enumerate(written) for name in names)
    return Plan(written[group.rank()], total_bytes)


def write_checkpoint(
    folder: Path, draft: Manifest, state: dcp.State, group: dist.ProcessGroup, shares: Mapping[str, list[float | None]],
    *, needed_bytes: int, shards_written: ShardsWritten = all_there,
) -> Manifest:  # fmt: skip
    """Write `state` as `folder/step-<step>`, a collective; returns the manifest as it was published, or raises Unsaved
    on every rank.

    Args:
        state: what this rank writes, of all variants, under '<variant>/<name>'.
        draft: the manifest as far as this rank knows it.
        shares: this rank's shares of the losses since those that `draft` holds.
        needed_bytes: what all ranks are going to write.
        shards_written: what of this rank's files is there when it says that they are.
    """
    partial, rank = folder / f".{draft.name}.partial", group.rank()
    try:
        together(group, lambda: _prepare(partial, needed_bytes) if rank == 0 else None)
        own = dcp.save(state, partial, group)
        done, arrive = shards_written(own, partial, rank)
        parts = together(group, lambda: (described(done, partial), dict(shares), draft.generators, draft.draws))
        published = replace(
            draft,
            files={name: file for files, *_ in parts for name, file in files.items()},
            losses={
                name: [*before, *sum_losses([of_rank[name] for _, of_rank, *_ in parts])]
                for name, before in draft.losses.items()
            },
            generators={name: state for _, _, generators, _ in parts for name, state in generators.items()},
            draws={name: values for *_, draws in parts for name, values in draws.items()},
        )  # fmt: skip
        together(group, lambda: publish(partial, published) if rank == 0 else None)
        arrive(folder / draft.name)
        return published
    except (OSError, Unsaved) as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier(group=group)  # the room that the partial folder took is there again when anybody writes a line
        raise Unsaved(str(error) if isinstance(error, Unsaved) else _in_words(error)) from None


def together(group: dist.ProcessGroup, call: Callable[[], Result]) -> list[Result]:
    """What `call` returns on each rank, on every rank; raises Unsaved on all if it raises OSError on one."""
    try:
        outcome: tuple[Any, str | None] = call(), None
    except OSError as error:
        outcome = None, _in_words(error)
    outcomes = store.all_gather_plain(outcome, group)
    for _, fault in outcomes:
        if fault is not None:
            raise Unsaved(fault)
    return [value for value, _ in outcomes]


def _in_words(error: OSError) -> str:
    return error.strerror or str(error)


def _prepare(partial: Path, needed_bytes: int) -> None:
    """An empty folder, if there is room for what is going to be written."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    disk = os.statvfs(partial)
    if disk.f_bavail * disk.f_frsize < needed_bytes + SPARE_BYTES:
        needed, free = human_bytes(needed_bytes + SPARE_BYTES), human_bytes(disk.f_bavail * disk.f_frsize)
        missing = f"{needed} are needed, {human_bytes(SPARE_BYTES)} of them for the logs, and {free} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {missing}")


def described(files: list[Path], partial: Path) -> dict[str, list[Any]]:
    """Size and checksum of each, by its path within the checkpoint."""
    return {str(path.relative_to(partial)): [path.stat().st_size, manifest.sha256(path)] for path in files}


def sum_losses(of_ranks: list[list[float | None]]) -> list[float | None]:
    """The loss of each step from the shares of all ranks."""
    return [math.fsum(share for share in step if share is not None) for step in zip(*of_ranks, strict=True)]


def publish(partial: Path, published: Manifest) -> None:
    """Complete the folder and give it its name; raises OSError."""
    complete(partial, published)
    final = partial.with_name(published.name)
    if final.exists():  # of an earlier attempt that this one does not go on from
        final.rename(partial.with_name(f".{published.name}.replaced"))
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(partial.with_name(f".{published.name}.replaced"), ignore_errors=True)


def complete(partial: Path, described: Manifest) -> None:
    """Write the manifest, and have the disk hold all of the folder."""
    for path in (manifest.write(partial, described), partial):
        _sync(path)


def _sync(path: Path) -> None:
    """Have the disk hold a file, or a folder's list of files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def generator_states(device: torch.device) -> list[str]:
    """torch's generators on this rank, the CPU's first."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [bytes(state.tolist()).hex() for state in states]


def next_draws(device: torch.device) -> list[list[float]]:
    """The numbers that each of these generators gives next, from a copy that is thrown away."""
    copies = [torch.Generator().set_state(torch.get_rng_state())]
    if device.type == "cuda":
        copies.append(torch.Generator(device).set_state(torch.cuda.get_rng_state(device)))
    return [torch.rand(DRAWS, generator=copy, device=copy.device, dtype=torch.float64).tolist() for copy in copies]
