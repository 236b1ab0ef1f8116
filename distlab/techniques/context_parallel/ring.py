"""Ring attention: every rank keeps the rows of its positions, and the keys and values go round.

A rank attends to its own keys, then to those of the rank before it, which arrive meanwhile and are passed on, then to
those of the one before that. However many ranks there are, one holds its own keys, those that it computes with and
those under way; what a row has so far and its log-sum-exp are all that is kept of the others' (below). Backward the
keys go round once more, and the gradients of each rank's keys follow them from rank to rank, each adding its part,
until the last one hands them home (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3).

    forward     N-1 turns of K, V
    backward    N-1 turns of K, V and N-1 of dK, dV: 3(N-1) rows of keys and values sent for each that a rank has

Which positions a rank has is another matter (strategy.py): contiguous runs, or the two of a zig-zag. A gradient takes
the same way whatever the mask, so ranks that see nothing of a key pass it on.
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

# Attention in blocks: some rows with some of the keys, and how two such results become one.
#
# A softmax over all keys needs no more of a part of them than two things: the mean of the values under that part
# alone, and the logarithm of the sum that it was divided by (log-sum-exp, one number a row). With both, parts are
# merged in any order and without a score being kept (Milakov, Gimelshein 2018, "Online normalizer calculation for
# softmax"; Dao et al. 2022, "FlashAttention", section 3.1). The backward pass of a part needs the log-sum-exp of the
# whole row, and no other part: so it can be done wherever the keys are.
#
#     out = e^(lse1 - lse)·out1 + e^(lse2 - lse)·out2        lse = log(e^lse1 + e^lse2)
#
# On the CPU a block is computed by PyTorch's flash attention, which gives its log-sum-exp; elsewhere by the formula.

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
    """Rows with keys, [B, heads, rows or keys, head_dim]; `causal` where both are the same positions."""
    if not (q.numel() and k.numel()):  # flash attention divides by zero
        return Part(torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=sum_type(q)))
    return Part(*FLASH(q, k, v, 0.0, causal)) if q.device.type == "cpu" else by_formula(q, k, v, causal=causal)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by this block; `whole` is what the rows have from all keys."""
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


class RingAttention:
    """Causal attention over the positions of all ranks of `group`: `ring(q, k, v)` of this rank's rows.

    Each is [B, heads, rows, head_dim], and so is the result; heads are those that the caller has, such as the slice of
    a tensor-parallel rank. All ranks call it together, with as many samples and heads.
    """

    merge = staticmethod(merge)

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.peers, self.positions = Peers(group), positions

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(q, torch.stack([k, v]), self)  # type: ignore[no-any-return, no-untyped-call]

    def seen(self, source: int) -> VisibleKeys:
        """What this rank's rows see of the keys of `source`."""
        return self.positions.seen(self.peers.rank, source)

    def around(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values) of all other ranks as they come by. The first are on their way when this returns,
        and the next while the caller computes with those that it has."""
        tag = self.peers.new_tag()
        return self._others(tag, *self.pass_on(tag, mine, self.peers.rank))

    def _others(self, tag: int, incoming: Tensor, messages: list[Message]) -> Iterator[tuple[int, Tensor]]:
        for distance in range(1, self.peers.world_size):
            source, there = self.peers.after(-distance), incoming
            arrived(messages)
            if distance < self.peers.world_size - 1:
                incoming, messages = self.pass_on(tag, there, source)
            yield source, there

    def pass_on(self, tag: int, what: Tensor, source: int) -> tuple[Tensor, list[Message]]:
        """Send what is `source`'s to the next rank, and take from the one before what is the rank's before it."""
        rows = self.positions.num_rows[(source - 1) % self.peers.world_size]
        incoming = what.new_empty(*what.shape[:3], rows, what.shape[4])
        if self.peers.world_size == 1:
            return incoming, []
        next_rank, rank_before = self.peers.after(1), self.peers.after(-1)
        received, sent = self.peers.post(tag, [(rank_before, incoming)], [(next_rank, what)])
        return incoming, [*received, *sent]

    def hand_home(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        """Sum the gradients of each rank's keys on their way round: `parts` are this rank's, by rank, as the keys come
        by; returns those of this rank's keys, with `own`."""
        tag, theirs, messages = self.peers.new_tag(), None, list[Message]()
        for source, part in parts:
            arrived(messages)
            total = part if theirs is None else part.add_(theirs)
            theirs, messages = self.pass_on(tag, total, source)
        arrived(messages)
        return own if theirs is None else own.add_(theirs)


def arrived(messages: list[Message]) -> None:
    with phase("receive"):
        for message in messages:
            message.wait()


