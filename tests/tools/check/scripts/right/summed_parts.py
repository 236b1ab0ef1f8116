"""Each rank's loss is its part of the mean over the tokens of all ranks, so gradients are summed and not divided."""

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        tokens = 4 + 3 * dist.get_rank()
        count = torch.tensor(float(tokens))
        dist.all_reduce(count)
        optimizer.zero_grad()
        outputs = model(torch.randn(tokens, 4))
        loss = nn.functional.cross_entropy(outputs, torch.randint(0, 5, (tokens,)), reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()
