"""A collective from a thread without Python frames, as in a GPU's backward pass, and one without a handle."""

import _thread
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.distributed_c10d._get_default_group().boxed()
barrier = torch.ops.c10d.barrier.default._op
_thread.start_new_thread(barrier, (torch.zeros(1), group, [], True, 60_000))
time.sleep(0.5)
dist.barrier()
dist.destroy_process_group()
