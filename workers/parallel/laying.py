"""The collectives of a process group over plain TCP, for tensors as torch hands them over: any layout, any operation.

What is sent lies in one piece; a tensor that does not is copied there, and back if it is a result. Small sums go to
rank 0 and back (star.py), larger ones straight from rank to rank (direct.py), the largest pair by pair (pairs.py), all
else straight from rank to rank too (routes.py, and straight.py where it is waited for at once).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from workers.parallel import direct, pairs, routes, star, straight
from workers.parallel.peers import Peers, Steps
from workers.parallel.picking import pick_over_tcp

SUMS = (ReduceOp.SUM, ReduceOp.AVG)


def rows_of(tensor: Tensor, parts: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """The parts of a tensor along dim 0: `sizes` of it, or equal ones."""
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(parts) if tensor.dim() else [tensor])


def flat(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, as one piece of one dim."""
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} is not sent over tcp, allowed: cpu")
    return tensor.detach().contiguous().view(-1)


def laid(places: Sequence[Tensor], make: Callable[[list[Tensor]], Steps]) -> Steps:
    """What `make` does to flat tensors, done to `places`."""
    pieces = [flat(place) for place in places]
    yield from make(pieces)
    for place, piece in zip(places, pieces, strict=True):
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece.view(place.shape))


def all_reduce(peers: Peers, tensor: Tensor, opts: Any) -> Steps:
    """Sum (or another operation) over all ranks, in place."""
    return laid([tensor], lambda pieces: _all_reduce(peers, pieces[0], opts.reduceOp.op, opts.asyncOp))


def _all_reduce(peers: Peers, piece: Tensor, op: Any, async_op: bool) -> Steps:
    name = pick_over_tcp("all_reduce", piece.nbytes, peers.world_size)
    if op in SUMS and peers.world_size > 1 and name != "server":
        yield from (pairs if name == "pairs" else direct).all_reduce(peers, piece)
    elif async_op or not piece.numel():
        yield from routes.reduced(peers, piece, op)
        yield from routes.broadcast(peers, piece, 0)
    else:
        star.all_reduce(peers, piece, routes.fold_of(op))
    _average(peers, piece, op)


def _average(peers: Peers, piece: Tensor, op: Any) -> None:
    if op == ReduceOp.AVG:
        piece.div_(peers.world_size)


def reduce(peers: Peers, tensor: Tensor, opts: Any) -> Steps:
    """The same, for the root alone."""

    def make(pieces: list[Tensor]) -> Steps:
        yield from routes.reduced(peers, pieces[0], opts.reduceOp.op, opts.rootRank)
        if peers.rank == opts.rootRank:
            _average(peers, pieces[0], opts.reduceOp.op)

    return laid([tensor], make)


def reduce_scatter(peers: Peers, place: Tensor, parts: Sequence[Tensor], opts: Any) -> Steps:
    """Everyone's part r, summed, in rank r's `place`."""
    return laid([place], lambda pieces: _reduce_scatter(peers, pieces[0], [flat(part) for part in parts], opts))


def _reduce_scatter(peers: Peers, piece: Tensor, parts: list[Tensor], opts: Any) -> Steps:
    op = opts.reduceOp.op
    name = pick_over_tcp("reduce_scatter", sum(part.nbytes for part in parts), peers.world_size)
    if op in SUMS and name == "pairs":
        yield from pairs.summed(peers, parts, piece)
    elif op in SUMS and peers.world_size > 1:
        sent = yield from direct.sum_own(peers, parts, piece)
        yield from sent
    else:
        yield from _folded(peers, piece, parts, op)
    _average(peers, piece, op)


def _folded(peers: Peers, piece: Tensor, parts: list[Tensor], op: Any) -> Steps:
    """All parts at once, then folded in the order of ranks."""
    fold = routes.fold_of(op)
    with peers.scratch(peers.world_size * piece.numel(), piece) as scratch:
        rows = list(scratch.view(peers.world_size, piece.numel()))
        yield from routes.all_to_all(peers, rows, parts)
        total = rows[0]
        for row in rows[1:]:
            fold(total, row, out=total)
        piece.copy_(total)


def broadcast(peers: Peers, tensor: Tensor, opts: Any) -> Steps:
    return laid([tensor], lambda pieces: _broadcast(peers, pieces[0], opts.rootRank, opts.asyncOp))


def _broadcast(peers: Peers, piece: Tensor, root: int, async_op: bool) -> Steps:
    if async_op or not piece.numel():
        yield from routes.broadcast(peers, piece, root)
    else:
        straight.broadcast(peers, piece, root)


def all_gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor, opts: Any) -> Steps:
    return laid(places, lambda pieces: _all_gather(peers, pieces, flat(tensor), opts.asyncOp))


def _all_gather(peers: Peers, pieces: list[Tensor], piece: Tensor, async_op: bool) -> Steps:
    if async_op or piece.nbytes > straight.UP_TO_BYTES:
        yield from routes.all_gather(peers, pieces, piece)
    else:
        straight.all_gather(peers, pieces, piece)


def gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
    return laid(places, lambda pieces: routes.gather(peers, pieces, flat(tensor), root))


def scatter(peers: Peers, place: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    return laid([place], lambda pieces: routes.scatter(peers, pieces[0], [flat(part) for part in parts], root))


def all_to_all(peers: Peers, places: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    return laid(places, lambda pieces: routes.all_to_all(peers, pieces, [flat(part) for part in parts]))


def barrier(peers: Peers, token: Tensor, async_op: bool) -> Steps:
    return _all_reduce(peers, token, ReduceOp.SUM, async_op)
