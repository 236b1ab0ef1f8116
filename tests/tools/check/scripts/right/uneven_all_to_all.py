"""Tokens sent to the ranks that own them: all_to_all_single with uneven splits, and all_to_all with lists."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()

    for step in range(3):
        to_send = [rank + other + step for other in range(n)]  # rows for each rank
        counts = torch.tensor(to_send)
        counts_coming = torch.empty_like(counts)
        dist.all_to_all_single(counts_coming, counts)
        to_receive: list[int] = counts_coming.tolist()

        tokens = torch.full((sum(to_send), 2), float(rank))
        received = torch.empty(sum(to_receive), 2)
        dist.all_to_all_single(received, tokens, to_receive, to_send)
        for source, rows in enumerate(received.split(to_receive)):
            assert torch.equal(rows, torch.full((source + rank + step, 2), float(source)))

    parts = [torch.full((4,), float(rank)) for _ in range(n)]  # as lists, gloo takes parts of one size only
    incoming = [torch.empty(4) for _ in range(n)]
    dist.all_to_all(incoming, parts)
    assert [part.mean().item() for part in incoming] == list(range(n))

    print(f"rank {rank}: received {len(received)} rows", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
