"""Variants of a mesh trained for two steps beside one process: what its tests and `python -m benchmarks.proof` compare."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.mesh import MODE
from distlab.lab.config import Config
from distlab.lab.workload.data import Batches
from distlab.lab.workload.reference import Snapshot, train
from tests.labs import built


def batches_of(config: Config) -> Batches:
    return Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)


def differences(group: dist.ProcessGroup, config: Config, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """For each variant the worst relative difference to one process after two steps, of each kind, on rank 0."""
    dense: list[Snapshot] = []
    if group.rank() == 0:
        dense = list(train(MODE.model(config, config.seed).double(), batches_of(config), config, 2))
    found = {}
    for name in [name for name in names if name not in MODE.cannot(config)]:
        strategy = built(MODE, name, MODE.model(config, config.seed).double(), group, config)
        found[name] = trained(strategy, group, config, dense)
    return found


def trained(strategy: Any, group: dist.ProcessGroup, config: Config, dense: list[Snapshot]) -> dict[str, float]:
    worst = dict.fromkeys(("losses", "gradients", "weights", "optimizer"), 0.0)
    for step in range(2):
        mesh = strategy.mesh
        share = strategy.backward(batches_of(config).dealt(step, mesh.index("dp"), mesh.size("dp")))
        loss = torch.zeros((), dtype=torch.float64) if share is None else share.clone()
        dist.all_reduce(loss, group=group)
        strategy.update()
        for kind in ("gradients", "weights", "optimizer"):
            tensors = dict(strategy.full(kind))
            assert group.rank() == 0 or not tensors
            if group.rank() == 0:
                worst[kind] = max(worst[kind], farthest(tensors, getattr(dense[step], kind)))
        if group.rank() == 0:
            worst["losses"] = max(worst["losses"], abs(loss.item() - dense[step].loss))
    return worst


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    assert all(found[name].shape == wanted[name].shape for name in wanted)
    return max(((found[name] - wanted[name]).abs().max().item() for name in wanted), default=0.0)
