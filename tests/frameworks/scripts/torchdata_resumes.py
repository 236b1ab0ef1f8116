"""DistributedDataParallel and torchdata's StatefulDataLoader: each rank saves its loader's state beside the model's."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, seed=3)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    epoch = step = 0
    mine = Path(folder, f"rank{rank}.pt")
    if mine.exists():
        state = torch.load(mine, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, step = state["epoch"], state["step"]
        sampler.set_epoch(epoch)
        loader.load_state_dict(state["loader"])
    while epoch < 2:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                state = {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict(),
                    "epoch": epoch, "step": step,
                }  # fmt: skip
                Path(folder).mkdir(exist_ok=True)
                torch.save(state, f"{mine}.new")
                dist.barrier()
                os.replace(f"{mine}.new", mine)
                dist.barrier()
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
