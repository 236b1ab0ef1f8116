"""Flat units: which rank owns which run of a layer, and when its memory is allocated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distlab.techniques.sharded.flat_parameter import FlatParameter

pytestmark = pytest.mark.timeout(120)


def unit_of(
    numels: list[int], num_ranks: int, rank: int, *, keeps_whole: bool, dtype: torch.dtype = torch.float32
) -> FlatParameter:
    first = 0
    named = {}
    for numel in numels:
        named[f"p{first}"] = nn.Parameter(torch.arange(float(first), first + numel).to(dtype))
        first += numel
    return FlatParameter(named, num_ranks, rank, keeps_whole=keeps_whole)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 8), st.booleans())
def test_every_number_has_one_owner(numels: list[int], num_ranks: int, keeps_whole: bool) -> None:
    units = [unit_of(numels, num_ranks, rank, keeps_whole=keeps_whole) for rank in range(num_ranks)]
    assert torch.cat([unit.master.detach() for unit in units]).tolist() == list(range(sum(numels)))
    assert all(unit.local.numel() == unit.chunk for unit in units)


def test_small_units_leave_ranks_without_elements() -> None:
    lengths = [unit_of([1, 1], 4, rank, keeps_whole=False).length for rank in range(4)]
    assert lengths == [1, 1, 0, 0]


def test_weights_are_allocated_and_freed_in_one_storage() -> None:
    unit = unit_of([6, 4], 3, 1, keeps_whole=False)
    storage = unit.whole.untyped_storage()
    assert storage.nbytes() == 0
    assert [storage.data_ptr() for storage in [parameter.untyped_storage() for parameter in unit.named.values()]] == [
        0,
        0,
    ]
    unit.materialize().copy_(torch.arange(12.0))
    assert storage.nbytes() == 48
    assert unit.named["p6"].tolist() == [6, 7, 8, 9]
    unit.free()
    assert storage.nbytes() == 0
    assert unit.master.tolist() == [4, 5, 6, 7]  # the shard has its own memory


def test_a_kept_unit_stores_its_weights_once() -> None:
    unit = unit_of([6, 4], 3, 1, keeps_whole=True)
    assert unit.master.untyped_storage().data_ptr() == unit.whole.untyped_storage().data_ptr()


def test_masters_of_bfloat16_weights_are_float32() -> None:
    unit = unit_of([5], 2, 0, keeps_whole=False, dtype=torch.bfloat16)
    assert (unit.local.dtype, unit.master.dtype) == (torch.bfloat16, torch.float32)
    unit.add_gradient(torch.full((3,), 0.5, dtype=torch.bfloat16), keeps=False)
    unit.deliver()
    assert unit.master.grad is not None and unit.master.grad.dtype == torch.float32
    with torch.no_grad():
        # Smaller than the spacing of bfloat16 at 1 and 2: the master changes, the weight does not.
        unit.master.add_(1e-4)
    unit.refresh()
    assert unit.master.grad is None  # only the 16-bit gradient stays
    assert unit.local[:3].tolist() == pytest.approx([1e-4, 1, 2], rel=1e-2)
    assert unit.master[1].item() == pytest.approx(1.0001)
