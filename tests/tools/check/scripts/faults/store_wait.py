"""Rank 1 waits in a store for a key that no rank sets, while the other is in the barrier."""

import os
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
host = os.environ["MASTER_ADDR"]
timeout = timedelta(seconds=300)

port = [0]
if rank == 0:
    store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    port = [store.port]
dist.broadcast_object_list(port, src=0)
if rank != 0:
    store = dist.TCPStore(host, port[0], world_size, is_master=False, timeout=timeout)

if rank == 1:
    store.wait(["data_ready"])  # (b)

dist.barrier()  # (a)
dist.destroy_process_group()
