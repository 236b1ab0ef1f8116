"""Scripts that train what one rank trains, each a function: `script_right.py NAME`."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
CPU = torch.device("cpu")
INPUTS = torch.randn(48, 8)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())


def net(*more):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *more, nn.Linear(16, 1))


def loader(batch=4, data=DATA, **options):
    return DataLoader(data, batch, sampler=DistributedSampler(data, seed=3), **options)


def train(model, optimizer, batches=None, loss=F.mse_loss, epochs=2, before=lambda: None, after=lambda: None):
    for epoch in range(epochs):
        reading = loader() if batches is None else batches
        reading.sampler.set_epoch(epoch) if isinstance(reading.sampler, DistributedSampler) else None
        for x, y in reading:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            before()
            optimizer.step()
            after()


def sgd(model, rate=0.05, **options):
    return torch.optim.SGD(model.parameters(), rate, **options)


def ddp():
    model = DistributedDataParallel(net())
    train(model, sgd(model, momentum=0.9))


def closures():
    model = DistributedDataParallel(net())
    optimizer = sgd(model, momentum=0.9)
    for x, y in loader():

        def evaluated(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluated)


def adam():
    model = DistributedDataParallel(net())
    train(model, torch.optim.AdamW(model.parameters(), 0.01))


def dropout():
    torch.manual_seed(RANK)
    model = DistributedDataParallel(net(nn.Dropout(0.5)))
    train(model, sgd(model))


def sharded_flat():
    model = FullyShardedDataParallel(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), before=lambda: model.clip_grad_norm_(0.1))


def sharded_flat_by_name():
    model = FullyShardedDataParallel(net(), device_id=CPU, use_orig_params=True)
    train(model, sgd(model, momentum=0.9))


def layer_norm():
    model = DistributedDataParallel(net(nn.LayerNorm(16)))
    train(model, torch.optim.Adam(model.parameters(), 0.01))


def batch_norm():
    model = DistributedDataParallel(net(nn.BatchNorm1d(16)))
    train(model, sgd(model))
    model.eval()
    with torch.no_grad():
        model(INPUTS)


def by_hand():
    model = net()

    def average():
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= WORLD

    train(model, sgd(model), before=average)


def flat_bucket():
    model = net()

    def average():
        flat = torch.cat([each.grad.flatten() for each in model.parameters()])
        dist.all_reduce(flat)
        for each, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            each.grad.copy_(part.view_as(each) / WORLD)

    train(model, sgd(model), before=average)


def summed_shares():
    model = net()

    def sum_all():
        for each in model.parameters():
            dist.all_reduce(each.grad)

    train(model, sgd(model), loss=lambda x, y: F.mse_loss(x, y) / WORLD, before=sum_all)


def clipped():
    model = DistributedDataParallel(net())
    train(model, sgd(model), before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def accumulated():
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    for index, (x, y) in enumerate(loader(2)):
        last = index % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            (F.mse_loss(model(x), y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def autocast():
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    for x, y in loader():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def autocast_wide():
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for x, y in loader():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def in_bfloat16():
    model = DistributedDataParallel(net().bfloat16())
    optimizer = sgd(model)
    for x, y in loader():
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


def sharded():
    model = net()
    for each in (model[0], model[2]):
        fully_shard(each)
    fully_shard(model)
    train(model, torch.optim.AdamW(model.parameters(), 0.01))


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05))


def tensor_parallel():
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, sgd(model, foreach=False), batches=DataLoader(DATA, 8))


def warmup():
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(loader()))
    train(model, optimizer, after=plan.step)


def scaled_rate():
    model = DistributedDataParallel(net())
    train(model, sgd(model, 0.01 * WORLD))


def lambda_rate():
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))
    train(model, optimizer, after=plan.step)


def two_optimizers():
    model = DistributedDataParallel(net())
    first, second = (torch.optim.SGD(each.parameters(), 0.05) for each in (model.module[0], model.module[2]))
    for x, y in loader():
        first.zero_grad()
        second.zero_grad()
        F.mse_loss(model(x), y).backward()
        first.step()
        second.step()


def workers():
    model = DistributedDataParallel(net())
    train(model, sgd(model), batches=loader(num_workers=2))


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(RANK, 48, WORLD):
            yield DATA[index]


def stream():
    model = DistributedDataParallel(net())
    train(model, sgd(model), batches=DataLoader(Stream(), 4))


class Named(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": INPUTS[index], "y": DATA[index][1], "name": f"sample {index}"}


def dictionaries():
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    for batch in loader(data=Named()):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()


class Ragged(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 30, (3 + index % 5,), generator=generator)


def padded(texts):
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return tokens[:, :-1], torch.where(tokens[:, 1:] == 0, -100, tokens[:, 1:])


def ragged():
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(30, 8), nn.Tanh(), nn.Linear(8, 30)))
    optimizer = sgd(model)
    for x, y in loader(data=Ragged(), collate_fn=padded):
        count = (y != -100).sum()
        dist.all_reduce(count)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
        optimizer.zero_grad()
        (total * WORLD / count).backward()
        optimizer.step()


def attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(1, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.head = nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.layer(self.embed(x[..., None])).mean(1))

    model = DistributedDataParallel(Block())
    train(model, torch.optim.AdamW(model.parameters(), 1e-3))


def recurrent():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.read(x[..., None])[0][:, -1])

    model = DistributedDataParallel(Reader())
    train(model, sgd(model))


def frozen():
    inner = net()
    inner[0].requires_grad_(False)
    model = DistributedDataParallel(inner)
    train(model, sgd(model))


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x):
            return self.up(torch.tanh(self.down(x))).sum(1, keepdim=True)

    model = DistributedDataParallel(Tied())
    train(model, sgd(model))


def recomputed():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))

    model = DistributedDataParallel(Again())
    train(model, sgd(model))


def averaged_weights():
    model = DistributedDataParallel(net())
    kept = torch.optim.swa_utils.AveragedModel(model.module)
    train(model, sgd(model), after=lambda: kept.update_parameters(model.module))


def gathered():
    model = DistributedDataParallel(nn.Linear(8, 4))

    def loss(x, _):
        every = torch.cat(differentiable.all_gather(F.normalize(x, dim=1)))
        return F.cross_entropy(5 * every @ every.T, torch.arange(len(every)))

    train(model, sgd(model), loss=loss)


def evaluated():
    model = DistributedDataParallel(net())
    for _ in range(2):
        train(model, sgd(model), epochs=1)
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in DataLoader(torch.utils.data.Subset(DATA, range(RANK, 45, WORLD)), 4):
                hits += torch.tensor([((model.module(x) > 0) == (y > 0)).sum(), len(y)])
        dist.all_reduce(hits)


def mean_of_even_means():
    model = DistributedDataParallel(net())
    shown = torch.zeros(1)
    optimizer = sgd(model)
    for x, y in loader():
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        shown /= WORLD


def own_batches():
    from distlab import batch

    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    torch.manual_seed(1 + RANK)
    for _ in range(4):
        x = torch.randn(4, 8)
        x, y = batch(x, x.sum(1, keepdim=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def unseeded():
    torch.seed()
    model = DistributedDataParallel(net())
    train(model, sgd(model))


def convolution():
    model = DistributedDataParallel(
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    )
    train(model, sgd(model, momentum=0.9, nesterov=True, weight_decay=1e-3))


def pair():
    left, right = DistributedDataParallel(nn.Linear(8, 4)), DistributedDataParallel(nn.Linear(8, 4))
    one, two = sgd(left), sgd(right)
    for x, _ in loader():
        one.zero_grad()
        two.zero_grad()
        (left(x) - right(x.flip(1)).detach() - 1).square().mean().backward()
        one.step()
        (right(x.flip(1)) - left(x).detach() + 1).square().mean().backward()
        two.step()


def hybrid():
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(net(), mesh=mesh)
    train(model, sgd(model))


globals()[sys.argv[1]]()
dist.destroy_process_group()
