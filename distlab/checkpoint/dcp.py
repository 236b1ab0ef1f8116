"""A strategy's state to torch.distributed.checkpoint and back, whatever the strategy has cut and however.

A Piece becomes a DTensor whose local part is a list of boxes with their offsets (torch's LocalShardsWrapper): DTensor
passes DCP's questions on to it. DCP files every box under the dense tensor's name and offset, so it can fill the boxes
of any other cut from them, by any number of ranks. A tensor that several ranks hold whole is written by one of them
(`dealt`).
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from distlab.collectives.sharded_tensor import LocalShard

State = Mapping[str, Any]  # under dense names: Tensor, Piece or DTensor
AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Damaged(Exception):
    """Files that DCP cannot read, or that lack what is asked of them."""


class Writer(dcp.FileSystemWriter):
    """Says of a disk that refuses what the disk says: torch's archive hides it behind a complaint of its own."""

    def write_data(self, *arguments: Any) -> Any:
        """As torch's; raises OSError."""
        try:
            return super().write_data(*arguments)
        except Exception as error:
            raise of_the_disk(error) or error from None


def save(state: State, folder: Path, group: dist.ProcessGroup | None) -> list[Path]:
    """Write `state` into `folder`, a collective over `group` (None: this rank alone); this rank's files.

    Raises OSError on every rank if one of them cannot write.
    """
    with _quiet():
        try:
            dcp.save(
                to_dcp(state, group), storage_writer=Writer(folder), planner=DefaultSavePlanner(**AS_IT_IS),
                process_group=group, no_dist=group is None,
            )  # fmt: skip
        except CheckpointException as error:
            raise _first_failure(error) from None
    rank = group.rank() if group is not None else 0
    return sorted([*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else [])])


def load(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill `state` in place with what `folder` holds; every rank of `group` reads for itself. Raises Damaged."""
    planner, reader = DefaultLoadPlanner(**AS_IT_IS), dcp.FileSystemReader(folder)
    with _quiet():
        try:
            dcp.load(to_dcp(state, group), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise Damaged(f"{folder} cannot be loaded: {_first_failure(error)}") from None


def load_dense(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose name begins so, whole, on the CPU, under the rest of their name; raises Damaged."""
    stored = {name: held for name, held in _metadata(folder).state_dict_metadata.items() if name.startswith(prefix)}
    state = {name: torch.empty(held.size, dtype=held.properties.dtype) for name, held in stored.items()}
    load(state, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def files_named(folder: Path) -> set[str]:
    """The files that the metadata in `folder` speaks of: those of all ranks. Raises Damaged."""
    return {str(info.relative_path) for info in _metadata(folder).storage_data.values()}


def _metadata(folder: Path) -> Any:
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # a pickle can fail in any way
        raise Damaged(f"{folder / '.metadata'} cannot be read ({error})") from None


# --- what is written by whom ---


def to_dcp(state: State, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The same with every Piece as a DTensor over `group`."""
    return {name: as_dtensor(held, group) if isinstance(held, LocalShard) else held for name, held in state.items()}


def as_dtensor(piece: LocalShard, group: dist.ProcessGroup | None) -> Tensor:
    """The boxes as the local part of a DTensor of the dense shape; a number is itself."""
    if not piece.shape:
        return piece.boxes[0][1]
    assert group is not None, "a piece is one of several ranks'"
    boxes = LocalShardsWrapper([box for _, box in piece.boxes], [offset for offset, _ in piece.boxes])
    mesh = DeviceMesh.from_group(group, boxes.device.type)
    strides = tuple(math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape)))
    return DTensor.from_local(boxes, mesh, [Shard(0)], run_check=False, shape=piece.shape, stride=strides)


def num_bytes(held: Any) -> int:
    """What this rank holds of one entry of a state."""
    if isinstance(held, LocalShard):
        return sum(box.nbytes for _, box in held.boxes)
    local: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return local.nbytes


def is_whole(held: Any) -> bool:
    """Whether this rank holds all of it."""
    return isinstance(held, Tensor) and not hasattr(held, "placements")


def dealt(everyone: list[dict[str, tuple[bool, int]]], rank: int) -> set[str]:
    """What `rank` writes of {name: (whole, bytes)} of all ranks: its parts, and its share of what several hold whole.

    Each goes to the rank that has least to write so far. DCP would deal so too, but after every rank has copied
    everything.
    """
    load = [sum(size for whole, size in of_rank.values() if not whole) for of_rank in everyone]
    mine = {name for name, (whole, _) in everyone[rank].items() if not whole}
    for name in dict.fromkeys(name for of_rank in everyone for name, (whole, _) in of_rank.items() if whole):
        holders = [other for other, of_rank in enumerate(everyone) if name in of_rank and of_rank[name][0]]
        writer = min(holders, key=lambda other: load[other])
        load[writer] += everyone[writer][name][1]
        if writer == rank:
            mine.add(name)
    return mine


def cloned(held: Any) -> Any:
    """A copy that the training does not touch, in the host's memory where that is possible."""
    if isinstance(held, LocalShard):
        return LocalShard(held.shape, [(offset, cloned(box)) for offset, box in held.boxes])
    return held.detach().to("cpu", copy=True) if is_whole(held) else held.detach().clone()


# --- errors ---


def of_the_disk(error: BaseException | None) -> OSError | None:
    """The OSError behind `error`, itself or what it was raised in the handling of."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _first_failure(error: Any) -> BaseException:
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure


class _quiet(warnings.catch_warnings):  # noqa: N801  it is used like a function
    """DCP warns wherever one rank works by itself, which is what we ask of it."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return log
