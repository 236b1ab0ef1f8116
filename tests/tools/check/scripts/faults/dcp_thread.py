"""A thread saves a checkpoint over the group that training uses too, so the order of their calls is not fixed."""

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    saving: Any = dcp.async_save(model.state_dict(), checkpoint_id=folder[0])  # (a)
    time.sleep(2 * dist.get_rank())
    model(torch.randn(3, 4)).mean().backward()  # (b)
    saving.result()
    dist.destroy_process_group()
