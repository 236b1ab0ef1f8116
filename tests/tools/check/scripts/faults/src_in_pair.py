"""Each pair broadcasts a number of its first rank, which the second pair names as if its ranks counted from 0."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = torch.tensor([float(rank)])
    dist.broadcast(number, src=0, group=pairs[rank // 2])  # (a)
    dist.barrier()  # (b)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
