"""Context parallelism (ring attention): torchrun --nproc-per-node 3 lesson.py"""

from math import inf

import torch
import torch.distributed as dist
from torch import Tensor


def pass_on(rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Give `rows` [2, B, H, S/c, d] to the next rank, and take `num_rows` from the one before."""
    came = rows.new_empty(*rows.shape[:3], num_rows, rows.shape[4])
    after, before = (dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1))
    ends = [dist.P2POp(dist.isend, rows, after, group), dist.P2POp(dist.irecv, came, before, group)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return came


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, H, rows, keys]; of a rank's own keys a row sees those up to itself."""
    found = q @ k.mT / q.shape[-1] ** 0.5
    return found + torch.full_like(found, -inf).triu(1) if causal else found


class RingAttention(torch.autograd.Function):
    """Rank r has the positions behind those of rank r - 1: lengths[r] rows of q, k and v [B, H, S/c, d]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        rank, ranks, kv = group.rank(), group.size(), torch.stack([k, v])
        own = scores(q, k, causal=True)
        lse = own.logsumexp(-1, keepdim=True)  # [B, H, S/c, 1]: with it softmaxes over parts of the keys become one
        out = (own - lse).exp() @ v
        for turn in range(1, ranks):  # K and V go once round, (c-1)/c of all their bytes
            source = (rank - turn) % ranks
            kv = pass_on(kv, lengths[source], group)
            if source < rank:  # all of its positions come before ours; else none does
                theirs = scores(q, kv[0], causal=False)
                total = torch.logaddexp(lse, theirs.logsumexp(-1, keepdim=True))
                out, lse = out * (lse - total).exp() + (theirs - total).exp() @ kv[1], total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.group = lengths, group
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (q, k, v, out, lse), rank, ranks = ctx.saved_tensors, ctx.group.rank(), ctx.group.size()
        inner = (gradient * out).sum(-1, keepdim=True)

        def back(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            p = (scores(q, k, causal) - lse).exp()  # the softmax over all keys, of these
            to_scores = p * (gradient @ v.mT - inner) / q.shape[-1] ** 0.5
            return to_scores @ k, torch.stack([to_scores.mT @ q, p.mT @ gradient])

        (to_q, to_kv), kv, carried = back(k, v, causal=True), torch.stack([k, v]), 0
        for turn in range(1, ranks):  # K and V once more, and their gradients behind them: twice as many bytes
            source = (rank - turn) % ranks
            kv = pass_on(kv, ctx.lengths[source], ctx.group)
            mine, theirs = back(*kv, causal=False) if source < rank else (0, torch.zeros_like(kv))
            to_q += mine
            carried = pass_on(theirs + carried, ctx.lengths[source - 1], ctx.group)  # on the last turn it comes home
        return to_q, *(to_kv + carried), None, None


def demo(group: dist.ProcessGroup) -> float:
    """A sequence of 11; how far a rank's gradients of q, k and v are from its part of one process's."""
    torch.manual_seed(1)
    whole = torch.randn(3, 2, 2, 11, 4).double().requires_grad_()  # q, k and v [B, H, S, d]
    torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True).square().sum().backward()
    parts = [each.detach().clone().requires_grad_() for each in whole.tensor_split(group.size(), 3)]
    mine = parts[group.rank()]
    RingAttention.apply(*mine, [each.shape[3] for each in parts], group).square().sum().backward()
    return (mine.grad - whole.grad.tensor_split(group.size(), 3)[group.rank()]).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
