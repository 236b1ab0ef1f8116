"""Blocking send and recv: neighbours in odd-even order, two messages with different tags, receives from any source."""

import torch
import torch.distributed as dist

WEIGHTS, BIAS, DONE = 1, 2, 3


def exchange(rank: int, n: int) -> None:
    """Round a ring of an even number of ranks: the even ones send first, the odd ones receive first."""
    weights, bias = torch.full((4,), float(rank)), torch.full((2,), -float(rank))
    got_weights, got_bias = torch.empty(4), torch.empty(2)
    following, previous = (rank + 1) % n, (rank - 1) % n
    if rank % 2 == 0:
        dist.send(weights, following, tag=WEIGHTS)
        dist.send(bias, following, tag=BIAS)
        dist.recv(got_weights, previous, tag=WEIGHTS)
        dist.recv(got_bias, previous, tag=BIAS)
    else:
        dist.recv(got_weights, previous, tag=WEIGHTS)
        dist.recv(got_bias, previous, tag=BIAS)
        dist.send(weights, following, tag=WEIGHTS)
        dist.send(bias, following, tag=BIAS)
    assert got_weights.tolist() == [previous] * 4
    assert got_bias.tolist() == [-previous] * 2


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        exchange(rank, n)

    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            message = torch.empty(1)
            source = dist.recv(message, tag=DONE)  # whoever is first
            assert message.item() == source * 10
            seen.add(source)
        assert seen == set(range(1, n))
        print("all have reported", flush=True)
    else:
        dist.send(torch.tensor([rank * 10.0]), 0, tag=DONE)
    dist.barrier()  # rank 0 has all reports before anybody leaves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
