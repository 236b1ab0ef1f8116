"""Only rank 0 loads the weights, and FullyShardedDataParallel takes each rank's part from its own model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    if dist.get_rank() == 0:
        module.load_state_dict({name: torch.full_like(each, 0.1) for name, each in module.state_dict().items()})
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=torch.device("cpu"))  # (a)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
