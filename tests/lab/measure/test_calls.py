"""The dispatch mode counts each call once, from any caller, with its bytes and its axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from distlab.lab.measure.traffic import CalledOp, Calls
from tests.warm_ranks import Ranks

Counts = dict[str, tuple[int, int, float]]  # operation: (calls, raw bytes, called bytes)


def counted(function: Callable[[], object]) -> Counts:
    """Return the counts of one call of `function`."""
    with Calls() as calls:
        function()
    return {entry.op: (entry.calls, entry.raw_bytes, entry.called_bytes) for entry in calls.ops()}


def every_operation(group: dist.ProcessGroup) -> dict[str, Counts]:
    size, rank = group.size(), group.rank()
    whole, part = torch.ones(size * 6), torch.ones(6)
    parts = list(torch.ones(size * 6).chunk(size))
    after, before = dist.get_global_rank(group, (rank + 1) % size), dist.get_global_rank(group, (rank - 1) % size)

    def send_and_receive() -> None:
        operations = [dist.P2POp(dist.irecv, torch.empty(6), before, group), dist.P2POp(dist.isend, part, after, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def directly() -> None:
        received = group.recv([torch.empty(6)], (rank - 1) % size, 5)
        group.send([part], (rank + 1) % size, 5).wait()
        received.wait()

    root = rank == 1
    return {
        "all_reduce": counted(lambda: dist.all_reduce(whole, group=group)),
        "broadcast": counted(lambda: dist.broadcast(whole, 1, group=group)),
        "reduce": counted(lambda: dist.reduce(whole, 1, group=group)),
        "all_gather": counted(lambda: dist.all_gather(parts, part, group=group)),
        "all_gather_into_tensor": counted(lambda: dist.all_gather_into_tensor(whole, part, group=group)),
        "reduce_scatter": counted(lambda: dist.reduce_scatter(part, parts, group=group)),
        "reduce_scatter_tensor": counted(lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
        "all_to_all_single": counted(lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group)),
        "all_to_all": counted(lambda: dist.all_to_all([torch.empty(6) for _ in parts], parts, group=group)),
        "scatter": counted(lambda: dist.scatter(part, parts if root else None, 1, group=group)),
        "gather": counted(lambda: dist.gather(part, parts if root else None, 1, group=group)),
        "batch_isend_irecv": counted(send_and_receive),
        "group.send": counted(directly),
        "barrier": counted(lambda: dist.barrier(group)),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_is_counted_once(ranks: Ranks, world_size: int) -> None:
    part, whole, share = 24, world_size * 24, (world_size - 1) / world_size
    for rank, seen in enumerate(ranks(world_size, every_operation)):
        root = rank == 1
        assert seen == {
            "all_reduce": {"all_reduce": (1, whole, pytest.approx(2 * share * whole))},
            "broadcast": {"broadcast": (1, whole, pytest.approx(share * whole))},
            "reduce": {"reduce": (1, whole, pytest.approx(share * whole))},
            "all_gather": {"all_gather": (1, whole, pytest.approx(share * whole))},
            "all_gather_into_tensor": {"all_gather": (1, whole, pytest.approx(share * whole))},
            "reduce_scatter": {"reduce_scatter": (1, whole, pytest.approx(share * whole))},
            "reduce_scatter_tensor": {"reduce_scatter": (1, whole, pytest.approx(share * whole))},
            "all_to_all_single": {"all_to_all": (1, whole, pytest.approx(share * whole))},
            "all_to_all": {"all_to_all": (1, whole, pytest.approx(share * whole))},
            "scatter": {"scatter": (1, whole if root else 0, pytest.approx(share * whole if root else 0))},
            "gather": {"gather": (1, part, 0 if root else part)},
            "batch_isend_irecv": {"send": (1, part, part)},
            "group.send": {"send": (1, part, part)},
            "barrier": {},
        }


def uneven(group: dist.ProcessGroup) -> list[Counts]:
    """Send 1 + r + 2·o rows of 3 numbers from rank r to rank o: as one tensor, and as a functional collective. gloo
    supports lists only with equal parts."""
    size, rank = group.size(), group.rank()
    rows_sent, rows_received = ([1 + rank + 2 * o for o in range(size)], [1 + o + 2 * rank for o in range(size)])
    tensor = torch.ones(sum(rows_sent), 3)
    place = torch.empty(sum(rows_received), 3)
    return [
        counted(lambda: dist.all_to_all_single(place, tensor, rows_received, rows_sent, group=group)),
        counted(lambda: functional.all_to_all_single(tensor, rows_received, rows_sent, group)),
    ]


def test_an_uneven_all_to_all_is_what_goes_to_the_others(ranks: Ranks) -> None:
    size = 3
    for rank, seen in enumerate(ranks(size, uneven)):
        rows = [1 + rank + 2 * other for other in range(size)]
        wanted = 12 * (sum(rows) - rows[rank])
        assert seen == [{"all_to_all": (1, 12 * sum(rows), pytest.approx(wanted))}] * 2


def in_the_backward_pass(group: dist.ProcessGroup) -> Counts:
    layer = torch.nn.Linear(8, 8)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
    return counted(lambda: layer(torch.ones(1, 8)).sum().backward())


def test_calls_from_hooks_are_counted(ranks: Ranks) -> None:
    assert ranks(2, in_the_backward_pass) == [{"all_reduce": (2, 288, 288.0)}] * 2


def by_ddp(group: dist.ProcessGroup) -> list[Counts]:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    return [counted(lambda: replica(torch.ones(1, 8)).sum().backward()) for _ in range(3)]


def test_calls_of_ddp_are_counted(ranks: Ranks) -> None:
    for steps in ranks(3, by_ddp):
        assert steps[2] == {"all_reduce": (1, 288, pytest.approx(288 * 4 / 3))}


def by_fully_shard(group: dist.ProcessGroup) -> Counts:
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return counted(lambda: model(torch.ones(1, 8)).sum().backward())


def test_calls_of_fully_shard_are_counted(ranks: Ranks) -> None:
    # The root unit is not resharded after forward: one all_gather.
    assert ranks(2, by_fully_shard) == [{"all_gather": (1, 256, 128.0), "reduce_scatter": (1, 256, 128.0)}] * 2


def of_dtensor(group: dist.ProcessGroup) -> tuple[Counts, Counts]:
    sharded: Any = distribute_tensor(torch.ones(4, 4), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return counted(lambda: (sharded.sum() * 2).full_tensor()), counted(sharded.full_tensor)


def test_functional_collectives_of_dtensor_are_counted(ranks: Ranks) -> None:
    assert ranks(2, of_dtensor) == [({"all_reduce": (1, 4, 4.0)}, {"all_gather": (1, 64, 32.0)})] * 2


def axes(group: dist.ProcessGroup) -> tuple[list[str], str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    named = dist.new_group(list(range(8)), group_desc="mine")
    with Calls() as calls:
        for each in (mesh.get_group("dp"), mesh.get_group("pp"), dist.group.WORLD, named, group):
            dist.all_reduce(torch.ones(1), group=each)
    return [entry.axis for entry in calls.ops()], group.group_name


def test_calls_are_counted_by_axis(ranks: Ranks) -> None:
    for seen, own_name in ranks(8, axes):
        assert seen == ["dp", "pp", "world", "mine", own_name]


def outside(group: dist.ProcessGroup) -> list[CalledOp]:
    with Calls() as calls:
        pass
    dist.all_reduce(torch.ones(1), group=group)
    seen: list[CalledOp] = calls.ops()
    return seen


def test_calls_outside_of_the_block_are_not_counted(ranks: Ranks) -> None:
    assert ranks(2, outside) == [[], []]
