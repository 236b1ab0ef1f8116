"""Ring attention: every rank keeps the rows of its positions, and keys and values travel round the ranks.

A rank attends to its own keys, then to those of the rank before it, which arrive meanwhile and are passed on, then to
those of the rank before that. However many ranks there are, a rank holds its own keys, those that it computes with and
those under way. Of the other ranks' keys it keeps only each row's result so far and its log-sum-exp (below). In the
backward pass the keys go round once more. The gradients of a rank's keys follow them from rank to rank, each rank adds
its part, and the last one returns them to the owner (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise
Transformers", section 3).

    forward     N-1 turns of K, V
    backward    N-1 turns of K, V and N-1 of dK, dV: 3(N-1) rows of keys and values sent for each row that a rank has

Which positions a rank has is decided elsewhere (strategy.py): contiguous runs, or the two runs of a zig-zag. A gradient
passes through all ranks, also through those whose rows see none of its keys.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Message, Peers
from distlab.techniques.context_parallel.strategy import Positions, VisibleKeys


class RingAttention:
    """Causal attention over the positions of all ranks of `group`: `ring(q, k, v)` of this rank's rows.

    Each is [B, heads, rows, head_dim], and so is the result. The heads may be a tensor-parallel rank's slice. All ranks
    call it together, with equal numbers of samples and heads.
    """

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.peers, self.positions = Peers(group), positions

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(q, torch.stack([k, v]), self)  # type: ignore[no-any-return, no-untyped-call]

    def visible_keys(self, source: int) -> VisibleKeys:
        """Return which keys of `source` this rank's rows see."""
        return self.positions.visible_keys(self.peers.rank, source)

    def receive_keys(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its keys and values) of all other ranks. The first are under way when this returns, and the next
        ones while the caller computes with those that it has."""
        tag = self.peers.new_tag()
        return self._receive_keys(tag, *self.pass_on(tag, mine, self.peers.rank))

    def _receive_keys(self, tag: int, incoming: Tensor, messages: list[Message]) -> Iterator[tuple[int, Tensor]]:
        for distance in range(1, self.peers.world_size):
            source, keys_values = self.peers.after(-distance), incoming
            wait_for(messages)
            if distance < self.peers.world_size - 1:
                incoming, messages = self.pass_on(tag, keys_values, source)
            yield source, keys_values

    def pass_on(self, tag: int, rows: Tensor, source: int) -> tuple[Tensor, list[Message]]:
        """Send the `rows` of `source` to the next rank, and receive those of the rank before `source`."""
        num_rows = self.positions.num_rows[(source - 1) % self.peers.world_size]
        incoming = rows.new_empty(*rows.shape[:3], num_rows, rows.shape[4])
        if self.peers.world_size == 1:
            return incoming, []
        next_rank, rank_before = self.peers.after(1), self.peers.after(-1)
        received, sent = self.peers.post(tag, [(rank_before, incoming)], [(next_rank, rows)])
        return incoming, [*received, *sent]

    def return_gradients(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        """Sum the gradients of each rank's keys on their way round; `parts` are what this rank adds, by rank, in the
        order of `receive_keys`. Return the gradients of this rank's keys, with `own`."""
        tag, received_sum, messages = self.peers.new_tag(), None, list[Message]()
        for source, part in parts:
            wait_for(messages)
            total = part if received_sum is None else part.add_(received_sum)
            received_sum, messages = self.pass_on(tag, total, source)
        wait_for(messages)
        return own if received_sum is None else own.add_(received_sum)


