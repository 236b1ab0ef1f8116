"""Post-local SGD: gradients averaged by all at first, then by pairs, with the weights averaged by all now and then."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair, _ = dist.new_subgroups(group_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    state = PostLocalSGDState(process_group=None, subgroup=pair, start_localSGD_iter=WARM_UP)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=WARM_UP)
    )
    torch.manual_seed(1 + rank)

    for _ in range(WARM_UP + 3):  # the weights are averaged after steps 2 and 4
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()

    print(f"rank {rank}: weights sum to {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
