"""Actor and critic, each in its own DDP; the critic's loss is computed with the module inside it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
actor = DistributedDataParallel(nn.Linear(4, 2))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))  # (a)
value_of = critic.module  # (b)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.01)

torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    states, rewards = torch.randn(8, 4), torch.randn(8, 1)
    values = value_of(states)
    advantage = (rewards - values).detach()
    loss = -(torch.log_softmax(actor(states), 1)[:, :1] * advantage).mean() + nn.functional.mse_loss(values, rewards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
