"""Runs of a flat vector as boxes of the dense tensor, and dense tensors assembled from the boxes of all ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import LocalShard, assembled, flat_piece
from distlab.techniques.tensor_parallel.layers import Slice
from tests.warm_ranks import Ranks


def drawn(piece: LocalShard) -> torch.Tensor:
    """The dense tensor with the values of the boxes, and -1 elsewhere; boxes must not overlap."""
    dense = torch.full(piece.shape, -1.0)
    for offset, box in piece.boxes:
        place = dense
        for dim, (first, size) in enumerate(zip(offset, box.shape, strict=True)):
            place = place.narrow(dim, first, size)
        assert (place == -1).all()
        place.copy_(box)
    return dense


@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_boxes_cover_the_flat_run(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    dense = torch.arange(float(numel))
    piece = flat_piece(dense[start:end], start, torch.Size(shape))
    wanted = torch.full((numel,), -1.0)
    wanted[start:end] = dense[start:end]
    assert torch.equal(drawn(piece).flatten(), wanted)
    assert len(piece.boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_are_views_of_the_weights() -> None:
    run = torch.arange(7.0)
    piece = flat_piece(run, 2, torch.Size([3, 4]))
    assert [offset for offset, _ in piece.boxes] == [(0, 2), (1, 0), (2, 0)]
    for _, box in piece.boxes:
        box.fill_(9)
    assert run.tolist() == [9.0] * 7


@pytest.mark.parametrize(("rank", "offset"), [(0, (0, 0)), (1, (0, 3)), (2, (0, 5))])
def test_a_slice_knows_its_offset(rank: int, offset: tuple[int, int]) -> None:
    cut, dense = Slice(1, (3, 2, 2)), torch.arange(21.0).view(3, 7)
    piece = cut.place(cut.piece(dense, rank), rank)
    assert piece.shape == dense.shape
    assert piece.boxes[0][0] == offset
    drawn_slice = drawn(piece)
    assert torch.equal(drawn_slice[drawn_slice >= 0], dense[drawn_slice >= 0])


def test_an_empty_part_has_no_boxes() -> None:
    assert Slice(0, (1, 0)).place(torch.empty(0, 4), 1) == LocalShard(torch.Size([1, 4]), [])
    assert flat_piece(torch.empty(0), 3, torch.Size([5])).boxes == []


DENSE = torch.arange(15.0, dtype=torch.float64).view(5, 3)


def gathered(group: dist.ProcessGroup, fault: str = "") -> dict[str, Tensor]:
    """A matrix with columns sliced 2 and 1, where rank 1 stores its slice as a flat run; and a number on rank 0."""
    rank, cut = group.rank(), Slice(1, (2, 1))
    part = cut.piece(DENSE, rank)
    if rank:
        run = part.reshape(-1)[1:] if fault == "missing" else part.reshape(-1)
        piece = flat_piece(run, len(part.reshape(-1)) - len(run), part.shape)
    else:
        piece = LocalShard(part.shape, [((0, 0), part)])
    pieces = [("matrix", cut.placed(piece, rank))]
    if rank == 0 or fault == "twice":
        pieces.append(("number", LocalShard(torch.Size([]), [((), torch.tensor(7.0, dtype=torch.float64))])))
    return dict(assembled(pieces, Peers(group)))


def test_rank_0_assembles_the_dense_tensors(ranks: Ranks) -> None:
    first, second = ranks(2, gathered)
    assert torch.equal(first["matrix"], DENSE)
    assert first["number"].item() == 7
    assert list(first) == ["matrix", "number"]
    assert second == {}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "matrix has 15 elements, but all ranks together have 14"),
        ("twice", "number has 1 elements, .* have 2"),
    ],
)
def test_missing_and_duplicate_elements_are_reported(ranks: Ranks, fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ranks(2, gathered, fault)


def sum_of_two_types(group: dist.ProcessGroup) -> list[tuple[torch.dtype, list[float]]]:
    """Half of a bfloat16 vector on each rank, and one float64 number that bfloat16 would round."""
    half = torch.tensor([group.rank() + 0.5, 3.0, -1.0], dtype=torch.bfloat16)
    pieces = [("halves", LocalShard(torch.Size([6]), [((3 * group.rank(),), half)]))]
    if group.rank():
        pieces.append(("number", LocalShard(torch.Size([]), [((), torch.tensor(1 / 3, dtype=torch.float64))])))
    return [(each.dtype, each.flatten().tolist()) for each in dict(assembled(pieces, Peers(group))).values()]


def test_each_tensor_keeps_its_dtype(ranks: Ranks) -> None:
    first, _ = ranks(2, sum_of_two_types)
    assert first == [(torch.bfloat16, [0.5, 3.0, -1.0, 1.5, 3.0, -1.0]), (torch.float64, [1 / 3])]


def test_a_piece_is_offset_by_its_slice() -> None:
    part = Slice(0, (2, 3)).placed(LocalShard(torch.Size([3, 3]), [((1, 0), DENSE[3:4])]), 1)
    assert part.shape == (5, 3)
    assert part.boxes[0][0] == (3, 0)
