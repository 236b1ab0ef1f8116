"""First and last stage of a pipeline have one table: their gradients are summed, with a different name on each."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
layer = nn.Linear(4, 4)
stage = nn.ModuleDict({"embedding": embedding, "layer": layer} if rank == 0 else {"layer": layer, "head": head})
table = embedding.weight if rank == 0 else head.weight
dist.broadcast(table.data, src=0)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

for _ in range(3):
    optimizer.zero_grad()
    words = torch.arange(8)
    if rank == 0:
        hidden = layer(embedding(words))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty(8, 4)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(8, 4)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        nn.functional.cross_entropy(head(layer(hidden)), words.roll(1)).backward()
        gradient = hidden.grad if hidden.grad is not None else torch.zeros(8, 4)
        dist.send(gradient, 0)
    dist.all_reduce(table.grad)
    optimizer.step()

dist.destroy_process_group()
