"""The script starts a process per rank, which meet at an address; a helper process of rank 0 joins no group."""

import multiprocessing

import torch
import torch.distributed as dist


class Worker:
    def __init__(self, size: int) -> None:
        self.size = size

    def join(self, rank: int) -> None:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=self.size)

    def run(self, rank: int) -> None:
        self.join(rank)
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        if rank == 0:
            helper = multiprocessing.get_context("fork").Process(target=print, args=(total.item(),))
            helper.start()
            helper.join()
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    multiprocessing.set_start_method("spawn")
    worker = Worker(2)
    ranks = [multiprocessing.Process(target=worker.run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert all(each.exitcode == 0 for each in ranks)


if __name__ == "__main__":
    main()
