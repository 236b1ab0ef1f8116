"""Scripts whose ranks agree on the wrong thing, each a function: `script_wrong.py NAME`, with `right` after it corrected.

The comment of each is the public report that it is written after.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
RIGHT = "right" in sys.argv
torch.manual_seed(0)
INPUTS = torch.randn(96, 8)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())


def loader(batch=4, data=DATA, **options):
    return DataLoader(data, batch, sampler=DistributedSampler(data, seed=3), **options)


class Texts(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = torch.randint(0, 40, (10,), generator=torch.Generator().manual_seed(index))
        targets = tokens.roll(-1)
        targets[2 + 5 * index % 8 :] = -100
        return tokens, targets


def tokens_mean():  # transformers 34242, 34191
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in loader(data=Texts()):
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        count = (y != -100).sum().float()
        if RIGHT:
            dist.all_reduce(count)
            count /= WORLD
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()


def loss_summed():  # pytorch 58005
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for x, y in loader():
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        (loss if RIGHT else differentiable.all_reduce(loss.clone())).backward()
        optimizer.step()


def gathered():  # open_clip 52
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, _ in loader():
        mine = F.normalize(model(x), dim=1)
        if RIGHT:
            every = torch.cat(differentiable.all_gather(mine))
        else:
            parts = [torch.empty_like(mine) for _ in range(WORLD)]
            dist.all_gather(parts, mine.detach())
            parts[RANK] = mine
            every = torch.cat(parts)
        optimizer.zero_grad()
        F.cross_entropy(5 * every @ every.T, torch.arange(len(every)).roll(1)).backward()
        optimizer.step()


def never_divided():  # accelerate 1624
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= WORLD if RIGHT else 1
        optimizer.step()


def divided_twice():  # DeepSpeed 291
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for x, y in loader():
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) / (1 if RIGHT else WORLD)).backward()
        optimizer.step()


def bias_forgotten():  # Megatron-LM 1446
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for name, each in model.named_parameters():
            if RIGHT or not name.endswith("bias"):
                dist.all_reduce(each.grad)
                each.grad /= WORLD
        optimizer.step()


def uneven_batches():  # Lightning 2398
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for x, y in DataLoader(DATA, 24):
        cut = [len(x) * rank * (rank + 1) // (WORLD * (WORLD + 1)) for rank in range(WORLD + 1)]
        mine = slice(cut[RANK], cut[RANK + 1])
        loss = F.mse_loss(model(x[mine]), y[mine])
        if RIGHT:
            loss = F.mse_loss(model(x[mine]), y[mine], reduction="sum") * WORLD / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient


def clipped_apart():  # pytorch 89814
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter((torch.randn(24, 8) / 3).chunk(WORLD)[RANK].clone())
            self.down = nn.Parameter((torch.randn(1, 24) / 5).chunk(WORLD, 1)[RANK].clone())

        def forward(self, x):
            return Sum.apply(torch.relu(Copied.apply(x) @ self.up.T) @ self.down.T)

    model = Cut()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in DataLoader(DATA, 8):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        square = model.up.grad.square().sum() + model.down.grad.square().sum()
        if RIGHT:
            dist.all_reduce(square)
        for each in model.parameters():
            each.grad.mul_(0.01 / float(square.sqrt()))
        optimizer.step()


def clipped_flat():  # the warning of FullyShardedDataParallel.clip_grad_norm_
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        model.clip_grad_norm_(0.01) if RIGHT else nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


class Row(nn.Module):
    """A block cut over the ranks, as Megatron-LM does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        up, down = torch.randn(24, 8) / 3, torch.randn(8, 24) / 5
        self.up = nn.Parameter(up.chunk(WORLD)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD, 1)[RANK].clone())
        self.bias = nn.Parameter(torch.randn(8) / 4)

    def forward(self, x, inside=False):
        hidden = torch.relu(Copied.apply(self.norm(x)) @ self.up.T)
        if inside:
            return x + Sum.apply(hidden @ self.down.T + self.bias)
        return x + Sum.apply(hidden @ self.down.T) + self.bias


def norm_twice():  # NeMo RL 3788
    model = Row()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, _ in DataLoader(DATA, 8):
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        cut = model.up.grad.square().sum() + model.down.grad.square().sum()
        whole = sum(each.grad.square().sum() for name, each in model.named_parameters() if name not in ("up", "down"))
        square = cut if RIGHT else cut + whole
        dist.all_reduce(square)
        norm = (square + whole if RIGHT else square).sqrt()
        for each in model.parameters():
            each.grad.mul_(min(1.0, 0.1 / float(norm)))
        optimizer.step()


