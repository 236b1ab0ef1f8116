"""Wrong: shuffle=True without a DistributedSampler. All ranks have one seed, hence one order, and train on the same
batches: N ranks cost N times as much as one, and compute the same as one.

torchrun --standalone --nproc-per-node 2 mine/ddp_same_data.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
BATCH = 32  # samples per rank and step


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
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)  # wrong: every rank draws the same order

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)], device=device)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mean loss {total[0] / total[1]:.4f}", flush=True)


def main():
    device = start()
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
