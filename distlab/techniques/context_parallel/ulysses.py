"""Ulysses: each rank computes some heads of the whole sequence, and some positions of everything else.

Before attention an all-to-all gives each rank all positions of some heads of q, k and v, in place of some positions of
all heads; behind attention another one does the reverse for the result. In the backward pass each all-to-all is its own
transpose (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). A rank keeps its own heads' part of a tensor: per layer
it sends (N-1)/N of eight tensors of own rows, where a ring sends six whole ones N-1 times.

At most as many ranks as heads have work. Heads and positions may be shared out unevenly; a rank without either sends
and receives what the others need.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distlab.techniques.collectives.autograd import linear
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.context_parallel.strategy import Positions
from distlab.techniques.tensor_parallel.layers import partition_sizes


class UlyssesAttention:
    """Causal attention over the positions of all ranks of `group`, contiguous ones: `ulysses(q, k, v)` of this rank's
    rows.

    Each is [B, heads, rows, head_dim], and so is the result. All ranks call it together, with equal numbers of samples
    and heads.
    """

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.peers, self.positions = Peers(group), positions

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        swap = Swap(self.peers, self.positions.num_rows, partition_sizes(q.shape[1], self.peers.world_size))
        q, k, v = linear(torch.stack([q, k, v]), swap.to_heads, swap.to_rows)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads of this rank, S, head_dim]
        return linear(mixed[None], swap.to_rows, swap.to_heads)[0]


class Swap:
    """The all-to-all between [n, B, heads, own rows, head_dim] and [n, B, own heads, rows, head_dim]."""

    def __init__(self, peers: Peers, rows: tuple[int, ...], heads: tuple[int, ...]) -> None:
        self.peers, self.rows, self.heads = peers, rows, heads

    def to_heads(self, x: Tensor) -> Tensor:
        """Give own rows of all heads, and return all rows of own heads."""
        own = self.heads[self.peers.rank]
        return torch.cat(self.exchange(x.split(self.heads, 2), [(own, rows) for rows in self.rows]), 3)

    def to_rows(self, x: Tensor) -> Tensor:
        """Give all rows of own heads, and return own rows of all heads."""
        own = self.rows[self.peers.rank]
        return torch.cat(self.exchange(x.split(self.rows, 3), [(heads, own) for heads in self.heads]), 2)

    def exchange(self, parts: tuple[Tensor, ...], shapes: list[tuple[int, int]]) -> list[Tensor]:
        """Send part p to rank p, and return the ranks' parts for this one, of these `shapes` (heads, rows)."""
        peers, like = self.peers, parts[0]
        arrived = [like.new_empty(*like.shape[:2], *shape, like.shape[4]) for shape in shapes]
        arrived[peers.rank] = parts[peers.rank]
        others = [peers.after(distance) for distance in range(1, peers.world_size)]
        receives = [(other, arrived[other]) for other in reversed(others)]
        sends = [(other, parts[other].contiguous()) for other in others]
        received, sent = peers.post(peers.new_tag(), receives, sends)
        with phase("receive"):
            for message in (*received, *sent):
                message.wait()
        return arrived
