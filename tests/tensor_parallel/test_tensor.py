"""f and g, gather and scatter, and the linear layers between them, against one process; what they copy, and what they
send."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.collectives import autograd
from distlab.collectives.phases import recorded
from distlab.measure.traffic import Calls
from distlab.tensor_parallel.layers import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    Sequence,
    Whole,
    shares,
    slices_of,
    sum_together,
)
from distlab.testing.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
WIDTH = 5


# --- a slice of two layers, and what lies around it ---


class Sliced(nn.Module):
    """A linear layer on what lies between, then W2 gelu(W1 x), then another."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, hidden)
        self.down, self.after = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor, region: Region | None = None) -> Tensor:
        x = self.before(x)
        inside: Tensor = self.down(F.gelu(self.up(region.enter(x) if region else x)))
        out: Tensor = self.after(x + inside)
        return out

    def slice(self, group: dist.ProcessGroup, region: Region) -> "Sliced":
        sizes = shares(self.up.out_features, group.size())
        self.register_module("up", ColumnParallelLinear(self.up, sizes, group.rank()))
        self.register_module("down", RowParallelLinear(self.down, sizes, group.rank(), region))
        return self


class Twice(Whole):
    """An all_reduce in the backward pass of g, of a gradient that every rank has whole."""

    def leave(self, partial: Tensor) -> Tensor:
        return autograd.all_reduce(partial, self.group, loss="own")


class NoF(Whole):
    def enter(self, x: Tensor) -> Tensor:
        return x


SEAMS: dict[str, Any] = {"whole": Whole, "sequence": Sequence, "twice": Twice, "no_f": NoF}


def differences(group: dist.ProcessGroup, kind: str, num_rows: int, hidden: int) -> dict[str, float]:
    """The largest difference to one process: of the output, and of each parameter's gradient."""
    x = torch.randn(num_rows, 2, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    dense, region = Sliced(hidden), SEAMS[kind](group)
    wanted = dense(x)
    wanted.square().sum().backward()
    model = Sliced(hidden).slice(group, region)
    found = model(region.own(x) if kind == "sequence" else x, region)
    found.square().sum().backward()
    if kind == "sequence":
        wanted = region.own(wanted)
    apart = {"output": (found - wanted).abs().max().item() if len(found) else 0.0}
    cuts = slices_of(model)
    for name, parameter in model.named_parameters():
        gradient, true = parameter.grad, dense.get_parameter(name).grad
        assert gradient is not None and true is not None
        if name in cuts:
            true = cuts[name].piece(true, group.rank())
        elif kind == "sequence":
            sum_together([gradient], group)
        apart[name] = (gradient - true).abs().max().item() if true.numel() else 0.0
    return apart


@pytest.mark.parametrize("kind", ["whole", "sequence"])
@pytest.mark.parametrize(
    ("world_size", "num_rows", "hidden"),
    [(1, 3, 4), (2, 4, 6), (3, 5, 7), (4, 3, 7), (4, 1, 4)],  # with fewer rows than ranks, chunks are empty
)
def test_slices_do_what_one_process_does(ranks: Ranks, kind: str, world_size: int, num_rows: int, hidden: int) -> None:
    for of_rank in ranks(world_size, differences, kind, num_rows, hidden):
        assert len(of_rank) == 9
        assert max(of_rank.values()) < 1e-10, of_rank  # of numbers up to 1e3


def test_a_second_sum_in_the_backward_of_g_is_seen_in_the_gradients_alone(ranks: Ranks) -> None:
    for of_rank in ranks(2, differences, "twice", 4, 6):
        assert of_rank["output"] < 1e-10 < 1 < of_rank["up.weight"]
        assert of_rank["after.weight"] < 1e-10 and of_rank["down.bias"] < 1e-10  # behind g


def test_without_f_the_gradient_of_what_lies_before_is_partial(ranks: Ranks) -> None:
    for of_rank in ranks(2, differences, "no_f", 4, 6):
        assert of_rank["output"] < 1e-10 < 1 < of_rank["before.weight"]
        assert of_rank["up.weight"] < 1e-10  # inside


# --- what is copied, and what is sent ---


def places(group: dist.ProcessGroup) -> list[bool]:
    region = Whole(group)
    x = torch.ones(3, requires_grad=True)
    partial = x * 1
    place = partial.data_ptr()
    return [region.enter(x).data_ptr() == x.data_ptr(), region.leave(partial).data_ptr() == place]


def test_f_and_g_copy_nothing(ranks: Ranks) -> None:
    assert ranks(2, places) == [[True, True]] * 2


@contextmanager
def named(group: dist.ProcessGroup, description: str) -> Iterator[None]:
    """`group` under another description: only some of the pool's ranks are here, and all would have to make a new
    one."""
    before = group.group_desc
    group._set_group_desc(description)
    try:
        yield
    finally:
        group._set_group_desc(before)


def calls(group: dist.ProcessGroup, kind: str, num_rows: int) -> list[list[tuple[str, str, float, float]]]:
    """What forward and backward of one slice call, by operation and axis: (operation, axis, calls, called bytes)."""
    region = SEAMS[kind](group)
    model = Sliced(8).slice(group, region)
    x = torch.ones(num_rows, 2, WIDTH, dtype=torch.float64)
    with named(group, "mesh_tp"):  # what a mesh calls the group of its axis tp
        with Calls() as forward:
            loss = model(region.own(x) if kind == "sequence" else x, region).sum()
        with Calls() as backward:
            loss.backward()
    return [[(op.op, op.axis, op.calls, op.called_bytes) for op in seen.ops()] for seen in (forward, backward)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slice_is_one_all_reduce_each_way(ranks: Ranks, world_size: int) -> None:
    nbytes = 2 * (world_size - 1) / world_size * 6 * 2 * WIDTH * 8
    wanted = ("all_reduce", "tp", 1, pytest.approx(nbytes))
    assert ranks(world_size, calls, "whole", 6) == [[[wanted], [wanted]]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_that_are_cut_send_the_same_bytes(ranks: Ranks, world_size: int) -> None:
    nbytes = 2 * (world_size - 1) / world_size * 6 * 2 * WIDTH * 8
    gathered = ("all_gather", "tp", 1, pytest.approx(nbytes / 2))
    scattered = ("all_to_all", "tp", 1, pytest.approx(nbytes / 2))
    assert ranks(world_size, calls, "sequence", 6) == [[[gathered, scattered], [gathered, scattered]]] * world_size


def marks(group: dist.ProcessGroup, kind: str) -> list[str]:
    region = SEAMS[kind](group)
    model, x = Sliced(8).slice(group, region), torch.ones(4, 2, WIDTH, dtype=torch.float64)
    with recorded() as spans:
        model(region.own(x) if kind == "sequence" else x, region).sum().backward()
    return [span.kind for span in spans]


def test_what_is_sent_is_marked(ranks: Ranks) -> None:
    assert ranks(2, marks, "whole") == [["all_reduce"] * 2] * 2
    assert ranks(2, marks, "sequence") == [["all_gather", "reduce_scatter"] * 2] * 2


def summed(group: dist.ProcessGroup) -> list[Any]:
    sums = [torch.full((2, 3), group.rank() + 1.0), torch.ones(1)]
    with Calls() as calls:
        sum_together(sums, group)
    return [[total.tolist() for total in sums], sum(op.calls for op in calls.ops())]


def test_gradients_are_summed_in_one_call(ranks: Ranks) -> None:
    assert ranks(3, summed) == [[[[[6.0] * 3] * 2, [3.0]], 1]] * 3
