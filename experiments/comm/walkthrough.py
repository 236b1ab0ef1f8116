"""Two small programs to follow number by number: the lesson's broadcast, slice and gather, and a ring all_reduce.

The demo slices with `tensor_split`: the lesson's `len // N` loses the remainder where N does not divide 4, and gives
ranks beyond 4 nothing to say. The ring is the variant's own (distlab/collectives/ring.py): its messages tell by their
digits which chunk they are and whose parts they hold.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives import ring as ring_by_hand
from distlab.collectives.by_hand import Algorithm, Collective
from distlab.collectives.point_to_point import Addressed, Message, Peers, Pending, split
from distlab.lab import Lab


def broadcast_slice_gather(lab: Lab) -> None:
    """Rank 0's four numbers to all, each rank works on its slice, and everyone gets all results."""
    lab.at(0, "demo")
    # The lesson draws the first number; its printed run drew 37, which is what the default seed of 1 gives here.
    full_data = torch.arange(4) + 36 + lab.config.seed if lab.rank == 0 else torch.zeros(4, dtype=torch.long)
    full_data = full_data.to(lab.device)
    dist.broadcast(full_data, group=lab.group, group_src=0)
    slices = split(full_data.float(), lab.world_size)
    local_result = slices[lab.rank] * (lab.rank + 1)
    full_result = torch.empty(4, device=lab.device)
    Collective(lab.group).all_gather(full_result, local_result)
    lab.say(f"rank {lab.rank} full data: {full_data.tolist()}", all_ranks=True)
    lab.say(f"rank {lab.rank} received data: {slices[lab.rank].tolist()}", all_ranks=True)
    lab.say(f"rank {lab.rank} local result: {local_result.tolist()}, shape {list(local_result.shape)}", all_ranks=True)
    lab.say(f"rank {lab.rank} final gathered result: {full_result.tolist()}", all_ranks=True)
    numbers = torch.arange(4) + 36 + lab.config.seed
    wanted = torch.cat([part * (rank + 1) for rank, part in enumerate(split(numbers, lab.world_size))])
    wrong = float((full_result.cpu() - wanted).abs().max())
    control = "tests/experiments/test_comm.py::test_a_wrong_primitive_is_seen"
    lab.check("demo", wrong, 0.0, detail=f"gathered {full_result.tolist()}", control=control)


class RecordingPeers(Peers):
    """Peers that note the messages of each round: (receiver, first number of what is sent)."""

    def __init__(self, group: dist.ProcessGroup, chunks: list[Tensor]) -> None:
        super().__init__(group)
        self.chunks, self.sent, self.held = chunks, list[tuple[int, int]](), list[str]()

    def post(self, tag: int, receives: Addressed = (), sends: Addressed = ()) -> tuple[list[Message], list[Message]]:
        """As `Peers.post`; what the chunks hold now is what the round before left."""
        sends = list(sends)
        self.held.append(digits(self.chunks))
        self.sent += [(peer, int(tensor[0])) for peer, tensor in sends]
        return super().post(tag, receives, sends)


def marked(lab: Lab) -> tuple[Tensor, Tensor]:
    """2N + 1 numbers to sum, and their sum: in chunk c rank r puts in (c+1)·10^r, so the digit names the chunk, and its
    places the ranks whose parts are in it."""
    ranks, digit = range(lab.world_size), torch.empty(2 * lab.world_size + 1, dtype=torch.long, device=lab.device)
    for number, chunk in enumerate(split(digit, lab.world_size), 1):
        chunk.fill_(number)
    return digit * 10**lab.rank, digit * sum(10**rank for rank in ranks)


def ring(lab: Lab, algorithm: Algorithm = ring_by_hand) -> None:
    """The ring all_reduce of the variant `ring`, told round by round."""
    tensor, wanted = marked(lab)
    chunks = split(tensor, lab.world_size)
    peers = RecordingPeers(lab.group, chunks)
    lab.at(0, "ring")
    Pending(algorithm.all_reduce(peers, tensor)).wait()
    held = [*peers.held, digits(chunks)]
    rows: list[list[object]] = [["", "", "", held[0]]]
    finished = set(wanted.tolist())
    for number, moves in enumerate(zip(*lab.exchange.everyone("ring", peers.sent), strict=True), 1):
        told = ", ".join(f"{sender} -> {receiver}: {value}" for sender, (receiver, value) in enumerate(moves))
        action = "copy" if {value for _, value in moves} <= finished else "add"
        rows.append([number, action, told, held[number]])
    columns = ["round", "receivers", "who sends what to whom", "rank 0 then holds"]
    lab.table("A ring all_reduce, round by round: the digit is the chunk, its places are the ranks", columns, rows)
    lab.check("ring", float((tensor - wanted).abs().max()), 0.0, detail=f"{digits(chunks)} in the end")


def digits(chunks: list[Tensor]) -> str:
    """The first number of each chunk."""
    return " ".join(str(int(chunk[0])) for chunk in chunks)
