"""torch.distributed.checkpoint: saved, saved by a thread over its own group while the training continues, loaded."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    own = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(13, 4, generator=torch.Generator().manual_seed(1)))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    saving: Any = None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=3, sampler=sampler):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if saving is not None:
            saving.result()
        state = {"model": model.state_dict(), "epoch": epoch}
        saving = dcp.async_save(state, checkpoint_id=f"{folder[0]}/{epoch}", process_group=own)
    saving.result()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/last")
    loaded = {"model": {name: torch.zeros_like(each) for name, each in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=f"{folder[0]}/last")
    assert all(torch.equal(loaded["model"][name], each) for name, each in model.state_dict().items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
