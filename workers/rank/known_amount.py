"""A known amount through the ledger, before anything is counted by it: a meter that is wrong would call all else right.

Every rank sends every other one a tensor whose size tells who sent it to whom. What was called has to be these bytes
exactly, and what the sockets sent to each peer has to be that peer's within the frames of one message. Sizes differ by
more than that, so bytes that are counted for another peer, a quarter of them or of one peer's lost, all show.
"""

import torch

from workers.lab import Lab
from workers.measure.formulas.messages import TOLERATED_BYTES
from workers.measure.ledger import Traffic
from workers.parallel.peers import Peers

LEAST_BYTES, STEP_BYTES = 2048, 512
CONTROL = "tests/workers/rank/test_known_amount.py::test_a_ledger_that_counts_wrong_is_seen"


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
    lab.check("ledger", missing, 0.0, detail=f"of {sum(sent.values())} B sent, B off as called", control=CONTROL)
    if traffic.wire_error is not None:
        lab.say(f"{traffic.wire_error}: it is held against nothing", "ledger")
        lab.waive("ledger", traffic.wire_error)
    elif lab.config.backend == "nccl":
        lab.say(f"the wire is not looked at: {lab.config.backend} sends past the sockets where it can", "ledger")
    else:
        off = {peer: abs(traffic.wire[peer].sent - nbytes) for peer, nbytes in sent.items()}
        worst = max(off, key=lambda peer: off[peer])
        detail = f"B off on the wire to rank {worst}, which was sent {sent[worst]} B in one message"
        lab.check("ledger", off[worst], TOLERATED_BYTES, detail=detail, control=CONTROL)


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
