"""Attention in blocks: some rows with some of the keys, and how two such results become one.

A softmax over all keys needs no more of a part of them than two things: the mean of the values under that part alone,
and the logarithm of the sum that it was divided by (log-sum-exp, one number a row). With both, parts are merged in any
order and without a score being kept (Milakov, Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al.
2022, "FlashAttention", section 3.1). The backward pass of a part needs the log-sum-exp of the whole row, and no other
part: so it can be done wherever the keys are.

    out = e^(lse1 - lse)·out1 + e^(lse2 - lse)·out2        lse = log(e^lse1 + e^lse2)

On the CPU a block is computed by PyTorch's flash attention, which gives its log-sum-exp; elsewhere by the formula.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """What rows have from some of their keys."""

    out: Tensor  # [B, heads, rows, head_dim]
    lse: Tensor  # [B, heads, rows], in float32 at least; minus infinity where a row saw no key

    def rows_from(self, first: int) -> "Part":
        """The rows from `first` on: views."""
        return Part(self.out[:, :, first:], self.lse[:, :, first:])


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Part:
    """Rows with keys, [B, heads, rows, head_dim] and [B, heads, keys, head_dim]; `causal` where both are the same
    positions."""
    if not (q.numel() and k.numel()):  # flash attention divides by zero
        return Part(torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=sum_type(q)))
    return Part(*FLASH(q, k, v, 0.0, causal)) if q.device.type == "cpu" else by_formula(q, k, v, causal=causal)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by this block, where `whole` is what the rows have from all keys, and `gradient` its
    gradient."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type != "cpu":
        return backward_by_formula(gradient, q, k, v, whole, causal=causal)
    found: tuple[Tensor, Tensor, Tensor] = FLASH_BACKWARD(gradient, q, k, v, whole.out, whole.lse, 0.0, causal)
    return found


def by_formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Part:
    """softmax(q·k/√d)·v, with all scores."""
    scores = scores_of(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    return Part((scores - lse[..., None]).exp().to(v.dtype) @ v, lse)


def backward_by_formula(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = e^(scores - lse): dV = P'·dO, dS = P∘(dO·V' - sum of dO∘O), dQ = dS·K/√d, dK = dS'·Q/√d."""
    probabilities = (scores_of(q, k, causal=causal) - whole.lse[..., None]).exp()
    inner = (gradient * whole.out).to(probabilities.dtype).sum(-1, keepdim=True)
    to_scores = (probabilities * ((gradient @ v.mT) - inner)).to(q.dtype) / math.sqrt(q.shape[-1])
    return to_scores @ k, to_scores.mT @ q, probabilities.to(v.dtype).mT @ gradient


def scores_of(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """[B, heads, rows, keys], in float32 at least; minus infinity where a row does not see a key."""
    scores = (q @ k.mT).to(sum_type(q)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores


def merge(part: Part, more: Part) -> None:
    """Add what the same rows have from other keys to `part`, in place; `part` saw a key in every row."""
    lse = torch.logaddexp(part.lse, more.lse)
    part.out.mul_((part.lse - lse).exp_()[..., None])
    part.out.addcmul_(more.out.to(part.out.dtype), (more.lse - lse).exp_()[..., None])
    part.lse.copy_(lse)


def sum_type(x: Tensor) -> torch.dtype:
    """What sums of 16-bit numbers are kept in."""
    return torch.promote_types(x.dtype, torch.float32)
