"""Actor and critic, each in its own DDP; the modules inside are called where nothing is trained."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
actor = DistributedDataParallel(nn.Linear(4, 2))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (actor, critic)]

torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    states, rewards = torch.randn(8, 4), torch.randn(8, 1)
    values = critic(states)
    advantage = rewards - critic.module(states).detach()
    loss = -(torch.log_softmax(actor(states), 1)[:, :1] * advantage).mean() + nn.functional.mse_loss(values, rewards)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        print(actor.module(states).mean().item())

dist.destroy_process_group()
