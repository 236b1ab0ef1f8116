"""PyTorch's own context parallelism: its ring functions given the CPU's kernel, and context_parallel around them.

`context_parallel` replaces scaled_dot_product_attention by a ring over the mesh, for the kernels of a GPU alone. The
two functions that go round take any kernel, so that what they do can be held beside ours: K and V by an all_gather, dK
and dV by an all_to_all, positions folded as in `zigzag`, and equal runs alone.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.config import Config
from distlab.context_parallel.positions import Positions, zigzag
from distlab.context_parallel.ring import FLASH, FLASH_BACKWARD
from distlab.context_parallel.strategy import ContextParallel, OwnRows
from distlab.contract import Strategy
from distlab.mesh.grid import Mesh
from distlab.workload.model import Model, causal

SEQUENCE_DIM = 2  # of [B, heads, rows, head_dim]


def torch_ring(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Its ring functions, called by hand."""
    group = mesh["cp"]
    positions = zigzag(config.seq, group.size())
    return ContextParallel(model, positions, TorchRing(group), group, config, rank=group.rank())


def by_context_parallel(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """What its users write: plain attention, inside of its context."""
    from torch.distributed.device_mesh import DeviceMesh

    group = mesh["cp"]
    positions, devices = zigzag(config.seq, group.size()), DeviceMesh.from_group(group, config.device)
    rows = partial(InContext, devices)
    return ContextParallel(model, positions, causal, group, config, rank=group.rank(), rows=rows)


class TorchRing:
    """q, k, v [B, heads, rows, head_dim] to as many."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = (each.contiguous() for each in (q, k, v))
        return Templated.apply(*dense, self.group)  # type: ignore[no-any-return, no-untyped-call]


class Templated(torch.autograd.Function):
    """Its forward and its backward, each with the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        # Not at the top: it takes a rank a second, and no other variant needs it.
        from torch.distributed.tensor.experimental._context_parallel import _attention as own

        own._cp_options.convert_to_f32 = q.dtype != torch.float64
        found = own._templated_ring_attention(
            group, SEQUENCE_DIM, FLASH, q, k, v, is_causal=True, dropout_p=0.0
        )  # fmt: skip
        ctx.group = group
        ctx.save_for_backward(q, k, v, *found[:2])
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as own

        q, k, v, out, lse = ctx.saved_tensors
        to_q, to_k, to_v, *_ = own._templated_ring_attention_backward(
            ctx.group, SEQUENCE_DIM, kernel, gradients[0], "grad_out", q, k, v, out, lse, True
        )
        return to_q, to_k, to_v, None


def kernel(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """The backward of the CPU's, with what PyTorch's function gives by name."""
    dense = [each.contiguous() for each in (given["grad_out"], query, key, value, given["out"])]
    found: tuple[Tensor, ...] = FLASH_BACKWARD(*dense, given["logsumexp"], 0.0, given["is_causal"])
    return found


class InContext(OwnRows):
    """`context_parallel` cuts the samples in their place, folded."""

    def __init__(self, devices: Any, model: Model, positions: Positions, rank: int) -> None:
        super().__init__(model, positions, rank)
        self.devices = devices

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental import context_parallel

        cut = [inputs.clone(), targets.clone()]
        with context_parallel(self.devices, buffers=cut, buffer_seq_dims=[1, 1]):
            loss: Tensor = self.model(*cut)
        return loss
