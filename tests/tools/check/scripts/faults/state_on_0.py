"""Only rank 0 has trained before; DDP sends its weights to all ranks, but not the moments of Adam."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = nn.Linear(4, 2)
file = io.BytesIO()
if rank == 0:
    before = torch.optim.Adam(inner.parameters(), lr=0.1)
    for _ in range(3):
        before.zero_grad()
        inner(torch.randn(8, 4)).square().mean().backward()
        before.step()
    torch.save(before.state_dict(), file)
    file.seek(0)

model = DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
if rank == 0:
    optimizer.load_state_dict(torch.load(file))
torch.manual_seed(1 + rank)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # (a)

dist.destroy_process_group()
