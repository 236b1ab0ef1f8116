"""Functional collectives: they return new tensors, which are waited for at their first use or by wait_tensor."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None

    for step in range(3):
        mine = torch.full((4, 2), float(rank + step))
        total = funcol.all_reduce(mine, "sum", group)
        everyone = funcol.all_gather_tensor(mine, gather_dim=0, group=group)
        part = funcol.reduce_scatter_tensor(torch.arange(4.0 * n) + rank, "sum", scatter_dim=0, group=group)

        expected = float(sum(r + step for r in range(n)))
        assert torch.equal(total + 0, torch.full((4, 2), expected))
        everyone = funcol.wait_tensor(everyone)
        assert everyone[:, 0].tolist() == [r + step for r in range(n) for _ in range(4)]
        part = funcol.wait_tensor(part)
        assert part.tolist() == [n * (4 * rank + i) + sum(range(n)) for i in range(4)]

    print(f"rank {rank}: done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
