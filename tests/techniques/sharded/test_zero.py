"""ZeRO's three stages compared with one process: gradients and weights, memory during the passes, and sent bytes."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.measure.traffic import Calls
from distlab.techniques.sharded.zero import ReduceScatterScheduler, Zero
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)

STAGES = [(1, True), (2, True), (3, True), (3, False)]  # stage, reshard


class Layers(nn.Module):
    """Four layers. With `tie` the last one shares the first one's weight; one layer can be skipped."""

    def __init__(self, *, tie: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4)).to(dtype)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
        if tie:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            x = x if index == skipped else y.tanh()  # a skipped layer runs, but gets no gradient
        return x.sum()


def rows(rank: int, microbatch: int) -> Tensor:
    count = 1 + rank + microbatch
    return torch.arange(5.0 * count, dtype=torch.float64).view(count, 5) / (7 + rank)


def built(group: dist.ProcessGroup, stage: int, reshard: bool, **options: Any) -> tuple[Layers, Zero]:
    model = Layers(**options)
    return model, Zero(model, list(model.layers), group, stage, reshard=reshard)


def steps(group: dist.ProcessGroup, model: Layers, zero: Zero, num_steps: int = 2, skipped: int | None = None) -> None:
    """Train with plain SGD in steps of two microbatches."""
    for _ in range(num_steps):
        zero.begin()
        for microbatch in range(2):
            with zero.microbatch(last=microbatch == 1):
                x = rows(group.rank(), microbatch).to(next(model.parameters()).dtype)
                model(x, skipped).backward()
        zero.finish()
        zero.deliver()
        with torch.no_grad():
            for master in zero.masters:
                if master.grad is not None:
                    master.sub_(master.grad, alpha=0.01)
        zero.publish()


