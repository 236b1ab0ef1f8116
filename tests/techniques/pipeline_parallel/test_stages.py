"""Cutting a model into stages: layers per stage, parameters per rank, and gradients of shared parameters."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.pipeline_parallel.strategy import Parts, cut, divide, sum_shared
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 2), st.integers(0, 2))
def test_layers_are_divided_like_tensor_split(counted: int, stages: int, first: int, last: int) -> None:
    num_layers = first + counted + last
    if counted < stages:
        with pytest.raises(ValueError, match=f"{counted} layers are fewer than {stages} stages"):
            divide(num_layers, stages, first=first, last=last)
        return
    runs = divide(num_layers, stages, first=first, last=last)
    assert [index for run in runs for index in run] == list(range(num_layers))
    sizes = [len(run) for run in runs]
    sizes[0] -= first
    sizes[-1] -= last
    assert sizes == [len(part) for part in torch.arange(counted).tensor_split(stages)]


class Tied(nn.Module):
    """Four layers; the first, third and last share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=index == 1) for index in range(4))
        for index in (2, 3):
            self.layers[index].weight = self.layers[0].weight


def parts_of(rank: int, ranks: int, stages: int | None = None) -> Parts:
    model = Tied()
    return cut(
        model, list(model.layers), divide(4, stages or ranks), rank, [*range(ranks)] * ((stages or ranks) // ranks)
    )


def test_every_rank_knows_the_holders_of_parameters() -> None:
    for rank in range(4):
        parts = parts_of(rank, 4)
        assert parts.holders == {"layers.0.weight": (0, 2, 3), "layers.1.weight": (1,), "layers.1.bias": (1,)}
        assert parts.shared == ["layers.0.weight"]
        own = ["layers.1.weight", "layers.1.bias"] if rank == 1 else ["layers.0.weight"]
        assert list(parts.parameters) == own
        assert list(parts.stages) == [rank]


def test_a_stage_keeps_the_dense_names() -> None:
    parts = parts_of(1, 2)
    assert [name for name, _ in parts.stages[1].named_parameters()] == ["layers.2.weight"]  # the same matrix twice


def test_tied_weights_on_one_rank_need_no_message() -> None:
    parts = parts_of(0, 1, stages=4)
    assert list(parts.stages) == [0, 1, 2, 3]
    assert parts.shared == []


def summed(group: dist.ProcessGroup) -> Tensor | None:
    parts = parts_of(group.rank(), group.size())
    for parameter in parts.parameters.values():
        generator = torch.Generator().manual_seed(group.rank())
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    sum_shared(parts, Peers(group))
    shared = parts.parameters.get("layers.0.weight")
    return None if shared is None else shared.grad


def test_shared_gradients_are_summed_to_the_same_bits(ranks: Ranks) -> None:
    first, without, third, last = ranks(4, summed)
    assert without is None
    assert torch.equal(first, third) and torch.equal(first, last)
    seeds = (torch.Generator().manual_seed(rank) for rank in (0, 2, 3))
    one, two, three = (torch.randn(3, 3, generator=seed) for seed in seeds)
    assert torch.equal(first, one + two + three)


def test_a_shared_parameter_without_a_gradient_is_named() -> None:
    class Alone:
        rank, world_size = 0, 1

        def new_tag(self) -> int:
            return 1

    parts = parts_of(0, 4)
    with pytest.raises(ValueError, match=r"layers\.0\.weight has no gradient on rank 0"):
        sum_shared(parts, Alone())  # type: ignore[arg-type]
