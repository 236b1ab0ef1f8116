"""Ring attention: every rank keeps the rows of its positions, and the keys and values go round.

A rank attends to its own keys, then to those of the rank before it, which arrive meanwhile and are passed on, then to
those of the one before that. However many ranks there are, one holds its own keys, those that it computes with and
those under way; what a row has so far and its log-sum-exp are all that is kept of the others' (blocks.py). Backward the
keys go round once more, and the gradients of each rank's keys follow them from rank to rank, each adding its part,
until the last one hands them home (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3).

    forward     N-1 turns of K, V
    backward    N-1 turns of K, V and N-1 of dK, dV: 3(N-1) rows of keys and values sent for each that a rank has

Which positions a rank has is another matter (positions.py): contiguous runs, or the two of a zig-zag. A gradient takes
the same way whatever the mask, so ranks that see nothing of a key pass it on.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.blocks import Part, attend, attend_backward, merge, sum_type
from workers.parallel.peers import Message, Peers
from workers.parallel.phases import phase
from workers.parallel.positions import Positions, Seen


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

    def seen(self, source: int) -> Seen:
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
        """Send what belongs to `source` to the next rank, and take from the one before what belongs to the one before
        `source`."""
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
    """Return when all are."""
    with phase("receive"):
        for message in messages:
            message.wait()


class Ring(torch.autograd.Function):
    """q [B, heads, rows, head_dim], kv [2, B, heads, rows, head_dim]. Forward: K and V once round. Backward: both
    again, and their gradients."""

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
