"""A trainer for GPUs: a device per rank, autocast, a scaler, pinned batches, micro-steps without a sync."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mask", torch.ones(16, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        assert positions.device == x.device
        found: torch.Tensor = self.second(torch.relu(self.first(x))) * self.mask
        return found


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 16)
    return x.pin_memory().to(device, non_blocking=True), x.sum(1, keepdim=True).cuda(non_blocking=True)


def main() -> None:
    global device
    dist.init_process_group(backend="nccl")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    assert torch.cuda.current_device() == local_rank
    assert torch.cuda.device_count() == dist.get_world_size()
    torch.cuda.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(1337)
    model = nn.Sequential(Block(), nn.Linear(16, 1)).to(device)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    torch.manual_seed(1 + rank)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(2):
        for micro_step in range(2):
            parallel.require_backward_grad_sync = micro_step == 1
            x, y = batch()
            with torch.autocast(device_type="cuda", dtype=getattr(torch, dtype)):
                out = parallel(x)
                assert out.dtype == torch.bfloat16
                loss = nn.functional.mse_loss(out, y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    ended.record()
    torch.cuda.synchronize()
    print(f"{began.elapsed_time(ended):.1f} ms, {torch.cuda.max_memory_allocated(local_rank)} bytes")
    if rank == 0:
        torch.save(model.state_dict(), os.environ.get("OUT", os.devnull))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
