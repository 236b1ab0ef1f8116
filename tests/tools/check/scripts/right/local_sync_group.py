"""A group created only by its members: use_local_synchronization needs no other rank."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    if rank > 0:
        workers = dist.new_group(list(range(1, world_size)), use_local_synchronization=True)
        for step in range(3):
            value = torch.tensor([float(rank * step)])
            dist.all_reduce(value, group=workers)
            assert value.item() == sum(r * step for r in range(1, world_size))
        dist.barrier(group=workers)

    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [world_size] * 4
    print(f"rank {rank}: done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
