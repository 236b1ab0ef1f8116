"""A right script: sums and gathers of tensors on a card that its ranks share over gloo."""

import os

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    dist.init_process_group("gloo")
    mine = torch.full((1000,), float(dist.get_rank() + 1), device=DEVICE)
    for _ in range(3):
        total = mine.clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        assert torch.equal(total, torch.stack(parts).sum(0))
    if os.environ["RANK"] == "0":
        print(f"{total[0].item():g} on {total.device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
