"""Checkpoint and resume: rank 0 writes the model, the optimizer and the position, and all ranks resume from there.

torchrun --standalone --nproc-per-node 2 mine/resume.py --checkpoint /tmp/resume.pt --epochs 1
torchrun --standalone --nproc-per-node 2 mine/resume.py --checkpoint /tmp/resume.pt --epochs 2
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 32  # samples per rank and step
SAVE_EVERY = 3  # steps, and at the end of each epoch


def start():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device


def make_data():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def save(path, model, optimizer, epoch, step):
    """Rank 0 writes and the others wait. A complete checkpoint exists even if it is killed while writing."""
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    dist.barrier()


def train(device, checkpoint, epochs):
    torch.manual_seed(0)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_epoch = first_step = 0
    found = [checkpoint.exists()]
    dist.broadcast_object_list(found, src=0)  # rank 0 decides, so that all begin at the same step
    if found[0]:
        state = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, first_step = state["epoch"], state["step"]
        print(f"rank {dist.get_rank()}: resumed at epoch {first_epoch}, step {first_step}", flush=True)

    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            if epoch == first_epoch and step < first_step:
                continue  # trained before the restart
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            if (step + 1) % SAVE_EVERY == 0 and step + 1 < len(loader):
                save(checkpoint, model, optimizer, epoch, step + 1)
        save(checkpoint, model, optimizer, epoch + 1, 0)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of its last step {loss.item():.6f}", flush=True)


def main():
    run = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ["MASTER_PORT"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / f"resume-{run}.pt")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    train(start(), options.checkpoint, options.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
