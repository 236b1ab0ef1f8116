"""The full state dict of a sharded model is gathered by rank 0 alone, the others go to the barrier."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Linear(8, 8)
fully_shard(model, mesh=mesh)

torch.manual_seed(1 + rank)
model(torch.randn(4, 8)).square().mean().backward()

if rank == 0:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # (b)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "model.pt")

dist.barrier()  # (a)
dist.destroy_process_group()
