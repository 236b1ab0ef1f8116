"""Write a checkpoint from all ranks into one folder, atomically.

    .step-00000020.partial/   made by rank 0; every rank writes its shards of all variants, and syncs them to the disk
    manifest.json             written last, by rank 0, when all ranks have reported that their files exist
    step-00000020/            the same folder under its own name: an atomic rename

So a process killed at any moment leaves the earlier checkpoint unchanged, and a partial folder that the next start
removes. An error of any rank reaches all, so no rank waits for missing files. The partial folder is then removed too,
because it may fill the disk.
"""

import errno
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from distlab.contract import ShardsWritten, all_there
from distlab.lab.checkpoint import manifest
from distlab.lab.checkpoint.manifest import Manifest
from distlab.lab.checkpoint.metadata import FILE, read, to_json
from distlab.lab.report.units import human_bytes
from distlab.techniques.collectives.plain_values import all_gather_plain
from distlab.techniques.collectives.sharded_tensor import LocalShard

# Convert a strategy's state for torch.distributed.checkpoint and back, for any sharding.
#
# A Piece becomes a DTensor whose local part is a list of boxes with their offsets (torch's LocalShardsWrapper):
# DTensor forwards DCP's calls to it. DCP stores every box under the dense tensor's name and offset, so it can fill
# the boxes of any other sharding, on any number of ranks. A replicated tensor is written by one rank, the one with the
# least to write.

State = Mapping[str, Any]  # under dense names: Tensor, Piece or DTensor
NOT_FLATTENED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Damaged(Exception):
    """Raised for files that DCP cannot read, or that lack requested tensors."""


class Reader(dcp.FileSystemReader):
    """Reads the lab's own metadata, and only data from torch's pickles."""

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:  # noqa: ARG002
        """As torch's."""
        return read(Path(self.path))


class Writer(dcp.FileSystemWriter):
    """Reports a disk's own error, which torch's archive hides behind another one. Writes metadata without
    pickle."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish like torch's writer, on the rank that gathers all results."""
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        with (Path(self.path) / FILE).open("wb") as file:
            file.write(to_json(metadata))
            file.flush()
            os.fsync(file.fileno())

    def write_data(self, *arguments: Any) -> Any:
        """Write like torch's; raises OSError."""
        try:
            return super().write_data(*arguments)
        except Exception as error:
            raise disk_error(error) or error from None


def save_state(state: State, folder: Path, group: dist.ProcessGroup | None) -> list[Path]:
    """Write `state` into `folder`, a collective over `group` (None: this rank alone); return this rank's files.

    Raises OSError on every rank if one of them cannot write.
    """
    with _quiet():
        try:
            dcp.save(
                to_dcp(state, group), storage_writer=Writer(folder), planner=DefaultSavePlanner(**NOT_FLATTENED),
                process_group=group, no_dist=group is None,
            )  # fmt: skip
        except CheckpointException as error:
            raise _first_failure(error) from None
    rank = group.rank() if group is not None else 0
    return sorted([*folder.glob(f"__{rank}_*"), *(folder.glob(FILE) if rank == 0 else [])])


def load_state(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill `state` in place from `folder`; every rank of `group` reads for itself. Raises Damaged."""
    planner, reader = DefaultLoadPlanner(**NOT_FLATTENED), Reader(folder)
    with _quiet():
        try:
            dcp.load(to_dcp(state, group), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise Damaged(f"{folder} cannot be loaded: {_first_failure(error)}") from None


def load_dense(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Load whole tensors with this prefix, on the CPU, named without it; raises Damaged."""
    stored = {name: tensor for name, tensor in _metadata(folder).state_dict_metadata.items() if name.startswith(prefix)}
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.items()}
    load_state(state, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def files_named(folder: Path) -> set[str]:
    """Return the files of all ranks, as the metadata in `folder` lists them. Raises Damaged."""
    return {str(info.relative_path) for info in _metadata(folder).storage_data.values()}


def _metadata(folder: Path) -> Any:
    try:
        return read(folder)
    except Exception as error:  # a pickle can fail in any way
        raise Damaged(f"{folder / FILE} cannot be read ({error})") from None


def to_dcp(state: State, group: dist.ProcessGroup | None) -> dict[str, Any]:
    return {name: as_dtensor(part, group) if isinstance(part, LocalShard) else part for name, part in state.items()}


def as_dtensor(piece: LocalShard, group: dist.ProcessGroup | None) -> Tensor:
    """Return the boxes as the local part of a DTensor of the dense shape; a number is unchanged."""
    if not piece.shape:
        return piece.boxes[0][1]
    assert group is not None, "a shard belongs to a group of ranks"
    boxes = LocalShardsWrapper([box for _, box in piece.boxes], [offset for offset, _ in piece.boxes])
    mesh = DeviceMesh.from_group(group, boxes.device.type)
    strides = tuple(math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape)))
    return DTensor.from_local(boxes, mesh, [Shard(0)], run_check=False, shape=piece.shape, stride=strides)


