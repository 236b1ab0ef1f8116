"""An all-reduce around a ring: in each step one chunk of the buffer is sent, and the received one added to another."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(buffer: Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % n, (rank - 1) % n
    chunks = buffer.chunk(n)

    for step in range(n - 1):  # each chunk is summed up on its way
        leaving, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(coming)
        sent, arrived = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, leaving, following), dist.P2POp(dist.irecv, received, previous)]
        )
        arrived.wait()
        coming += received  # another slice than the one that may still be leaving
        sent.wait()

    for step in range(n - 1):  # the sums go round
        leaving, coming = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, leaving, following), dist.P2POp(dist.irecv, coming, previous)]
        )
        for work in works:
            work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        buffer = torch.arange(12.0) * (rank + 1) + step
        ring_all_reduce(buffer)
        expected = torch.arange(12.0) * (n * (n + 1) / 2) + n * step
        torch.testing.assert_close(buffer, expected)
    print(f"rank {rank}: the ring's sums are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
