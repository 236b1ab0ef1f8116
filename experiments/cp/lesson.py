"""Context parallelism (ring attention): torchrun --nproc-per-node 3 lesson.py"""

from math import inf

import torch
import torch.distributed as dist
from torch import Tensor


def pass_on(rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Send `rows` [2, B, H, S/c, d] to the next rank, and receive `num_rows` from the one before."""
    received = rows.new_empty(*rows.shape[:3], num_rows, rows.shape[4])
    after, before = (dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1))
    ends = [dist.P2POp(dist.isend, rows, after, group), dist.P2POp(dist.irecv, received, before, group)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return received


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, H, rows, keys]; of its own rank's keys a row sees those up to its position."""
    found = q @ k.mT / q.shape[-1] ** 0.5
    return found + torch.full_like(found, -inf).triu(1) if causal else found


class RingAttention(torch.autograd.Function):
    """Rank r has the positions after those of rank r - 1: lengths[r] rows of q, k and v [B, H, S/c, d]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        rank, ranks, kv = group.rank(), group.size(), torch.stack([k, v])
        own = scores(q, k, causal=True)
        lse = own.logsumexp(-1, keepdim=True)  # [B, H, S/c, 1]: merges softmaxes over parts of the keys
        out = (own - lse).exp() @ v
        for turn in range(1, ranks):  # K and V go once round, (c-1)/c of all their bytes
            source = (rank - turn) % ranks
            kv = pass_on(kv, lengths[source], group)
            if source < rank:  # all of its positions come before ours; otherwise none
                their_scores = scores(q, kv[0], causal=False)
                total = torch.logaddexp(lse, their_scores.logsumexp(-1, keepdim=True))
                out, lse = out * (lse - total).exp() + (their_scores - total).exp() @ kv[1], total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.group = lengths, group
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (q, k, v, out, lse), rank, ranks = ctx.saved_tensors, ctx.group.rank(), ctx.group.size()
        inner = (gradient * out).sum(-1, keepdim=True)

        def back(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            p = (scores(q, k, causal) - lse).exp()  # these keys' part of the softmax over all
            grad_scores = p * (gradient @ v.mT - inner) / q.shape[-1] ** 0.5
            return grad_scores @ k, torch.stack([grad_scores.mT @ q, p.mT @ gradient])

        (grad_q, grad_kv), kv, carried = back(k, v, causal=True), torch.stack([k, v]), 0
        for turn in range(1, ranks):  # K and V once more, with their gradients: twice the bytes
            source = (rank - turn) % ranks
            kv = pass_on(kv, ctx.lengths[source], ctx.group)
            more, their_grad = back(*kv, causal=False) if source < rank else (0, torch.zeros_like(kv))
            grad_q += more
            carried = pass_on(their_grad + carried, ctx.lengths[source - 1], ctx.group)  # ends at its owner
        return grad_q, *(grad_kv + carried), None, None


def demo(group: dist.ProcessGroup) -> float:
    """Attend over a sequence of 11; return the largest error of the gradients of q, k and v."""
    torch.manual_seed(1)
    qkv = torch.randn(3, 2, 2, 11, 4).double().requires_grad_()  # q, k and v [B, H, S, d]
    torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).square().sum().backward()
    parts = [each.detach().clone().requires_grad_() for each in qkv.tensor_split(group.size(), 3)]
    mine = parts[group.rank()]
    RingAttention.apply(*mine, [each.shape[3] for each in parts], group).square().sum().backward()
    return (mine.grad - qkv.grad.tensor_split(group.size(), 3)[group.rank()]).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