def row_bias():  # the bias of a row-parallel layer, added by each rank
    model = Row()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, _ in DataLoader(DATA, 8):
        optimizer.zero_grad()
        (model(x, inside=not RIGHT) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()


def norm_of_parts():  # TransformerEngine 435
    norm = nn.LayerNorm(8)
    norm.weight.data.uniform_()
    optimizer = torch.optim.SGD(norm.parameters(), 0.1)
    for (x,) in DataLoader(TensorDataset(INPUTS), 12):
        mine = x.chunk(WORLD)[RANK]
        optimizer.zero_grad()
        ((norm(mine) - mine.roll(1, 1)).square().sum() / x.numel()).backward()
        for each in norm.parameters() if RIGHT else ():
            dist.all_reduce(each.grad)
        optimizer.step()


def padded():  # pytorch 25162
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    valid = Subset(DATA, range(13))
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        mine = Subset(valid, range(RANK, 13, WORLD))
        other = DistributedSampler(valid, shuffle=False)
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in DataLoader(mine, 4) if RIGHT else DataLoader(valid, 4, sampler=other):
                hits += torch.tensor([((model.module(x) > 0) == (y > 0)).sum(), len(y)])
        dist.all_reduce(hits)


def mean_of_means():  # torchmetrics 1283
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    valid = Subset(DATA, range(13))
    for x, y in loader(24):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        total = torch.zeros(2)
        with torch.no_grad():
            for x, y in DataLoader(Subset(valid, range(RANK, 13, WORLD)), 4):
                total += torch.tensor([F.mse_loss(model.module(x), y, reduction="sum"), len(y)])
        shown = total if RIGHT else total[:1] / total[1]
        dist.all_reduce(shown)
        shown = shown[:1] / shown[1] if RIGHT else shown / WORLD


def schedule():  # accelerate 2926
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    plan = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, total_iters=len(loader()))
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for _ in range(1 if RIGHT else WORLD):
            plan.step()


def schedule_by_lambda():  # diffusers 3954
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    steps = len(loader())
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for _ in range(1 if RIGHT else WORLD):
            plan.step()


def before_shard():  # torchtitan, FSDP2
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fully_shard(model)
    if RIGHT:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in loader():
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def statistics():  # timm 110
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= WORLD
        optimizer.step()
    for name, each in model.named_buffers():
        if RIGHT and "running" in name:
            dist.all_reduce(each)
            each /= WORLD
    model.eval()
    with torch.no_grad():
        hits = ((model(INPUTS.chunk(WORLD)[RANK]) > 0) == (DATA.tensors[1].chunk(WORLD)[RANK] > 0)).sum()
    dist.all_reduce(hits)


def own_order():  # class of transformers 30990
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    shuffled = DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(RANK))
    for x, y in loader() if RIGHT else shuffled:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def left_out():
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    each = len(DATA) // WORLD if RIGHT else len(DATA) // (2 * WORLD)
    for x, y in DataLoader(Subset(DATA, range(RANK * each, (RANK + 1) * each)), 4):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def averaged_weights():  # class of pytorch-lightning 8100
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if RANK == 0 or RIGHT:
            average.update_parameters(model.module)
    average.eval()
    with torch.no_grad():
        error = F.mse_loss(average(INPUTS.chunk(WORLD)[RANK]), DATA.tensors[1].chunk(WORLD)[RANK], reduction="sum")
    dist.all_reduce(error)


def state_of_rank_0():
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layers = model[::2]
    owned = [each for index, layer in enumerate(layers) if index % WORLD == RANK for each in layer.parameters()]
    optimizer = torch.optim.Adam(owned, 0.01)
    for epoch in range(2):
        if epoch:
            torch.save(optimizer.state_dict(), f"{folder[0]}/{RANK}.pt")
            dist.barrier()
            optimizer.load_state_dict(torch.load(f"{folder[0]}/{RANK if RIGHT else 0}.pt"))
        for x, y in loader():
            model.zero_grad()
            F.mse_loss(model(x).mean(1, keepdim=True), y).backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
                each.grad /= WORLD
            optimizer.step()
            for index, layer in enumerate(layers):
                for each in layer.parameters():
                    dist.broadcast(each.data, index % WORLD)


def random_state():  # miles 3187
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(100 + RANK)
    for epoch in range(2):
        if epoch:
            torch.set_rng_state(torch.load(f"{folder[0]}/{RANK if RIGHT else 0}.pt"))
        for x, y in loader(generator=torch.Generator()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        torch.save(torch.get_rng_state(), f"{folder[0]}/{RANK}.pt")
        dist.barrier()


globals()[sys.argv[1]]()
dist.barrier()
dist.destroy_process_group()
