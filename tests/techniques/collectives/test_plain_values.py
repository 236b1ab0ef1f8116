"""Plain values survive encoding and decoding; other types and invalid bytes are refused."""

import json
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.collectives.plain_values import HEAD, all_gather_plain, from_bytes, to_bytes
from tests.warm_ranks import Ranks


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass(frozen=True)
class Record:
    name: str
    value: Any


CLASSES = (Pair, Record)
kinds = st.sampled_from(["tensor", "dtype", "record", "dict", "tuple", "set", "size", "another"])
plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(kinds, inner, max_size=2),
    max_leaves=8,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


@given(values)
def test_values_round_trip(value: Any) -> None:
    found = from_bytes(to_bytes(value, CLASSES), CLASSES)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 3).to(dtype)
    found, size, kind, seen = from_bytes(to_bytes((tensor, tensor.shape, dtype, {1, 2})))
    assert torch.equal(found, tensor) and found.dtype == dtype and found.shape == tensor.shape
    assert (size, kind, seen) == (tensor.shape, dtype, {1, 2}) and type(size) is torch.Size


def test_other_types_are_not_sent() -> None:
    with pytest.raises(TypeError, match="a Pair cannot be sent as a plain value"):
        to_bytes(Pair(1))
    with pytest.raises(TypeError, match="a function cannot be sent as a plain value"):
        to_bytes([from_bytes])


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was read",)


def encoded(plain: Any, memory: bytes = b"") -> bytes:
    text = json.dumps(plain).encode()
    return HEAD.pack(len(text)) + text + memory


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[" * 9000, pickle.dumps(Attack()), encoded({"record": ["Path", ["/"]]}), encoded({"dtype": "device"}),
        encoded({"tensor": ["torch.float64", [10**9]]}), encoded({"tensor": ["torch.float64", [-1, -1]]}, bytes(8)),
        encoded({"tensor": ["torch.float64", [10**30]]}), encoded({"a": 1, "b": 2}), encoded({"dict": [[[], 1]]}),
        encoded(1, b"x"), HEAD.pack(2**63) + b"1", HEAD.pack(200_000) + b"[" * 200_000,
    ],
    ids=range(13),
)  # fmt: skip
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a rank's value"):
        from_bytes(data, CLASSES)


@given(st.binary(max_size=200) | plain.map(encoded))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        from_bytes(data, CLASSES)
    except ValueError:
        return


def test_all_gather_returns_every_ranks_value(ranks: Ranks) -> None:
    assert ranks(3, gathered) == [[(0, [0.0] * 0), (1, [0.0]), (2, [0.0, 0.0])]] * 3


def gathered(group: dist.ProcessGroup) -> list[Any]:
    found = all_gather_plain(Pair(group.rank(), torch.zeros(group.rank())), group, CLASSES)
    return [(each.first, each.second.tolist()) for each in found]
