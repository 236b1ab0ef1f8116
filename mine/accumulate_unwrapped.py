"""Wrong: the loss is a method of the model, which DDP does not pass on, so it is called on model.module. Only a forward
pass of DDP itself gets gradients averaged: each rank trains its own model on its part of the data, without an error.

torchrun --standalone --nproc-per-node 2 mine/accumulate_unwrapped.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2
BATCH = 32  # samples per rank and step
MICROBATCHES = 4  # per batch


def start():
    """Join the process group; return this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device


def make_data():
    """Return points and their sums, with some noise: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=generator)
    noise = 0.1 * torch.randn(512, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + noise)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, inputs, targets):
        return nn.functional.mse_loss(self(inputs), targets)


def train(device):
    torch.manual_seed(0)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(Regression().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # sum of the losses, number of steps
        for inputs, targets in loader:
            parts = list(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))
            optimizer.zero_grad()
            for number, (some_inputs, some_targets) in enumerate(parts, 1):
                last = number == len(parts)
                with contextlib.nullcontext() if last else model.no_sync():
                    # wrong: the forward pass of model.module is not that of model
                    loss = model.module.loss(some_inputs.to(device), some_targets.to(device)) / len(parts)
                    loss.backward()
                total[0] += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total[1] += 1
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mean loss {total[0] / total[1]:.4f}", flush=True)


def main():
    device = start()
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
