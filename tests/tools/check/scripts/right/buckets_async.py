"""Gradients are all-reduced during the backward pass: a layer's slice of one flat buffer as soon as it is full."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Buckets:
    """One flat buffer, a slice of it per layer; a slice in flight is not touched until wait()."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.flat = torch.zeros(sum(p.numel() for layer in layers for p in layer.parameters()))
        self.handles: list[dist.Work] = []
        start = 0
        for layer in layers:
            self._watch(list(layer.parameters()), start)
            start += sum(p.numel() for p in layer.parameters())

    def _watch(self, parameters: list[nn.Parameter], start: int) -> None:
        bucket = self.flat[start : start + sum(p.numel() for p in parameters)]
        views = dict(zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True))
        full: set[Tensor] = set()

        def ready(parameter: Tensor) -> None:
            assert parameter.grad is not None
            view = views[parameter]  # type: ignore[index]
            view.copy_(parameter.grad.flatten())
            parameter.grad = view.view_as(parameter)
            full.add(parameter)
            if len(full) == len(parameters):
                full.clear()
                bucket.div_(dist.get_world_size())
                work = dist.all_reduce(bucket, async_op=True)
                assert work is not None
                self.handles.append(work)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ready)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
buckets = Buckets([model[0], model[2], model[4]])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    buckets.wait()
    optimizer.step()
print(f"rank {dist.get_rank()}: weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
dist.destroy_process_group()
