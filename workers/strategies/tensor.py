"""What every tensor-parallel variant shares: a part of the model and an optimizer on each rank, all samples on every.

Variants differ in how the model was split. What a rank holds a part of has its whole gradient there. What every rank
holds whole has it on every rank too, since the gradient that reaches it is the same everywhere; unless it worked on a
part of the rows alone, then the ranks' gradients are summed, once a step (Korthikanti et al. 2022, section 4.2.2,
leaves that unsaid).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.parallel.clip import clip_gradients
from workers.parallel.peers import Peers
from workers.parallel.phases import phase
from workers.parallel.sequence import sum_together
from workers.parallel.slices import Slice, join, slices_of
from workers.strategies.parameters import HoldsLayers, forward_backward
from workers.workload.data import Microbatch
from workers.workload.model import Model


class TensorParallel(HoldsLayers):
    """A Strategy over `model`, this rank's part of it.

    Args:
        slices: which parameters are held in part, by name; by default what the model's layers say.
        by_rows: what is whole works on this rank's rows only, so its gradients are summed.
        own_loss: so does the loss, and each rank returns its share; else all have the same one, and rank 0 returns it.
    """

    def __init__(
        self, model: Model, group: dist.ProcessGroup, config: Config, slices: dict[str, Slice] | None = None, *,
        by_rows: bool = False, own_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, config)
        self.group, self.by_rows = group, by_rows
        self.has_share = own_loss or group.rank() == 0
        self.slices = slices_of(model) if slices is None else slices
        self.peers = Peers(group)

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Forward and backward of all microbatches; whatever is sent, but the last sum, is sent inside of them."""
        self.model.zero_grad()
        shares = [
            local(forward_backward(self.model, microbatch, number)) for number, microbatch in enumerate(microbatches)
        ]
        if self.by_rows:
            self.sum_gradients()
        return torch.stack(shares).sum() if self.has_share else None

    def sum_gradients(self) -> None:
        """Sum the gradients of what every rank holds whole, in one call."""
        whole = [parameter for _, parameter in self.whole()]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in whole]  # the same call on all ranks
        with phase("all_reduce"):
            sums = sum_together(gradients, self.group)
        for parameter, total in zip(whole, sums, strict=True):
            parameter.grad = total

    def update(self) -> None:
        """Clip by the norm of all gradients, those that every rank holds counted on rank 0, and take a step."""
        if self.config.clip is not None:
            named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
            once = [local(gradient) for name, gradient in named if name in self.slices or self.group.rank() == 0]
            clip_gradients(once, [local(gradient) for _, gradient in named], self.config.clip, self.group)
        self.optimizer.step()

    def whole(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that every rank holds whole, and must hold the same."""
        return [(name, p) for name, p in self.model.named_parameters() if name not in self.slices]

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, the ranks' parts joined one after the other; nothing elsewhere."""
        for label, tensor in self.held(kind):
            sliced = self.slices.get(label.partition(".")[2] if kind == "optimizer" else label)
            piece: Tensor | None = local(tensor)
            if sliced is not None and tensor.dim() > sliced.dim:  # AdamW's number of steps is one number for all parts
                piece = join(local(tensor), sliced, self.peers)
            if piece is not None and self.group.rank() == 0:
                yield label, piece

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """What every rank holds whole; of DTensors those that are replicated."""
        for name, tensor in self.held(kind):
            if name not in self.slices and all(each.is_replicate() for each in getattr(tensor, "placements", ())):
                yield name, local(tensor)

    def state_dict(self) -> dict[str, Any]:
        """Of a sliced tensor this rank's piece, and a DTensor as it is."""
        state = super().state_dict()
        for label, tensor in state.items():
            sliced = self.slices.get(dense_name(label))
            if sliced is not None and tensor.dim() > sliced.dim and not hasattr(tensor, "placements"):
                state[label] = sliced.place(tensor, self.group.rank())
        return state


def dense_name(label: str) -> str:
    """The parameter of 'weights.<parameter>' or 'optimizer.<key>.<parameter>'."""
    return label.split(".", 2 if label.startswith("optimizer.") else 1)[-1]


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
