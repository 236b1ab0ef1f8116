"""The ranks of one tensor-parallel group drop different elements of the same activation: each has its own seed."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
group = mesh.get_group("tp")

torch.manual_seed(0)
inputs = torch.randn(4, 16)
weight = torch.randn(16, 8)
torch.manual_seed(1 + rank)

mine = slice(8 * rank, 8 * rank + 8)
hidden = inputs[:, mine] @ weight[mine]
dist.all_reduce(hidden, group=group)
hidden = F.dropout(hidden, p=0.5, training=True)  # (a)
print(f"rank {rank}: {hidden.sum().item()}")

dist.destroy_process_group()
