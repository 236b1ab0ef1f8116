"""Scripts that resume wrongly, each a function: `script_resumes.py NAME`, with `right` after the name corrected.

The comment of each is the public report that it is written after.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
RIGHT = "right" in sys.argv
FILE = Path("state.pt")
BATCH, EPOCHS, EVERY = 4, 2, 2
torch.manual_seed(0)
INPUTS = torch.randn(48, 8)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())


def save(state, file=FILE):
    """Rank 0 writes; a whole file is there whenever it is killed."""
    if RANK == 0:
        torch.save(state, f"{file}.tmp")
        os.replace(f"{file}.tmp", file)
    dist.barrier()


def load():
    return torch.load(FILE) if FILE.exists() else None


def net(*more):
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *more, nn.Linear(16, 1)))


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


class Run:
    """A right training run, whose parts the functions below replace by wrong ones."""

    def __init__(self, *more, optimizer=None, plan=None):
        self.model = net(*more)
        make = optimizer or (lambda given: torch.optim.AdamW(given, 0.01))
        self.optimizer = make(self.model.parameters())
        self.plan = plan(self.optimizer) if plan else None
        self.sampler = DistributedSampler(DATA, seed=3)
        self.loader = DataLoader(DATA, BATCH, sampler=self.sampler)
        self.epoch = self.position = 0  # batches of this epoch

    def state(self):
        found = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        found |= {"epoch": self.epoch, "position": self.position}
        return found | ({"plan": self.plan.state_dict()} if self.plan else {})

    def save(self):
        save(self.state())

    def resume(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.plan:
            self.plan.load_state_dict(state["plan"])
        self.epoch, self.position = state["epoch"], state["position"]

    def batches(self):
        self.sampler.set_epoch(self.epoch)
        for number, batch in enumerate(self.loader):
            if number >= self.position:
                yield batch

    def train(self):
        state = load()
        if state is not None:
            self.resume(state)
        while self.epoch < EPOCHS:
            for x, y in self.batches():
                step(self.model, self.optimizer, x, y)
                if self.plan:
                    self.plan.step()
                self.position += 1
                if self.position % EVERY == 0:
                    self.save()
            self.epoch, self.position = self.epoch + 1, 0


def optimizer_forgotten():  # OneVision-Encoder 65, LibreYOLO 277
    class Forgets(Run):
        def resume(self, state):
            self.model.module.load_state_dict(state["model"])
            self.epoch, self.position = state["epoch"], state["position"]

    (Run if RIGHT else Forgets)().train()


def schedule_forgotten():  # the_well 77
    class Forgets(Run):
        def resume(self, state):
            super().resume(state if RIGHT else state | {"plan": self.plan.state_dict()})

    Forgets(plan=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)).train()


def rate_reset():  # torch-points3d 630, yolov5 292: the schedule is made after the optimizer is loaded
    class Resets(Run):
        def resume(self, state):
            super().resume(state)
            if not RIGHT:
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.01

    Resets(plan=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)).train()


def random_forgotten():  # dropout draws other numbers after a resume
    class Draws(Run):
        def save(self):
            torch.save(torch.get_rng_state(), f"random{RANK}.tmp")
            os.replace(f"random{RANK}.tmp", f"random{RANK}-{self.epoch}-{self.position}.pt")
            dist.barrier()  # before rank 0's file names these
            super().save()

        def batches(self):
            resumed = self.position
            for index, batch in enumerate(super().batches()):
                if RIGHT and resumed and index == 0:
                    torch.set_rng_state(torch.load(f"random{RANK}-{self.epoch}-{resumed}.pt"))
                yield batch

    Draws(nn.Dropout(0.5)).train()


def loader_forgotten():  # KempnerForge 51: the epoch begins anew
    class Replays(Run):
        def resume(self, state):
            super().resume(state if RIGHT else state | {"position": 0})

    Replays().train()


def position_before_step():  # the position of the batch that is next is stored too early, or of the last one
    class Behind(Run):
        def state(self):
            return super().state() if RIGHT else super().state() | {"position": self.position - 1}

    Behind().train()


def epoch_reset():  # accelerate 2016, 4071: resumed in the second epoch as if in the first
    class First(Run):
        def resume(self, state):
            super().resume(state)
            if not RIGHT:
                self.sampler.set_epoch = lambda epoch: None

    First().train()


def epoch_skipped():  # verl 7401: a checkpoint at the end of an epoch resumes after the next one
    class Skips(Run):
        def state(self):
            found = super().state()
            ended = self.position == len(self.loader)
            return found | ({"epoch": self.epoch + (1 if RIGHT else 2), "position": 0} if ended else {})

        def save(self):
            if self.position == len(self.loader):
                super().save()

    Skips().train()


def position_by_rank():  # Megatron-Bridge 5637: the position of each rank, on another number of ranks
    class Counts(Run):
        done = before = 0  # samples of this epoch, before this start

        def state(self):
            done = self.before + self.position * BATCH * WORLD
            return super().state() | {"position": done if RIGHT else done // (BATCH * WORLD)}

        def resume(self, state):
            super().resume(state)
            self.done, self.position = self.position * (1 if RIGHT else BATCH * WORLD), 0

        def batches(self):
            order = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(self.epoch)).tolist()
            self.before, self.done = self.done, 0
            yield from DataLoader(Subset(DATA, order[self.before :][RANK::WORLD]), BATCH)

    Counts().train()


def shard_of_rank_0():  # SimpleTuner 2986, prime-rl 1035: all ranks resume with rank 0's part of the data
    class Shared(Run):
        part = None

        def batches(self):
            self.sampler.set_epoch(self.epoch)
            part = self.part or list(self.sampler)
            self.left, self.part = part[self.position * BATCH :], None
            yield from DataLoader(Subset(DATA, self.left), BATCH)

        def state(self):
            self.sampler.set_epoch(self.epoch)
            return super().state() | {"part": list(self.sampler)}

        def resume(self, state):
            super().resume(state)
            self.part = None if RIGHT else state["part"]

    Shared().train()


def not_atomic():  # the file is written over the last one
    class Overwrites(Run):
        def save(self):
            if RIGHT:
                super().save()
                return
            if RANK == 0:
                torch.save(self.state(), FILE)
            dist.barrier()

    Overwrites().train()


if __name__ == "__main__":
    globals()[next(each for each in sys.argv[1:] if each != "right")]()
    dist.destroy_process_group()
