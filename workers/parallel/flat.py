"""A flat unit: the parameters of a layer as one vector, of which every rank owns a run.

Sharding a layer tensor by tensor would cost a call for each, and some tensors have fewer rows than there are ranks. Laid end
to end they are one vector that any number of ranks can share (Zhao et al. 2023, "PyTorch FSDP", section 3.2.1): one call gathers
the layer, and a rank's share of it may begin in the middle of one matrix and end in the middle of the next.

    whole   [N·c]  all parameters of the unit, views of it, c = ceil(P/N); the last N·c - P numbers are padding, so that all
                   messages are of one size
    local   [c]    this rank's chunk of it
    shard   [<=c]  the chunk without padding: uneven over the ranks, the last may own nothing; its `grad` is the summed gradient
    master  [<=c]  what the optimizer steps: the shard, or a copy of it in float32 where the weights are lower
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from workers.parallel.piece import Piece, flat_piece


class FlatUnit:
    """Some parameters, laid flat and shared out over `num_ranks`.

    Args:
        named: the parameters by name, of one dtype and device; they become views of `whole`, their numbers stay.
        keeps_whole: whether this rank keeps the whole vector (ZeRO-1 and -2), of which `local` then is a part. Otherwise `local` has
            memory of its own, and `whole` has some only between `materialize` and `free` (ZeRO-3).
        home: where the shard and the optimizer's state live; by default where the parameters are.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], num_ranks: int, rank: int, *,
        keeps_whole: bool, home: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.named = named
        first = next(iter(named.values()))
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        self.numel = sum(shape.numel() for shape in self.shapes.values())
        self.num_ranks, self.rank = num_ranks, rank
        self.chunk = -(-self.numel // num_ranks)
        self.start = min(rank * self.chunk, self.numel)
        self.length = self.owned()
        self.whole = first.detach().new_zeros(num_ranks * self.chunk)
        for parameter, view in zip(named.values(), self.views(self.whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        own = self.whole[rank * self.chunk :][: self.chunk]
        home = home or own.device
        self.local = own if keeps_whole else own.to(home, copy=True)
        self.shard = self.master = nn.Parameter(self.local[: self.length])
        exact = torch.promote_types(own.dtype, torch.float32)
        if (self.shard.device, self.shard.dtype) != (home, exact):
            self.master = nn.Parameter(self.shard.detach().to(home, exact))
        if not keeps_whole:
            self.free()

    def owned(self) -> int:
        """How many parameters this rank owns."""
        return min(self.chunk, self.numel - self.start)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a vector laid out like `whole`."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = flat[: self.numel].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes.values(), strict=True)]

    # --- the whole vector comes and goes ---

    def materialize(self) -> Tensor:
        """Give `whole` its memory, of unknown content; every parameter is a view of it already."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        return self.whole

    def free(self) -> None:
        """Let go of the memory of `whole`: it stays the same storage, which autograd's saved tensors still point to."""
        self.whole.untyped_storage().resize_(0)

    # --- from gradient to weights ---

    def add_gradient(self, part: Tensor, *, keeps: bool) -> None:
        """Add a microbatch's `part` of the summed gradient; `keeps`: it stays as it is, and may be taken itself."""
        if self.shard.grad is None:
            self.shard.grad = part if keeps else part.to(self.shard.device, copy=True)
        else:
            self.shard.grad.add_(part)

    def forget_gradients(self) -> None:
        """Begin a step."""
        for parameter in (self.shard, self.master, *self.named.values()):
            parameter.grad = None

    def deliver(self) -> None:
        """Show the optimizer this rank's gradient, in the type and at the place of the master weights."""
        if self.master is not self.shard and self.shard.grad is not None:
            self.master.grad = self.shard.grad.to(self.master.device, self.master.dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the stepped master weights as weights; the gradient that was converted for the optimizer is dropped."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
            self.master.grad = None

    # --- for those who ask ---

    def padded(self, shard: Tensor) -> Tensor:
        """A chunk whose beginning is `shard`, which is as long as `master`."""
        chunk = torch.zeros(self.chunk, dtype=shard.dtype, device=self.whole.device)
        chunk[: self.length] = shard
        return chunk

    def pieces(self, shard: Tensor) -> Iterator[tuple[str, Piece]]:
        """What this rank's `shard`, as long as `master`, holds of each parameter, by name; those of which it holds nothing are left out."""
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + shape.numel()
            first, last = max(begin, self.start), min(end, self.start + self.length)
            if first < last:
                yield name, flat_piece(shard[first - self.start : last - self.start], first - begin, shape)
            begin = end


def grouped(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[dict[str, nn.Parameter]], list[int]]:
    """The parameters of each unit by name, and which unit each layer belongs to: its own, or that of one it shares with."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    groups: list[dict[str, nn.Parameter]] = []
    unit_of = []
    for layer in layers:
        known = {owner[parameter] for parameter in layer.parameters() if parameter in owner}
        assert len(known) < 2, "a layer shares parameters with one other at most"
        index = min(known, default=len(groups))
        groups += [{}] if index == len(groups) else []
        unit_of.append(index)
        for parameter in layer.parameters():
            owner[parameter] = index
            groups[index][names[parameter]] = parameter
    return groups, unit_of
