"""Two small programs to follow number by number: the lesson's broadcast, slice and gather, and a ring all_reduce.

The demo slices with `tensor_split`: the lesson's `len // N` loses the remainder where N does not divide 4, and gives
ranks beyond 4 nothing to say. In the ring rank r puts in 10^r everywhere, so the digits of a sum tell whose parts it
holds.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from workers.lab import Lab
from workers.parallel.collectives import Collective
from workers.parallel.peers import split


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
    lab.check("demo", float((full_result.cpu() - wanted).abs().max()), 0.0, detail=f"gathered {full_result.tolist()}")


class Move(NamedTuple):
    """In one round of the ring: `sender` passes `chunk` on to `receiver`."""

    sender: int
    receiver: int
    chunk: int


Rounds: TypeAlias = Callable[[int], list[tuple[str, list[Move]]]]  # of a world of so many ranks


def ring_rounds(world_size: int) -> list[tuple[str, list[Move]]]:
    """Each round of a ring all_reduce: what its receivers do, and who sends which chunk to whom."""
    ranks = range(world_size)
    add = [
        [Move(rank, (rank + 1) % world_size, (rank - turn) % world_size) for rank in ranks]
        for turn in range(world_size - 1)
    ]
    copy = [
        [Move(rank, (rank + 1) % world_size, (rank + 1 - turn) % world_size) for rank in ranks]
        for turn in range(world_size - 1)
    ]
    return [("add", moves) for moves in add] + [("copy", moves) for moves in copy]


def ring(lab: Lab, rounds: Rounds = ring_rounds) -> None:
    """A ring all_reduce of 2N + 1 numbers, told round by round."""
    tensor = torch.full((2 * lab.world_size + 1,), 10**lab.rank, device=lab.device)
    chunks = split(tensor, lab.world_size)
    rows: list[list[object]] = [["", "", "", digits(chunks)]]
    for number, (action, moves) in enumerate(rounds(lab.world_size), 1):
        lab.at(number, "ring")
        play(lab, action, moves, chunks)
        told = ", ".join(f"{move.sender} -> {move.receiver}: chunk {move.chunk}" for move in moves)
        rows.append([number, action, told, digits(chunks)])
    lab.table(
        "A ring all_reduce, round by round", ["round", "receivers", "who sends which chunk", "rank 0 then holds"], rows
    )
    wanted = sum(10**rank for rank in range(lab.world_size))
    lab.check("ring", float((tensor - wanted).abs().max()), 0.0, detail=f"{digits(chunks)} where {wanted} is right")


def play(lab: Lab, action: str, moves: list[Move], chunks: list[Tensor]) -> None:
    """This rank's two moves of a round: the receive is posted before the send, or all would wait for all."""
    sent = next(move for move in moves if move.sender == lab.rank)
    received = next(move for move in moves if move.receiver == lab.rank)
    arriving = torch.empty_like(chunks[received.chunk])
    operations = [
        dist.P2POp(dist.irecv, arriving, group=lab.group, group_peer=received.sender),
        dist.P2POp(dist.isend, chunks[sent.chunk].clone(), group=lab.group, group_peer=sent.receiver),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    chunks[received.chunk].copy_(arriving + chunks[received.chunk] if action == "add" else arriving)


def digits(chunks: list[Tensor]) -> str:
    """The first number of each chunk."""
    return " ".join(str(int(chunk[0])) for chunk in chunks)
