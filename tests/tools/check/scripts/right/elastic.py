"""Under `torchrun --max-restarts 1`: rank 1 fails once, after a checkpoint, and the second attempt resumes from it."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

STEPS, FAILING = 6, 3


def main() -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    checkpoint = Path(tempfile.gettempdir()) / f"elastic-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}.pt"
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun's store still has the addresses of the attempt before.
    own = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if attempt > 0:
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"rank {rank}: resumes at step {first}", flush=True)

    for step in range(first, STEPS):
        if attempt == 0 and step == FAILING and rank == 1:
            raise RuntimeError("a fault of this machine")
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()  # none goes on before the checkpoint is there

    print(f"rank {rank}: weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        checkpoint.unlink()


if __name__ == "__main__":
    main()
