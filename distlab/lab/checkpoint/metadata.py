"""The index of a checkpoint, `.metadata`, as JSON: in which file and position each part of a tensor is.

torch.distributed.checkpoint pickles it, and loading a pickle runs code in it. So JSON is written, and of pickles from
earlier versions only data are read: each of torch's classes becomes a record of its fields, and any other name is an
error.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from distlab.lab.report.reading import read_regular

FILE = ".metadata"
MOST_BYTES = 1 << 30  # some 200 per box


class Box(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a tensor: its position in the tensor, and that of its bytes in a file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int


class StoredTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A whole tensor, and the boxes in which it is stored."""

    dtype: str
    size: tuple[int, ...]
    boxes: list[Box]


Stored = dict[str, StoredTensor]  # by dense name


def to_json(metadata: Metadata) -> bytes:
    """Return the metadata that torch.distributed.checkpoint has after all ranks have written."""
    stored: Stored = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), "a state has tensors only"
        places = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in tensor.chunks]
        boxes = [
            Box(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            for chunk, place in zip(tensor.chunks, places, strict=True)
        ]
        stored[name] = StoredTensor(_name_of(tensor.properties.dtype), tuple(tensor.size), boxes)
    return msgspec.json.encode(stored)


def read(folder: Path) -> Metadata:
    """Return torch's metadata; raises OSError, or any error of an invalid file."""
    content = read_regular(folder / FILE, MOST_BYTES)
    is_json = content.startswith(b"{")
    return as_metadata(msgspec.json.decode(content, type=Stored) if is_json else from_pickle(content))


def as_metadata(stored: Stored) -> Metadata:
    """Return torch's metadata; raises ValueError for an unknown dtype."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in stored.items():
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry.dtype!r} is no dtype of torch")
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in entry.boxes]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry.size), chunks)
        places |= {MetadataIndex(name, b.offset): _StorageInfo(b.file, b.begin, b.length) for b in entry.boxes}
    return Metadata(tensors, storage_data=places)


# What earlier versions wrote.


class _Plain:
    """Replaces every class of torch's in a pickle: its arguments, without code."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        self.state = state


# BytesStorageMetadata is not among them: no state of the lab has bytes, and torch unpickles them.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


class DataOnly(pickle.Unpickler):
    """Reads a pickle whose names are all known, and calls none of them."""

    def find_class(self, module: str, name: str) -> Any:
        if name in KNOWN.get(module, ()):
            return _Plain
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if found is torch.Size:
            return tuple
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of the lab contains")


def from_pickle(content: bytes) -> Stored:
    """Return the index that torch.distributed.checkpoint pickled; invalid bytes raise any error."""
    metadata = DataOnly(io.BytesIO(content)).load().state
    places = {
        (index.state["fqn"], index.state["offset"]): place.state for index, place in metadata["storage_data"].items()
    }
    stored: Stored = {}
    for name, tensor in metadata["state_dict_metadata"].items():
        found = [(chunk.state, places[name, chunk.state["offsets"]]) for chunk in tensor.state["chunks"]]
        boxes = [
            Box(chunk["offsets"], chunk["sizes"], place["relative_path"], place["offset"], place["length"])
            for chunk, place in found
        ]
        stored[name] = StoredTensor(_name_of(tensor.state["properties"].state[0]), tensor.state["size"], boxes)
    return msgspec.convert(msgspec.to_builtins(stored), Stored)  # with the types of its fields


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