class Ring(torch.autograd.Function):
    """q [B, heads, rows, head_dim], kv [2, ...]. Forward: K and V go once round. Backward: so do their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingAttention) -> Tensor:
        arriving = ring.receive_keys(kv)
        own = attend(q, kv[0], kv[1], causal=True)
        total = Part(own.out.to(sum_type(q)), own.lse)
        for source, keys_values in arriving:
            first_row, num_keys = ring.visible_keys(source)
            if num_keys:
                keys, values = keys_values[:, :, :, :num_keys]
                merge(total.rows_from(first_row), attend(q[:, :, first_row:], keys, values))
        out = total.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, total.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ring: RingAttention = ctx.ring
        q, kv, *saved = ctx.saved_tensors
        total, gradient = Part(*saved), gradients[0]
        arriving = ring.receive_keys(kv)
        grad_q, *own = attend_backward(gradient, q, kv[0], kv[1], total, causal=True)
        grad_q = grad_q.to(sum_type(q))

        def parts() -> Iterator[tuple[int, Tensor]]:
            for source, keys_values in arriving:
                first_row, num_keys = ring.visible_keys(source)
                grad_keys_values = torch.zeros_like(keys_values)
                if num_keys:
                    keys, values = keys_values[:, :, :, :num_keys]
                    rows = total.rows_from(first_row)
                    found = attend_backward(gradient[:, :, first_row:], q[:, :, first_row:], keys, values, rows)
                    grad_q[:, :, first_row:] += found[0]
                    torch.stack(found[1:], out=grad_keys_values[:, :, :, :num_keys])
                yield source, grad_keys_values

        grad_kv = ring.return_gradients(parts(), torch.stack(own))
        return grad_q.to(q.dtype), grad_kv, None


def wait_for(messages: list[Message]) -> None:
    with phase("receive"):
        for message in messages:
            message.wait()


# Attention of some rows to some of the keys, and how two such results are merged.
#
# To merge attention over parts of the keys, a row needs two things of each part: the mean of the values, weighed by the
# softmax over that part alone, and the logarithm of its denominator (log-sum-exp, one number per row). With both, parts
# are merged in any order, and no score is kept (Milakov, Gimelshein 2018, "Online normalizer calculation for softmax";
# Dao et al. 2022, "FlashAttention", section 3.1). The backward pass of a part needs the log-sum-exp of the whole row,
# but no other part, so it can run on the rank that has the keys.
#
#     out = e^(lse1 - lse)·out1 + e^(lse2 - lse)·out2        lse = log(e^lse1 + e^lse2)
#
# On the CPU PyTorch's flash attention computes a part and its log-sum-exp; on other devices the formula does.

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """The attention of rows to some of their keys."""

    out: Tensor  # [B, heads, rows, head_dim]
    lse: Tensor  # [B, heads, rows], in float32 at least; minus infinity where a row saw no key

    def rows_from(self, first: int) -> "Part":
        """Return views of the rows from `first` on."""
        return Part(self.out[:, :, first:], self.lse[:, :, first:])


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Part:
    """Attend from rows q to keys k and values v, [B, heads, rows or keys, head_dim]; `causal` where rows and keys are
    the same positions."""
    if not (q.numel() and k.numel()):  # flash attention divides by zero
        return Part(torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=sum_type(q)))
    return Part(*FLASH(q, k, v, 0.0, causal)) if q.device.type == "cpu" else by_formula(q, k, v, causal=causal)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through these keys; `whole` is the rows' attention to all keys."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type != "cpu":
        return backward_by_formula(gradient, q, k, v, whole, causal=causal)
    found: tuple[Tensor, Tensor, Tensor] = FLASH_BACKWARD(gradient, q, k, v, whole.out, whole.lse, 0.0, causal)
    return found


def by_formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Part:
    """Compute softmax(q·k/√d)·v, with all scores in memory."""
    scores = scores_of(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    return Part((scores - lse[..., None]).exp().to(v.dtype) @ v, lse)


def backward_by_formula(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = e^(scores - lse): dV = P'·dO, dS = P∘(dO·V' - sum of dO∘O), dQ = dS·K/√d, dK = dS'·Q/√d."""
    probabilities = (scores_of(q, k, causal=causal) - whole.lse[..., None]).exp()
    inner = (gradient * whole.out).to(probabilities.dtype).sum(-1, keepdim=True)
    grad_scores = (probabilities * ((gradient @ v.mT) - inner)).to(q.dtype) / math.sqrt(q.shape[-1])
    return grad_scores @ k, grad_scores.mT @ q, probabilities.to(v.dtype).mT @ gradient


