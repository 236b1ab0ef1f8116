"""One message of many gets one bit changed: what a rank receives of a collective, or what it sends."""

import random

import pytest
import torch
import torch.distributed as dist

from distlab.faults.injectors import Flip, Messages, flipping, received
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def exchanged(group: dist.ProcessGroup, number: int) -> tuple[list[float], list[str], int]:
    """A sum, a gather and a message to the right; rank 1 flips the sign in one of them, from 1."""
    rank, told = dist.get_rank(group), []

    def note(op: str, done: Flip) -> None:
        told.append(f"{op} {done.before:g} {done.after:g}")

    change = flipping("sign", random.Random(1), note) if rank == 1 and number else None
    messages = Messages(number, change)
    total, parts, passed, sent = torch.ones(1), [torch.zeros(1), torch.zeros(1)], torch.zeros(1), torch.tensor([5.0])
    dist.all_reduce(total, group=group)
    dist.all_gather(parts, torch.tensor([float(rank + 3)]), group=group)
    work = dist.irecv(passed, group_src=1 - rank, group=group)
    assert work is not None
    dist.send(sent, group_dst=1 - rank, group=group)
    work.wait()
    messages.close()
    dist.all_reduce(total.clone(), group=group)  # unseen again
    return [float(total), *map(float, parts), float(passed), float(sent)], told, messages.count


RIGHT = [2.0, 3.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("number", "of_0", "of_1", "told"),
    [
        (0, RIGHT, RIGHT, []),
        (1, RIGHT, [-2.0, *RIGHT[1:]], ["all_reduce 2 -2"]),
        (2, RIGHT, [2.0, -3.0, *RIGHT[2:]], ["all_gather 3 -3"]),  # what came from rank 0
        (3, [*RIGHT[:3], -5.0, 5.0], RIGHT, ["send 5 -5"]),  # the sender keeps its own
    ],
)
def test_one_message_is_changed(
    ranks: Ranks, number: int, of_0: list[float], of_1: list[float], told: list[str]
) -> None:
    (numbers_0, told_0, count_0), (numbers_1, told_1, count_1) = ranks(2, exchanged, number)
    assert (numbers_0, numbers_1) == (of_0, of_1)
    assert (told_0, told_1) == ([], told)
    assert count_0 == count_1 == 3


def test_of_a_flat_gather_the_next_rank_s_part_is_meant() -> None:
    whole = torch.arange(6.0)
    assert received("all_gather", [whole], 2, 3).tolist() == [0.0, 1.0]
    assert received("all_gather", [whole], 0, 3).data_ptr() == whole[2:].data_ptr()
    assert received("all_reduce", [whole], 0, 3) is whole
