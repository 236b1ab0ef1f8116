"""Dense tensors from boxes that ranks hold, and what is missing or there twice."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.point_to_point import Peers
from distlab.collectives.sharded_tensor import LocalShard, assembled, flat_piece
from distlab.tensor_parallel.layers import Slice
from distlab.testing.warm_ranks import Ranks

DENSE = torch.arange(15.0, dtype=torch.float64).view(5, 3)

pytestmark = pytest.mark.timeout(60)


def gathered(group: dist.ProcessGroup, fault: str = "") -> dict[str, Tensor]:
    """A matrix whose columns are sliced 2 and 1, of which rank 1 holds its slice in a flat run, and a number of rank
    0's."""
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


def test_boxes_of_all_ranks_make_the_dense_tensors_on_rank_0(ranks: Ranks) -> None:
    first, second = ranks(2, gathered)
    assert torch.equal(first["matrix"], DENSE)
    assert first["number"].item() == 7
    assert list(first) == ["matrix", "number"]
    assert second == {}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "matrix has 15 elements, and all ranks together hold 14"),
        ("twice", "number has 1 elements, .* hold 2"),
    ],
)
def test_what_is_not_there_once_is_said(ranks: Ranks, fault: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        ranks(2, gathered, fault)


def test_a_piece_of_a_slice_stands_where_the_slice_does() -> None:
    part = Slice(0, (2, 3)).placed(LocalShard(torch.Size([3, 3]), [((1, 0), DENSE[3:4])]), 1)
    assert part.shape == (5, 3)
    assert part.boxes[0][0] == (3, 0)