def disk_error(error: BaseException | None) -> OSError | None:
    """Return the OSError behind `error`: itself, or in its chain of contexts."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _first_failure(error: Any) -> BaseException:
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure


class _quiet(warnings.catch_warnings):  # noqa: N801  it is used like a function
    """Silence DCP's warnings that one rank works by itself, which is intended."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return log


# One checkpoint, written by all ranks.

Result = TypeVar("Result")
ENTRY_BYTES = 2048  # torch's archive around a tensor, and its line in the metadata
SPARE_BYTES = 1 << 20  # disk space left for the run's logs and records


class Unsaved(Exception):
    """Raised on every rank if a checkpoint could not be written, with the disk's error."""


def needed_bytes(state: State, group: dist.ProcessGroup) -> int:
    """Return the bytes that all ranks will write, a collective; replicated tensors are written once."""
    everyone = all_gather_plain({name: own_bytes(tensor) for name, tensor in state.items()}, group)
    entries = [(name, *size) for of_rank in everyone for name, size in of_rank.items()]
    replicated: dict[str, int] = {name: nbytes for name, is_replicated, nbytes in entries if is_replicated}
    sizes = [*replicated.values(), *(int(nbytes) for _, is_replicated, nbytes in entries if not is_replicated)]
    return sum(sizes) + ENTRY_BYTES * len(sizes)


def own_bytes(tensor: Any) -> tuple[bool, int]:
    """Return whether an entry of a state is replicated, and the bytes of this rank's part."""
    if isinstance(tensor, LocalShard):
        return False, sum(box.nbytes for _, box in tensor.boxes)
    return not hasattr(tensor, "placements"), (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


def write_checkpoint(
    folder: Path, draft: Manifest, state: State, group: dist.ProcessGroup, loss_parts: Mapping[str, list[float | None]],
    *, needed_bytes: int, shards_written: ShardsWritten = all_there,
) -> Manifest:  # fmt: skip
    """Write `state` as `folder/step-<step>`, a collective; returns the published manifest, or raises Unsaved
    on every rank.

    Args:
        state: this rank's part of all variants, under '<variant>/<name>'.
        draft: the manifest as far as this rank knows it.
        loss_parts: this rank's parts of the losses since those in `draft`.
        needed_bytes: the bytes that all ranks will write.
        shards_written: returns the files that exist when this rank reports them as written.
    """
    partial, rank = folder / f".{draft.name}.partial", group.rank()
    try:
        gather(group, lambda: _prepare(partial, needed_bytes) if rank == 0 else None)
        own = save_state(state, partial, group)
        done, arrive = shards_written(own, partial, rank)
        parts = gather(group, lambda: (file_entries(done, partial), dict(loss_parts), draft.generators, draft.draws))
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
        gather(group, lambda: publish(partial, published) if rank == 0 else None)
        arrive(folder / draft.name)
        return published
    except (OSError, Unsaved) as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier(group=group)  # the partial folder's space is free again before any rank writes
        raise Unsaved(str(error) if isinstance(error, Unsaved) else _reason(error)) from None


def gather(group: dist.ProcessGroup, call: Callable[[], Result]) -> list[Result]:
    """Return every rank's result of `call`; raises Unsaved on all if it raises OSError on one."""
    try:
        outcome: tuple[Any, str | None] = call(), None
    except OSError as error:
        outcome = None, _reason(error)
    outcomes = all_gather_plain(outcome, group)
    for _, fault in outcomes:
        if fault is not None:
            raise Unsaved(fault)
    return [value for value, _ in outcomes]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _prepare(partial: Path, needed_bytes: int) -> None:
    """Make an empty folder, if the disk has enough space."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    disk = os.statvfs(partial)
    if disk.f_bavail * disk.f_frsize < needed_bytes + SPARE_BYTES:
        needed, free = human_bytes(needed_bytes + SPARE_BYTES), human_bytes(disk.f_bavail * disk.f_frsize)
        missing = f"{needed} is needed, including {human_bytes(SPARE_BYTES)} for logs, and {free} is free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {missing}")


def file_entries(files: list[Path], partial: Path) -> dict[str, list[Any]]:
    """Return each file's size and checksum, by its path within the checkpoint."""
    return {str(path.relative_to(partial)): [path.stat().st_size, manifest.sha256(path)] for path in files}


def sum_losses(of_ranks: list[list[float | None]]) -> list[float | None]:
    """Return the loss of each step from the parts of all ranks."""
    return [math.fsum(part for part in step if part is not None) for step in zip(*of_ranks, strict=True)]


def publish(partial: Path, published: Manifest) -> None:
    """Write the manifest, sync the folder to disk, and rename it; raises OSError."""
    for path in (manifest.write(partial, published), partial):
        _sync(path)
    final = partial.with_name(published.name)
    if final.exists():  # from an earlier attempt that is not resumed here
        final.rename(partial.with_name(f".{published.name}.replaced"))
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(partial.with_name(f".{published.name}.replaced"), ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
