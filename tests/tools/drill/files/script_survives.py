"""Scripts that resume rightly, each a function: `script_survives.py NAME`."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
STEPS, EVERY, BATCH = 10, 3, 4
torch.manual_seed(0)
INPUTS = torch.randn(96, 8)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def publish(write, name="state.pt"):
    if RANK == 0:
        write(f"{name}.tmp")
        os.replace(f"{name}.tmp", name)
    dist.barrier()


def batches(begin):
    """Batches of one step each; the position counts samples of all ranks."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(5)).tolist()
    left = DataLoader(torch.utils.data.Subset(DATA, order[begin * BATCH * WORLD :][RANK::WORLD]), BATCH)
    for number, batch in enumerate(left, begin):
        if number == STEPS:
            return
        yield number, batch


def train(model, optimizer, begin, save, reading=batches, stop=lambda: False, by_closure=False):
    for number, (x, y) in reading(begin):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        if not by_closure:
            closure()
        optimizer.step(closure if by_closure else None)
        if (number + 1) % EVERY == 0 or stop():
            save(number + 1)
        if stop():
            return


def plain(make=lambda given: torch.optim.AdamW(given, 0.01), **more):
    """torch.save on rank 0."""
    model = DistributedDataParallel(net())
    optimizer = make(model.parameters())
    begin = 0
    if Path("state.pt").exists():
        found = torch.load("state.pt")
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        begin = found["step"]

    def save(step):
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        publish(lambda path: torch.save(state, path))

    train(model, optimizer, begin, save, **more)


def closures():
    plain(by_closure=True)


def momentum():
    plain(lambda given: torch.optim.SGD(given, 0.05, momentum=0.9))


def python_random():
    """Python's random numbers, never seeded, used in a log only."""
    plain(stop=lambda: random.random() > 2)


def saves_on_sigterm():
    """Saves on SIGTERM, and ends."""
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))

    def stop():
        found = torch.tensor(len(signals))
        dist.all_reduce(found)
        return bool(found)

    plain(stop=stop)


def workers():
    def reading(begin):
        sampler = DistributedSampler(DATA, shuffle=False)
        for number, batch in enumerate(DataLoader(DATA, BATCH, sampler=sampler, num_workers=1)):
            if begin <= number < STEPS:
                yield number, batch

    plain(reading=reading)


class Stream(IterableDataset):
    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        for index in range(self.begin * BATCH * WORLD + RANK, STEPS * BATCH * WORLD, WORLD):
            yield DATA[index]


def stream():
    plain(reading=lambda begin: enumerate(DataLoader(Stream(begin), BATCH), begin))


def ahead():
    """Reads one batch ahead of the one that it trains on."""

    def reading(begin):
        before = None
        for each in batches(begin):
            if before is not None:
                yield before
            before = each
        if before is not None:
            yield before

    plain(reading=reading)


def folder_of_steps():
    """A folder for each checkpoint, and a file that names the last one."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    begin = int(Path("latest").read_text()) if Path("latest").exists() else 0
    if begin:
        found = torch.load(f"step-{begin}/state.pt")
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def save(step):
        if RANK == 0:
            folder = Path(f"step-{step}")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
        publish(lambda path: Path(path).write_text(str(step)), "latest")

    train(model, optimizer, begin, save)


def sharded():
    """torch.distributed.checkpoint of fully_shard."""
    distributed(lambda model: [fully_shard(each) for each in (model[0], model[2], model)] and model)


def replicated():
    """torch.distributed.checkpoint of DistributedDataParallel."""
    distributed(DistributedDataParallel)


def distributed(wrap):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    begin = int(Path("latest").read_text()) if Path("latest").exists() else 0
    if begin:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"step-{begin}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    def save(step):
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"step-{step}")
        publish(lambda path: Path(path).write_text(str(step)), "latest")

    train(model, optimizer, begin, save)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
