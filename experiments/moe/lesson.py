"""Mixture of experts (expert parallelism): torchrun --nproc-per-node 3 lesson.py"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class AllToAll(torch.autograd.Function):  # sends[r] rows to rank r, receives[r] from it; gradients go back
    @staticmethod
    def forward(ctx, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = receives, sends, group
        received = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, *ctx.back), None, None, None


class MixtureOfExperts(nn.Module):
    """E experts, `up` [E/N, D, H] and `down` [E/N, H, D] on each of N ranks; tokens are routed as by one process."""

    def __init__(self, router: nn.Module, experts: nn.Module, rules: tuple, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.router, self.experts, self.group = router, experts, group
        self.num_experts, self.top_k, self.capacity, self.balance, self.z = rules
        self.owned = torch.arange(self.num_experts).tensor_split(group.size())  # the experts of each rank

    def forward(self, hidden: Tensor) -> Tensor:
        tokens, rank = hidden.flatten(0, -2), self.group.rank()  # [T, D]
        gates, chosen = (scores := self.router(tokens)).softmax(-1).topk(self.top_k)  # [T, E] to [T, k]
        gates = gates / gates.sum(1, keepdim=True) if self.top_k > 1 else gates  # one gate over itself would be 1
        kept, admitted = self.route(F.one_hot(chosen.T, self.num_experts), scores)
        _, choice, token = kept.permute(2, 0, 1).nonzero(as_tuple=True)  # sorted by expert
        sends = [int(admitted[rank, experts].sum()) for experts in self.owned]
        receives = [int(rows[self.owned[rank]].sum()) for rows in admitted]
        received = AllToAll.apply(tokens[token], sends, receives, self.group)  # rank by rank, in each expert by expert
        counts = admitted[:, self.owned[rank]].flatten()  # [N·E/N]
        expert = torch.arange(len(self.owned[rank])).repeat(self.group.size()).repeat_interleave(counts)
        computed = torch.zeros_like(received)
        for number, (up, down) in enumerate(zip(self.experts.up, self.experts.down, strict=True)):
            computed[expert == number] = F.gelu(received[expert == number] @ up) @ down
        back = AllToAll.apply(computed, receives, sends, self.group) * gates[token, choice, None]
        return torch.zeros_like(tokens).index_add(0, token, back.to(tokens.dtype)).view_as(hidden)

    def route(self, chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's choices [k, T, E] that find a place, and the rows of each rank for each expert [N, E]."""
        dist.all_gather(tables := [torch.empty_like(chosen[:, 0]) for _ in self.owned], chosen.sum(1), group=self.group)
        self.queue = queue = torch.stack(tables, 1)  # [k, N, E]: first choices first, each in rank order
        before = (queue.flatten(0, 1).cumsum(0) - queue.flatten(0, 1)).view_as(queue)
        self.places = math.ceil(self.capacity * int(queue.sum()) / self.num_experts) or int(queue[0].sum())
        wanted = queue.sum((0, 1)).to(scores)
        balance = self.num_experts * wanted / wanted.sum() @ scores.softmax(-1).sum(0)  # of the loss, this rank's part
        self.extra = self.balance * balance + self.z * scores.logsumexp(-1).square().sum()
        place = chosen.cumsum(1) - chosen + before[:, self.group.rank(), None]  # in the queue of each expert
        return chosen.bool() & (place < self.places), queue.minimum((self.places - before).clamp(min=0)).sum(0)


@torch.no_grad()  # autograd's graph would keep the group beyond its end
def demo(group: dist.ProcessGroup) -> float:
    """Route 7 tokens per rank to one of 5 experts each; return the largest error of the outputs."""
    torch.manual_seed(1)  # the same on all ranks
    tokens, router = torch.randn(7 * group.size(), 4).double(), nn.Linear(4, 5).double()
    up, down = torch.randn(5, 4, 8).double(), torch.randn(5, 8, 4).double()
    gates, chosen = router(tokens).softmax(-1).max(-1)
    gates = gates[:, None] * (F.one_hot(chosen).cumsum(0).gather(1, chosen[:, None]) < 1 + len(tokens) / 4)  # 1.25 T/5
    wanted = (F.gelu(tokens[:, None] @ up[chosen]) @ down[chosen]).squeeze(1) * gates
    up, down, tokens, wanted = (each.tensor_split(group.size())[group.rank()] for each in (up, down, tokens, wanted))
    layer = MixtureOfExperts(router, nn.ParameterDict({"up": up, "down": down}), (5, 1, 1.25, 0.01, 0.001), group)
    return (layer(tokens) - wanted).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: outputs differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
