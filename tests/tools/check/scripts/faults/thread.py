"""The thread that reports the progress returns early on rank 1, and rank 0's thread waits for it in all_reduce."""

import threading

import torch
import torch.distributed as dist


def report(rank: int, group: dist.ProcessGroup) -> None:
    for step in range(3):
        if rank == 1 and step == 1:
            return
        progress = torch.tensor([float(step)])
        dist.all_reduce(progress, group=group)  # (a)


dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1])

reporter = threading.Thread(target=report, args=(rank, group))
reporter.start()
total = torch.ones(4)
dist.all_reduce(total)
reporter.join()

dist.barrier()  # (b)
dist.destroy_process_group()