class Ring(torch.autograd.Function):
    """q [B, heads, rows, head_dim], kv [2, ...]. Forward: K and V once round. Backward: and their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingAttention) -> Tensor:
        others = ring.around(kv)
        own = attend(q, kv[0], kv[1], causal=True)
        whole = Part(own.out.to(sum_type(q)), own.lse)
        for source, theirs in others:
            first_row, num_keys = ring.seen(source)
            if num_keys:
                keys, values = theirs[:, :, :, :num_keys]
                ring.merge(whole.rows_from(first_row), attend(q[:, :, first_row:], keys, values))
        out = whole.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, whole.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ring: RingAttention = ctx.ring
        q, kv, *saved = ctx.saved_tensors
        whole, gradient = Part(*saved), gradients[0]
        others = ring.around(kv)
        to_q, *own = attend_backward(gradient, q, kv[0], kv[1], whole, causal=True)
        to_q = to_q.to(sum_type(q))

        def parts() -> Iterator[tuple[int, Tensor]]:
            for source, theirs in others:
                first_row, num_keys = ring.seen(source)
                to_theirs = torch.zeros_like(theirs)
                if num_keys:
                    keys, values = theirs[:, :, :, :num_keys]
                    rows = whole.rows_from(first_row)
                    found = attend_backward(gradient[:, :, first_row:], q[:, :, first_row:], keys, values, rows)
                    to_q[:, :, first_row:] += found[0]
                    torch.stack(found[1:], out=to_theirs[:, :, :, :num_keys])
                yield source, to_theirs

        to_kv = ring.hand_home(parts(), torch.stack(own))
        return to_q.to(q.dtype), to_kv, None


# Ring attention without the ring: a rank sends its keys straight to each rank that looks at them, and no more of
# them.
#
# In a ring every key goes all the way round, whoever looks at it. Under a causal mask folded parts (strategy.py) see
# half of an earlier rank's keys and all of a later one's, so a quarter of what goes round is seen by nobody who takes
# it. Here a rank sends in turn d what the rank d further on sees of its keys, and gets back what that one found for
# their gradients: 9(c-1)/4c of K and V on average where the ring has 3(c-1)/c, at most 5(c-1)/2c and at least
# 2(c-1)/c, by the place in the fold. The price is links: a message of turn d goes d places on, where a ring's go to a
# neighbour each.


class ShiftAttention(RingAttention):
    """The same attention; what differs is the way of keys and of their gradients."""

    def around(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, what this rank's rows see of its keys and values) of all other ranks, the next on their way while the
        caller computes with those that it has."""
        tag = self.peers.new_tag()
        return self._each(tag, mine, *self.swap(tag, 1, mine))

    def _each(self, tag: int, mine: Tensor, incoming: Tensor, messages: list[Message]) -> Iterator[tuple[int, Tensor]]:
        for distance in range(1, self.peers.world_size):
            there = incoming
            arrived(messages)
            if distance < self.peers.world_size - 1:
                incoming, messages = self.swap(tag, distance + 1, mine)
            yield self.peers.after(-distance), there

    def swap(self, tag: int, distance: int, mine: Tensor) -> tuple[Tensor, list[Message]]:
        """Send the rank that is `distance` further on what it sees of this one's keys, and take from the one that is as
        far before what is seen of its."""
        further, before = self.peers.after(distance), self.peers.after(-distance)
        incoming = self.room(mine, self.seen(before).num_keys)
        if self.peers.world_size == 1:
            return incoming, []
        num_keys = self.positions.seen(further, self.peers.rank).num_keys
        received, sent = self.peers.post(tag, [(before, incoming)], [(further, mine[:, :, :, :num_keys].contiguous())])
        return incoming, [*received, *sent]

    def hand_home(self, parts: Iterator[tuple[int, Tensor]], own: Tensor) -> Tensor:
        """Send each rank what is found for its keys, and add to `own` what the others find for this rank's."""
        tag, came, messages = self.peers.new_tag(), own.narrow(3, 0, 0), list[Message]()
        for distance, (source, part) in enumerate(parts, start=1):
            arrived(messages)
            own[:, :, :, : came.shape[3]] += came
            further = self.peers.after(distance)
            came = self.room(own, self.positions.seen(further, self.peers.rank).num_keys)
            received, sent = self.peers.post(tag, [(further, came)], [(source, part)])
            messages = [*received, *sent]
        arrived(messages)
        own[:, :, :, : came.shape[3]] += came
        return own

    def room(self, like: Tensor, num_keys: int) -> Tensor:
        return like.new_empty(*like.shape[:3], num_keys, like.shape[4])
