"""A second thread sums up a metric over its own group while the main thread trains."""

import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def report(losses: "queue.Queue[float]", group: dist.ProcessGroup | None) -> None:
    for step in range(STEPS):
        mean = torch.tensor([losses.get()])
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"step {step}: mean loss {mean.item():.4f}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    dist.init_process_group("gloo")
    group = dist.new_group()  # the thread's own; the main thread uses the default group
    model = DistributedDataParallel(layer)
    data = torch.Generator().manual_seed(1 + dist.get_rank())

    losses: queue.Queue[float] = queue.Queue()
    reporter = threading.Thread(target=report, args=(losses, group))
    reporter.start()
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.put(loss.item())
    reporter.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
