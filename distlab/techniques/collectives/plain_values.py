"""Exchange of plain values between the ranks of a group, in a format that cannot run code.

c10d's `all_gather_object` sends pickles, and reading a pickle runs the code in it; gloo does not verify who is at the
other end of a connection. Here a value is JSON plus the memory of its tensors. Values are numbers, text, lists, tuples,
sets, dicts, tensors, and records of classes that the reader names.

    length of the JSON, 8 | JSON | tensor, tensor ...
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HEAD = struct.Struct("!Q")
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
NATIVE_TYPES = {type(None), bool, int, float, str}  # native in JSON; most values are, so no call is made for them
MAX_BYTES = 1 << 34


def all_gather_plain(
    mine: Any, group: dist.ProcessGroup, classes: Sequence[type] = (), root: int | None = None
) -> list[Any]:
    """Return each rank's value on all ranks, or on rank `root` only, where others get an empty list; a collective.
    Raises ValueError for data that cannot be read."""
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    data = torch.frombuffer(bytearray(to_bytes(mine, classes)), dtype=torch.uint8).to(device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device=device), group=group)
    counts = lengths.tolist()
    if not all(0 < count <= MAX_BYTES for count in counts):
        raise ValueError(f"ranks send {counts} B, allowed: 1 to {MAX_BYTES} B each")
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded, group=group)
    if root not in (None, group.rank()):
        return []
    return [from_bytes(bytes(row[:count].cpu().numpy()), classes) for row, count in zip(rows, counts, strict=True)]


def to_bytes(value: Any, classes: Sequence[type] = ()) -> bytes:
    """Return the bytes of a value; raises TypeError for other kinds of values."""
    memories: list[bytes] = []
    text = json.dumps(_plain(value, {each: each.__name__ for each in classes}, memories)).encode()
    return HEAD.pack(len(text)) + text + b"".join(memories)


def _plain(value: Any, names: dict[type, str], memories: list[bytes]) -> Any:
    """Return the value as JSON types; types that JSON lacks become a dict of one entry."""

    def plain_values(values: Any) -> list[Any]:
        return [each if type(each) in NATIVE_TYPES else _plain(each, names, memories) for each in values]

    if type(value) in NATIVE_TYPES:
        return value
    if isinstance(value, Tensor):
        host = value.detach().cpu().contiguous()
        memories.append(bytes(host.reshape(-1).view(torch.uint8).numpy()))
        return {"tensor": [str(host.dtype), list(host.shape)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if type(value) in names:
        inner = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else list(value)
        return {"record": [names[type(value)], plain_values(inner)]}
    if isinstance(value, dict):
        return {"dict": [plain_values(pair) for pair in value.items()]}
    for kind, name in ((list, ""), (torch.Size, "size"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if type(value) is kind:
            return {name: plain_values(value)} if name else plain_values(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent as a plain value")


def from_bytes(data: bytes, classes: Sequence[type] = ()) -> Any:
    """Return the value of these bytes; raises ValueError if they are invalid."""
    try:
        (length,) = HEAD.unpack_from(data)
        if length > len(data):
            raise ValueError("it is truncated")
        text = json.loads(data[HEAD.size : HEAD.size + length])
        reader = _Reader(memoryview(data)[HEAD.size + length :], {each.__name__: each for each in classes})
        value = reader.read(text)
    except Exception as error:
        raise ValueError(f"a rank's value cannot be read: {error}") from None
    if len(reader.memory):
        raise ValueError("a rank's value is longer than its header says")
    return value


class _Reader:
    """Builds values from JSON; `memory` has the tensors that are still unread."""

    def __init__(self, memory: memoryview, classes: dict[str, type]) -> None:
        self.memory, self._classes = memory, classes

    def read(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.read(each) if type(each) in (list, dict) else each for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind == "tensor":
            return self._tensor(*inner)
        if kind == "dtype":
            return DTYPES[inner]
        if kind == "record":
            return self._classes[inner[0]](*self.read(inner[1]))
        if kind == "dict":
            return dict(self.read(pair) for pair in inner)
        return {"size": torch.Size, "tuple": tuple, "set": set}[kind](self.read(inner))

    def _tensor(self, dtype_name: str, shape: list[int]) -> Tensor:
        if any(type(each) is not int or each < 0 for each in shape):
            raise ValueError(f"a tensor of shape {shape}")
        dtype = DTYPES[dtype_name]
        count = torch.Size(shape).numel() * dtype.itemsize
        if count > len(self.memory):
            raise ValueError("a truncated tensor")
        data, self.memory = bytearray(self.memory[:count]), self.memory[count:]
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)
