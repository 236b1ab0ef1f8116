"""A network in one process: it carries the collectives' messages without gloo, so 8 ranks are cheap and deadlocks show.

It is stricter than gloo. A send ends only when its receive was posted (gloo's rendezvous), and with `late=True` the
bytes are copied as late as possible, when either end waits: a tensor that changes in flight is detected.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import count

from torch import Tensor

from distlab.techniques.collectives.point_to_point import Addressed, GroupMessage, Message, Peers, Scratch, Steps


class Deadlock(AssertionError):
    """Every rank waits."""


class Transfer(GroupMessage):
    """One end of a tensor in flight; both ends agree on whether its bytes were copied."""

    def __init__(self, tensor: Tensor, is_send: bool) -> None:
        super().__init__(None, "", "")
        self.tensor, self.is_send = tensor, is_send
        self.other: Transfer | None = None
        self.moved = False

    def move(self) -> bool:
        """Copy the bytes once. Return False while the other end is not posted."""
        if self.other is None:
            return False
        if not self.moved:
            sender, receiver = (self, self.other) if self.is_send else (self.other, self)
            receiver.tensor.copy_(sender.tensor)
            self.moved = self.other.moved = True
        return True


class Fabric:
    """The messages between the ranks, and how many sends and bytes each rank made."""

    def __init__(self, world_size: int, late: bool) -> None:
        self.late = late
        self.peers = [FabricPeers(self, rank, world_size) for rank in range(world_size)]
        self.receives: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
        self.sends: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
        self.num_sends = [0] * world_size
        self.sent_bytes = [0] * world_size

    def run(self, steps_of: Callable[[Peers], Steps]) -> None:
        """Run the steps of all ranks in turn until all have ended; raise Deadlock if no rank can continue."""
        running = {peers.rank: steps_of(peers) for peers in self.peers}
        awaited = {rank: next(steps, None) for rank, steps in running.items()}
        while any(message is not None for message in awaited.values()):
            ready = [rank for rank, message in awaited.items() if message is not None and self.ready(message)]
            if not ready:
                raise Deadlock(f"ranks {[rank for rank, message in awaited.items() if message is not None]} wait")
            for rank in ready:
                awaited[rank] = next(running[rank], None)
        assert not any(self.receives.values()), "a receive was posted that nobody sends to"
        assert not any(self.sends.values()), "a tensor was sent that nobody receives"

    def ready(self, message: Message) -> bool:
        return message.move() if isinstance(message, Transfer) else True

    def match(self, route: tuple[int, int, int]) -> None:
        while self.receives[route] and self.sends[route]:
            receiver, sender = self.receives[route].pop(0), self.sends[route].pop(0)
            assert receiver.tensor.shape == sender.tensor.shape, (
                f"{sender.tensor.shape} sent to {receiver.tensor.shape}"
            )
            receiver.other, sender.other = sender, receiver
            if not self.late:
                sender.move()


class FabricPeers(Peers):
    """`Peers` that send through a fabric; the scratch memory and the ring's arithmetic are the product's own."""

    def __init__(self, fabric: Fabric, rank: int, world_size: int) -> None:
        self.fabric, self.rank, self.world_size = fabric, rank, world_size
        self.batched = False
        self.memory = Scratch()
        self._tags = count(1)

    def post(self, tag: int, receives: Addressed = (), sends: Addressed = ()) -> tuple[list[Message], list[Message]]:
        received = [self._post_one((peer, self.rank, tag), tensor, False) for peer, tensor in receives]
        return received, [self._post_one((self.rank, peer, tag), tensor, True) for peer, tensor in sends]

    def _post_one(self, route: tuple[int, int, int], tensor: Tensor, is_send: bool) -> Message:
        if tensor.numel() == 0:
            return GroupMessage(None, "", "")
        transfer = Transfer(tensor, is_send)
        (self.fabric.sends if is_send else self.fabric.receives)[route].append(transfer)
        if is_send:
            self.fabric.num_sends[self.rank] += 1
            self.fabric.sent_bytes[self.rank] += tensor.nbytes
        self.fabric.match(route)
        return transfer
