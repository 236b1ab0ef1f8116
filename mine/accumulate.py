"""Gradient accumulation under DDP: the gradients of four microbatches are summed, and averaged over the ranks once.

torchrun --standalone --nproc-per-node 2 mine/accumulate.py
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


def train(device):
    torch.manual_seed(0)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model)
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
                    outputs = model(some_inputs.to(device))
                    loss = nn.functional.mse_loss(outputs, some_targets.to(device)) / len(parts)
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
