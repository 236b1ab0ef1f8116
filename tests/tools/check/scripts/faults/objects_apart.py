"""Rank 0 gathers an object from all, where the others expect one from rank 1."""

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    if dist.get_rank() == 0:
        dist.all_gather_object(found, "again")  # (a)
    else:
        dist.broadcast_object_list(found, src=1)  # (b)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
