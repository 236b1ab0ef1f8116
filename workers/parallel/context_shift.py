"""Ring attention without the ring: a rank sends its keys straight to each rank that looks at them, and no more of them.

In a ring every key goes all the way round, whoever looks at it. Under a causal mask folded parts (positions.py) see
half of an earlier rank's keys and all of a later one's, so a quarter of what goes round is seen by nobody who takes it.
Here a rank sends in turn d what the rank d further on sees of its keys, and gets back what that one found for their
gradients: 9(c-1)/4c of K and V on average where the ring has 3(c-1)/c, at most 5(c-1)/2c and at least 2(c-1)/c, by the
place in the fold. The price is links: a message of turn d goes d places on, where a ring's go to a neighbour each.
"""

from collections.abc import Iterator

from torch import Tensor

from workers.parallel.context_ring import RingAttention, arrived
from workers.parallel.peers import Message


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
        """For so many keys and values."""
        return like.new_empty(*like.shape[:3], num_keys, like.shape[4])
