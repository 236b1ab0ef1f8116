"""The process group is destroyed and created again in the process, over a store on another, agreed port."""

from datetime import timedelta

import torch
import torch.distributed as dist


def work(phase: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        value = torch.tensor([float(rank + step + phase)])
        dist.all_reduce(value)
        assert value.item() == sum(range(n)) + n * (step + phase)
    print(f"rank {rank}: phase {phase} done", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    work(phase=0)

    wait = timedelta(seconds=30)
    store = (
        dist.TCPStore("127.0.0.1", 0, n, is_master=True, timeout=wait, wait_for_workers=False) if rank == 0 else None
    )
    port = [store.port if store is not None else None]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()

    if store is None:
        assert port[0] is not None
        store = dist.TCPStore("127.0.0.1", port[0], n, is_master=False, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    work(phase=1)
    dist.barrier()  # nobody needs rank 0's store any more
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
