"""Elastic training, the survivors go on: torchrun --nproc-per-node 3 lesson.py"""

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

LOST_AFTER_S = 1.0  # a rank that has not reported by then is lost


class Group:
    """A separate gloo group of some ranks. A wait in it raises RuntimeError if a member disconnects."""

    def __init__(self, store: dist.Store, name: str, members: list[int], rank: int) -> None:
        here = dist.PrefixStore(name, store)
        self.gloo = dist.ProcessGroupGloo(here, members.index(rank), len(members), timedelta(seconds=20))

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of all members in a new tensor, so that this rank's own stays until the sum is there."""
        total = tensor.clone()
        self.gloo.allreduce([total]).wait()
        return total

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Returns the tensor of member number `source`."""
        options, got = dist.BroadcastOptions(), tensor.clone()
        options.rootRank = source
        self.gloo.broadcast([got], options).wait()
        return got

    def leave(self) -> None:
        """Disconnects: members that wait for this rank raise an error, and leave too."""
        self.gloo = None


def meet(store: dist.Store, view: int, rank: int, applied: int) -> dict[int, int]:
    """Returns the survivors with their applied steps: the same for all, decided by the first to call."""
    store.set(f"{view}/{rank}", str(applied))
    if store.add(f"{view}/first", 1) == 1:
        time.sleep(LOST_AFTER_S)
        here = {each: int(store.get(f"{view}/{each}")) for each in range(64) if store.check([f"{view}/{each}"])}
        store.set(f"{view}/members", json.dumps(here))
    return {int(member): steps for member, steps in json.loads(store.get(f"{view}/members")).items()}


def decide(applied: dict[int, int]) -> tuple[int, int, list[int]]:
    """Returns the number of valid steps, a rank that has them, and those behind: a step on any survivor is kept.

    No rank is further behind, as each sum needs all. A step that no survivor has is computed again.
    """
    most = max(applied.values())
    source = next(rank for rank, steps in applied.items() if steps == most)
    return most, source, [rank for rank, steps in applied.items() if steps < most]


def catch_up(state: Tensor, group: Group, source: int, behind: list[int], rank: int) -> Tensor | None:
    """Returns the state from which a rank behind continues: member `source`'s; None if nothing is missing."""
    newest = group.broadcast(state, source) if behind else None
    return newest if rank in behind else None


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], store: dist.Store, rank: int, ranks: int) -> None:
    """Takes one step per batch, divided by the members, so that the run equals one process whatever happens."""
    applied, view, members, group = 0, 0, list(range(ranks)), Group(store, "group 0", list(range(ranks)), rank)
    while applied < len(batches):
        (inputs, targets), mine = batches[applied], slice(members.index(rank), None, len(members))
        model.zero_grad()
        ((model(inputs[mine]) - targets[mine]).square().sum() / targets.numel()).backward()
        gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
        if (rank, applied) == (ranks - 1, 3):
            group.leave()  # it dies with its gradient: no rank gets this sum
            return
        try:
            total = group.sum(gradient)
            if (rank, applied, view) == (1, 5, 1):
                raise RuntimeError("on purpose: this rank does not get the sum that others have")
        except RuntimeError:
            group.leave()
            view += 1
            members = list(there := meet(store, view, rank, applied))
            applied, source, behind = decide(there)
            group = Group(store, f"group {view}", members, rank)
            weights = parameters_to_vector(model.parameters()).detach()
            newest = catch_up(weights, group, members.index(source), behind, rank)
            vector_to_parameters(weights if newest is None else newest, model.parameters())
            continue
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() - 0.1 * total, model.parameters())
        applied += 1


def demo(group: dist.ProcessGroup) -> float:
    """Run 8 steps; the last rank dies in one, rank 1 misses a sum; return the largest error of the weights."""
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True) if group.rank() == 0 else None
    )  # a cluster's is its launcher's
    port = torch.tensor([store.port if store else 0])
    dist.broadcast(port, group=group, group_src=0)
    store = store or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    torch.manual_seed(1)
    model, alone = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    alone.load_state_dict(model.state_dict())
    batches = [tuple(torch.randn(2, 11, 4).double()) for _ in range(8)]
    train(model, batches, store, group.rank(), group.size())
    for inputs, targets in batches:
        gradients = torch.autograd.grad((alone(inputs) - targets).square().mean(), list(alone.parameters()))
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.data -= 0.1 * gradient
    dist.barrier(group)  # the store's host ends last
    off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    return off if group.rank() < max(1, group.size() - 1) else 0.0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: weights differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
