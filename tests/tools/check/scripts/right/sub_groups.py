"""Overlapping groups: every rank creates all of them in the same order, only the members use them."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = [[0, 1], [1, 2], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]

    for step in range(3):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                value = torch.tensor([float(rank + step)])
                dist.all_reduce(value, group=group)
                assert value.item() == sum(ranks) + len(ranks) * step

    if rank in members[1]:
        gathered = [torch.zeros(2) for _ in members[1]]
        dist.all_gather(gathered, torch.full((2,), float(rank)), group=groups[1])
        assert [t[0].item() for t in gathered] == members[1]

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    print(f"rank {rank}: all sums as expected", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