def dense(zero: Zero, kind: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for unit in zero.units:
        shard = unit.master.detach() if kind == "weights" else unit.shard.grad
        assert shard is not None
        found |= dict(zip(unit.named, zero.dense(unit, shard), strict=True))
    return found


def difference(group: dist.ProcessGroup, stage: int, reshard: bool, tie: bool, skipped: int | None) -> float:
    """The largest difference from one process that trains on all ranks' rows."""
    model, zero = built(group, stage, reshard, tie=tie)
    steps(group, model, zero, skipped=skipped)
    alone = Layers(tie=tie)
    for _ in range(2):
        alone.zero_grad()
        sum(alone(rows(rank, part), skipped) for rank in range(group.size()) for part in range(2)).backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in alone.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.sub_(gradients[name], alpha=0.01)
    weights = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    found = dense(zero, "gradients"), dense(zero, "weights")
    assert set(found[0]) == set(found[1]) == set(weights)
    return max(
        (found[0][name] - gradients[name]).abs().max().item() + (found[1][name] - weights[name]).abs().max().item()
        for name in weights
    )


@pytest.mark.parametrize(("stage", "reshard"), STAGES)
@pytest.mark.parametrize(("tie", "skipped"), [(False, None), (True, None), (False, 2)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_stage_equals_one_process(
    ranks: Ranks, world_size: int, stage: int, reshard: bool, tie: bool, skipped: int | None
) -> None:
    assert max(ranks(world_size, difference, stage, reshard, tie, skipped)) < 1e-12


def test_more_ranks_than_elements_in_a_layer(ranks: Ranks) -> None:
    assert max(ranks(7, difference, 3, True, False, None)) < 1e-12


def sent(group: dist.ProcessGroup, stage: int, reshard: bool) -> list[float]:
    """The sends of a step of two microbatches, their bytes, and the bytes of the padded units."""
    model, zero = built(group, stage, reshard)
    with Calls() as calls:
        steps(group, model, zero, 1)
    sends = [call for call in calls.ops() if call.op == "send"]
    assert len(sends) == 1
    padded = sum(unit.whole.numel() * 8 for unit in zero.units)
    return [sends[0].calls, sends[0].raw_bytes, padded]


# Gathers + sums per unit in a step of two microbatches: stage 1: 1 + 1; stage 2: 1 + 2; stage 3: (2 + 1) x 2,
# or one gather less per microbatch if it does not reshard.
@pytest.mark.parametrize(("stage", "reshard", "moves"), [(1, True, 2), (2, True, 3), (3, True, 6), (3, False, 4)])
def test_sent_bytes_per_step(ranks: Ranks, stage: int, reshard: bool, moves: int) -> None:
    for num_calls, num_bytes, padded in ranks(3, sent, stage, reshard):
        assert num_calls == moves * 2 * 4  # to two others, for each of four units
        assert num_bytes == moves * padded * 2 / 3


def units_in_memory(group: dist.ProcessGroup, reshard: bool) -> list[list[bool]]:
    """Which units have memory after each layer's forward pass, before the backward pass, and at the end."""
    model, zero = built(group, 3, reshard)
    seen: list[list[bool]] = []

    def record_units(*_: Any) -> None:
        seen.append([unit.whole.untyped_storage().nbytes() > 0 for unit in zero.units])

    for layer in model.layers:
        layer.register_forward_hook(record_units)
    zero.begin()
    with zero.microbatch(last=True):
        loss = model(rows(group.rank(), 0))
        record_units()
        loss.backward()
    zero.finish()
    record_units()
    return seen


def test_only_two_layers_are_materialized_at_once(ranks: Ranks) -> None:
    forward = [[False] * index + [True, True] + [False] * (2 - index) for index in range(3)]
    for index in range(3):
        forward[index][index] = False  # freed just before this hook runs
    for seen in ranks(2, units_in_memory, True):
        assert seen == [*forward, [False] * 4, [False] * 4, [False] * 4]
    for seen in ranks(2, units_in_memory, False):
        assert seen[3] == seen[4] == [True] * 4
        assert seen[5] == [False] * 4


def most_gradient_vectors(group: dist.ProcessGroup, batched: bool) -> int:
    """The most vectors of gradients in memory at once."""
    vectors = 0
    model, zero = built(group, 2, True)
    begin = zero.summed.begin

    def watched(*arguments: Any, **options: Any) -> None:
        nonlocal vectors
        vectors = max(vectors, (zero.summed.under_way is not None) + len(zero._gradients))
        begin(*arguments, **options)

    # With NCCL, a sum overlaps with the next unit's gradients. Here only the schedule is NCCL's; gloo sends.
    with (
        mock.patch.object(zero.summed, "begin", watched),
        mock.patch.object(ReduceScatterScheduler, "make_room", make_room_if(batched)),
    ):
        steps(group, model, zero, 1)
    return vectors


def make_room_if(batched: bool) -> Any:
    make_room = ReduceScatterScheduler.make_room
    return (lambda self: None) if batched else make_room


@pytest.mark.parametrize(("batched", "vectors"), [(False, 1), (True, 2)])
def test_gradients_summed_at_once_are_bounded(ranks: Ranks, batched: bool, vectors: int) -> None:
    assert ranks(2, most_gradient_vectors, batched) == [vectors] * 2


def in_16_bits(group: dist.ProcessGroup) -> list[Any]:
    """The dtypes of weights, masters and gradients, and whether a step changed the masters."""
    model, zero = built(group, 3, True, dtype=torch.bfloat16)
    before = [master.detach().clone() for master in zero.masters]
    steps(group, model, zero, 1)
    moved = any(not torch.equal(one, other) for one, other in zip(before, zero.masters, strict=True))
    gradients = {gradient.dtype for gradient in zero.gradients}
    return [{p.dtype for p in model.parameters()}, {m.dtype for m in zero.masters}, gradients, moved]


def test_16_bit_weights_have_32_bit_masters(ranks: Ranks) -> None:
    for weights, masters, gradients, moved in ranks(2, in_16_bits):
        assert (weights, masters, gradients, moved) == ({torch.bfloat16}, {torch.float32}, {torch.bfloat16}, True)


def is_model_freed(group: dist.ProcessGroup) -> bool:
    model, zero = built(group, 3, True)
    steps(group, model, zero, 1)
    alive = weakref.ref(model)
    del model, zero
    gc.collect()
    return alive() is None


def test_hooks_do_not_keep_the_model_alive(ranks: Ranks) -> None:
    assert ranks(2, is_model_freed) == [True, True]
