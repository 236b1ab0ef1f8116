"""A known amount through the ledger, before anything is counted by it: a meter that is wrong would call all else right.

Every rank sends every other one a tensor whose size tells who sent it to whom. What was called has to be these bytes
exactly, and what the sockets sent to each peer has to be that peer's within the frames of one message. Sizes differ by
more than that, so bytes that are counted for another peer, a quarter of them or of one peer's lost, all show.
"""

import torch
from torch import Tensor

from distlab.collectives.costs import TOLERATED_BYTES
from distlab.collectives.point_to_point import Peers
from distlab.lab import Lab
from distlab.measure.traffic import Traffic
from distlab.transport.process_group import TcpGroup
from distlab.transport.tcp import Channel

LEAST_BYTES, STEP_BYTES = 2048, 512
AMOUNT_CONTROL = "tests/rank/test_known_amount.py::test_a_ledger_that_counts_wrong_is_seen"


def amount(sender: int, receiver: int) -> int:
    """Bytes from `sender` to `receiver`: of eight ranks each sends eight different ones, and gets as many."""
    return LEAST_BYTES + STEP_BYTES * ((sender + 3 * receiver) % 8)


def check_ledger(lab: Lab) -> None:
    """Send it, and find it; a few messages, 20 ms."""
    if lab.world_size == 1:
        lab.say("one rank sends nothing, so there is nothing to count", "ledger")
        return
    lab.at(0, "the ledger")
    traffic = counted(lab)
    others = [rank for rank in range(lab.world_size) if rank != lab.rank]
    sent = {peer: amount(lab.rank, peer) for peer in others}
    missing = abs(traffic.called_bytes - sum(sent.values()))
    lab.check("ledger", missing, 0.0, detail=f"of {sum(sent.values())} B sent, B off as called", control=AMOUNT_CONTROL)
    if traffic.wire_error is not None:
        lab.say(f"{traffic.wire_error}: it is compared with nothing", "ledger")
        lab.waive("ledger", traffic.wire_error)
    elif lab.config.backend == "nccl":
        lab.say(f"the wire is not looked at: {lab.config.backend} sends past the sockets where it can", "ledger")
    else:
        off = {peer: abs(traffic.wire[peer].sent - nbytes) for peer, nbytes in sent.items()}
        worst = max(off, key=lambda peer: off[peer])
        detail = f"B off on the wire to rank {worst}, which was sent {sent[worst]} B in one message"
        lab.check("ledger", off[worst], TOLERATED_BYTES, detail=detail, control=AMOUNT_CONTROL)


def counted(lab: Lab) -> Traffic:
    """What the ledger sees of one message from each rank to each."""
    peers = Peers(lab.group)
    device = lab.device if peers.batched else torch.device("cpu")
    others = [rank for rank in range(lab.world_size) if rank != lab.rank]
    receives = [(peer, torch.empty(amount(peer, lab.rank), dtype=torch.uint8, device=device)) for peer in others]
    sends = [(peer, torch.zeros(amount(lab.rank, peer), dtype=torch.uint8, device=device)) for peer in others]
    with lab.count() as traffic:
        received, sent = peers.post(peers.new_tag(), receives, sends)
        for message in (*received, *sent):
            message.wait()
    return traffic


# Known messages over plain TCP, before anything is sent by it: of two groups, and of one key after each other.
#
# Every rank sends to its right neighbour. What two groups send under one tag comes over one connection, and a key
# tells which is whose; of one key the first that was sent is the first that is received, whether it was posted, came
# before anybody asked, or is taken. A barrier between the two makes sure what has come by then, on any machine.

MESSAGES_CONTROL = "tests/rank/test_known_messages.py::test_messages_that_are_mixed_are_seen"


def check_transport(lab: Lab) -> None:
    """Send them, and look at what came; a few messages, 10 ms."""
    if lab.world_size == 1 or not isinstance(lab.group, TcpGroup):
        return
    lab.at(0, "the transport")
    transport, ranks = lab.group.channel.transport, range(lab.world_size)
    one, other = (Channel(transport, ranks, lab.rank, f"known {name}") for name in ("one", "other"))
    came = [*of_two_groups(lab, one, other), *posted_then_taken(lab, one), *early_then_taken(lab, one)]
    faults = [
        f"message {number} where message {wanted} was due" for wanted, number in enumerate(came) if number != wanted
    ]
    detail = faults[0] if faults else f"{len(came)} messages of two groups"
    lab.check("transport order", len(faults), 0, detail=detail, control=MESSAGES_CONTROL)


def of_two_groups(lab: Lab, one: Channel, other: Channel) -> list[int]:
    """Messages 0 and 1 under one tag, of which the second is asked for first."""
    left, right = (lab.rank - 1) % lab.world_size, (lab.rank + 1) % lab.world_size
    sent = [channel.send([numbered(number)], right, 1) for number, channel in enumerate((one, other))]
    places = [numbered(), numbered()]
    awaited = [channel.recv([place], left, 1) for channel, place in ((other, places[1]), (one, places[0]))]
    for message in (*awaited, *sent):
        message.wait()
    return [int(place) for place in places]


def posted_then_taken(lab: Lab, channel: Channel) -> list[int]:
    """Messages 2 and 3, of which the first was posted when the second one is taken."""
    left, right = (lab.rank - 1) % lab.world_size, (lab.rank + 1) % lab.world_size
    first, second = numbered(), numbered()
    posted = channel.recv([first], left, 2)
    sent = [channel.send([numbered(number)], right, 2) for number in (2, 3)]
    lab.exchange.barrier("two messages of one key")
    channel.recv_when_awaited([second], left, 2).wait()
    for message in (posted, *sent):
        message.wait()
    return [int(first), int(second)]


def early_then_taken(lab: Lab, channel: Channel) -> list[int]:
    """Messages 4, 5 and 7 of one key and 6 of another, which is asked for first: 4 and 5 have come when 7 is sent."""
    left, right = (lab.rank - 1) % lab.world_size, (lab.rank + 1) % lab.world_size
    places = [numbered() for _ in range(4)]
    sent = [channel.send([numbered(number)], right, tag) for number, tag in ((4, 3), (5, 3), (6, 4))]
    channel.recv([places[2]], left, 4).wait()
    lab.exchange.barrier("messages that came early")
    sent.append(channel.send([numbered(7)], right, 3))
    lab.exchange.barrier("and one more of their key")
    for place in (places[0], places[1], places[3]):
        channel.recv_when_awaited([place], left, 3).wait()
    for message in sent:
        message.wait()
    return [int(place) for place in places]


def numbered(number: int = -1) -> Tensor:
    """A message that says which it is; of a place, none."""
    return torch.tensor([number])
