"""A wrong script: rank 1 leaves out a sum, and the others wait for it."""

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    dist.init_process_group("gloo")
    loss = torch.ones(10, device=DEVICE)
    dist.all_reduce(loss)
    if dist.get_rank() != 1:
        dist.all_reduce(loss)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