def scores_of(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Return q·k/√d [B, heads, rows, keys], in float32 at least; minus infinity where a row does not see a key."""
    scores = (q @ k.mT).to(sum_type(q)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores


def merge(part: Part, other: Part) -> None:
    """Merge the same rows' attention to other keys into `part`, in place; every row of `part` has seen a key."""
    lse = torch.logaddexp(part.lse, other.lse)
    part.out.mul_((part.lse - lse).exp_()[..., None])
    part.out.addcmul_(other.out.to(part.out.dtype), (other.lse - lse).exp_()[..., None])
    part.lse.copy_(lse)


def sum_type(x: Tensor) -> torch.dtype:
    """Return the dtype for sums of numbers like `x`: float32 for 16-bit numbers."""
    return torch.promote_types(x.dtype, torch.float32)


# Without the ring: a rank sends its keys directly to the ranks whose rows see them, and only those keys.
#
# In a ring every key visits every rank. Under a causal mask the rows of zigzag parts (strategy.py) see half of an
# earlier rank's keys and all of a later rank's, so a quarter of the keys that arrive are not used. Here, in turn d, a
# rank sends the rank d places further the keys that its rows see, and receives their gradients from it. It sends
# 9(c-1)/4c of K and V on average where the ring sends 3(c-1)/c; at most 5(c-1)/2c and at least 2(c-1)/c, depending on
# its position. In exchange, messages of turn d go d places further, while a ring's messages all go to a neighbour.


class ShiftAttention(RingAttention):
    """The same attention, with direct messages for keys and for their gradients."""

    def receive_keys(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, those of its keys and values that this rank's rows see) of all other ranks; the next are under
        way while the caller computes with those that it has."""
        tag = self.peers.new_tag()
        return self._receive_from_each(tag, mine, *self.swap(tag, 1, mine))

    def _receive_from_each(
        self, tag: int, mine: Tensor, incoming: Tensor, messages: list[Message]
    ) -> Iterator[tuple[int, Tensor]]:
        for distance in range(1, self.peers.world_size):
            keys_values = incoming
            wait_for(messages)
            if distance < self.peers.world_size - 1:
                incoming, messages = self.swap(tag, distance + 1, mine)
            yield self.peers.after(-distance), keys_values

    def swap(self, tag: int, distance: int, mine: Tensor) -> tuple[Tensor, list[Message]]:
        """Send the keys in `mine` that the rank `distance` places further sees, and receive those of the rank as many
        places before that this rank sees."""
        further, before = self.peers.after(distance), self.peers.after(-distance)
        incoming = self.empty(mine, self.visible_keys(before).num_keys)
        if self.peers.world_size == 1:
            return incoming, []
        num_keys = self.positions.visible_keys(further, self.peers.rank).num_keys
        received, sent = self.peers.post(tag, [(before, incoming)], [(further, mine[:, :, :, :num_keys].contiguous())])
        return incoming, [*received, *sent]

    def return_gradients(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        """Send each rank the gradients of its keys, and add those of this rank's keys from the others to `own`."""
        tag, received_part, messages = self.peers.new_tag(), own.narrow(3, 0, 0), list[Message]()
        for distance, (source, part) in enumerate(parts, start=1):
            wait_for(messages)
            own[:, :, :, : received_part.shape[3]] += received_part
            further = self.peers.after(distance)
            received_part = self.empty(own, self.positions.visible_keys(further, self.peers.rank).num_keys)
            received, sent = self.peers.post(tag, [(further, received_part)], [(source, part)])
            messages = [*received, *sent]
        wait_for(messages)
        own[:, :, :, : received_part.shape[3]] += received_part
        return own

    def empty(self, like: Tensor, num_keys: int) -> Tensor:
        return like.new_empty(*like.shape[:3], num_keys, like.shape[4])
