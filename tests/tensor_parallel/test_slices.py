"""Who holds what, at uneven sizes, and that the parts become the dense tensor again."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.collectives.point_to_point import Peers
from distlab.collectives.sharded_tensor import assembled
from distlab.tensor_parallel.layers import Slice, shares
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


@given(st.integers(0, 300), st.integers(1, 8), st.integers(1, 9))
def test_shares_are_those_of_tensor_split(num_units: int, num_ranks: int, unit: int) -> None:
    wanted = [unit * len(part) for part in torch.arange(num_units).tensor_split(num_ranks)]
    assert list(shares(num_units, num_ranks, unit)) == wanted


def test_heads_stay_whole() -> None:
    assert shares(7, 4, 16) == (32, 32, 32, 16)
    assert shares(24, 5) == (5, 5, 5, 5, 4)


def test_a_piece_is_a_copy_of_its_own() -> None:
    dense = torch.arange(12.0).view(3, 4)
    piece = Slice(1, (2, 1, 1)).piece(dense, 1)
    assert piece.tolist() == [[2], [6], [10]]
    assert piece.untyped_storage().nbytes() == 12


def joined(group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]) -> list[Any]:
    dense = torch.arange(float(3 * sum(sizes))).view([3, sum(sizes)] if dim else [sum(sizes), 3])
    cut = Slice(dim, sizes)
    piece = cut.place(cut.piece(dense, group.rank()), group.rank())
    whole = dict(assembled([("whole", piece)], Peers(group)))
    return [len(whole), bool(whole) and torch.equal(whole["whole"], dense)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(4,), (2, 1), (2, 2, 1, 0), (3, 3, 2)])
def test_pieces_join_to_the_dense_tensor_on_rank_0_alone(ranks: Ranks, dim: int, sizes: tuple[int, ...]) -> None:
    assert ranks(len(sizes), joined, dim, sizes) == [[1, True], *[[0, False]] * (len(sizes) - 1)]
