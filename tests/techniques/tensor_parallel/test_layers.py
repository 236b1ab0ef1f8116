"""Slices of layers at uneven sizes: parts per rank, and outputs and gradients compared with one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.measure.traffic import Calls
from distlab.techniques.collectives import autograd
from distlab.techniques.collectives.phases import recorded
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import assembled
from distlab.techniques.tensor_parallel.layers import (
    ColumnParallelLinear,
    Region,
    ReplicatedRegion,
    RowParallelLinear,
    SequenceParallelRegion,
    Slice,
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    partition_sizes,
    slices_of,
    sum_together,
)
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


# Parts per rank at uneven sizes, and the dense tensor assembled from them.


@given(st.integers(0, 300), st.integers(1, 8), st.integers(1, 9))
def test_partition_sizes_equal_tensor_split(num_units: int, num_ranks: int, unit: int) -> None:
    wanted = [unit * len(part) for part in torch.arange(num_units).tensor_split(num_ranks)]
    assert list(partition_sizes(num_units, num_ranks, unit)) == wanted


def test_partitions_contain_whole_heads() -> None:
    assert partition_sizes(7, 4, 16) == (32, 32, 32, 16)
    assert partition_sizes(24, 5) == (5, 5, 5, 5, 4)


def test_a_piece_is_a_copy() -> None:
    dense = torch.arange(12.0).view(3, 4)
    piece = Slice(1, (2, 1, 1)).piece(dense, 1)
    assert piece.tolist() == [[2], [6], [10]]
    assert piece.untyped_storage().nbytes() == 12


def joined(group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]) -> list[Any]:
    dense = torch.arange(float(3 * sum(sizes))).view([3, sum(sizes)] if dim else [sum(sizes), 3])
    cut = Slice(dim, sizes)
    piece = cut.place(cut.piece(dense, group.rank()), group.rank())
    whole = dict(assembled([("whole", piece)], Peers(group)))
    return [len(whole), bool(whole) and torch.equal(whole["whole"], dense)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(4,), (2, 1), (2, 2, 1, 0), (3, 3, 2)])
def test_rank_0_assembles_the_dense_tensor(ranks: Ranks, dim: int, sizes: tuple[int, ...]) -> None:
    assert ranks(len(sizes), joined, dim, sizes) == [[1, True], *[[0, False]] * (len(sizes) - 1)]


# f and g, gather and scatter, and the linear layers between them, compared with one process; copies and messages.


WIDTH = 5


# --- a slice of two layers, with a layer before and after it ---


class Sliced(nn.Module):
    """A linear layer, then x + W2 gelu(W1 x), then another linear layer."""

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
        sizes = partition_sizes(self.up.out_features, group.size())
        self.register_module("up", ColumnParallelLinear(self.up, sizes, group.rank()))
        self.register_module("down", RowParallelLinear(self.down, sizes, group.rank(), region))
        return self


class Twice(ReplicatedRegion):
    """A superfluous all_reduce in the backward pass of g, where every rank has the full gradient already."""

    def leave(self, partial: Tensor) -> Tensor:
        return autograd.all_reduce(partial, self.group, loss="own")


class NoF(ReplicatedRegion):
    def enter(self, x: Tensor) -> Tensor:
        return x


SEAMS: dict[str, Any] = {"whole": ReplicatedRegion, "sequence": SequenceParallelRegion, "twice": Twice, "no_f": NoF}


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
    errors = {"output": (found - wanted).abs().max().item() if len(found) else 0.0}
    cuts = slices_of(model)
    for name, parameter in model.named_parameters():
        gradient, true = parameter.grad, dense.get_parameter(name).grad
        assert gradient is not None and true is not None
        if name in cuts:
            true = cuts[name].piece(true, group.rank())
        elif kind == "sequence":
            sum_together([gradient], group)
        errors[name] = (gradient - true).abs().max().item() if true.numel() else 0.0
    return errors


@pytest.mark.parametrize("kind", ["whole", "sequence"])
@pytest.mark.parametrize(
    ("world_size", "num_rows", "hidden"),
    [(1, 3, 4), (2, 4, 6), (3, 5, 7), (4, 3, 7), (4, 1, 4)],  # with fewer rows than ranks, chunks are empty
)
def test_slices_equal_one_process(ranks: Ranks, kind: str, world_size: int, num_rows: int, hidden: int) -> None:
    for of_rank in ranks(world_size, differences, kind, num_rows, hidden):
        assert len(of_rank) == 9
        assert max(of_rank.values()) < 1e-10, of_rank  # of numbers up to 1e3


def test_a_second_sum_in_backward_corrupts_gradients(ranks: Ranks) -> None:
    for of_rank in ranks(2, differences, "twice", 4, 6):
        assert of_rank["output"] < 1e-10 < 1 < of_rank["up.weight"]
        assert of_rank["after.weight"] < 1e-10 and of_rank["down.bias"] < 1e-10  # behind g


def test_without_f_earlier_gradients_are_partial(ranks: Ranks) -> None:
    for of_rank in ranks(2, differences, "no_f", 4, 6):
        assert of_rank["output"] < 1e-10 < 1 < of_rank["before.weight"]
        assert of_rank["up.weight"] < 1e-10  # inside


# --- copies and messages ---


def returns_same_memory(group: dist.ProcessGroup) -> list[bool]:
    region = ReplicatedRegion(group)
    x = torch.ones(3, requires_grad=True)
    partial = x * 1
    place = partial.data_ptr()
    return [region.enter(x).data_ptr() == x.data_ptr(), region.leave(partial).data_ptr() == place]


def test_f_and_g_copy_nothing(ranks: Ranks) -> None:
    assert ranks(2, returns_same_memory) == [[True, True]] * 2


@contextmanager
def named(group: dist.ProcessGroup, description: str) -> Iterator[None]:
    """Give `group` another description for a while. A new group would need all ranks of the pool, not only these."""
    before = group.group_desc
    group._set_group_desc(description)
    try:
        yield
    finally:
        group._set_group_desc(before)


def calls(group: dist.ProcessGroup, kind: str, num_rows: int) -> list[list[tuple[str, str, float, float]]]:
    """The calls of one slice's forward and backward pass: (operation, axis, calls, sent bytes)."""
    region = SEAMS[kind](group)
    model = Sliced(8).slice(group, region)
    x = torch.ones(num_rows, 2, WIDTH, dtype=torch.float64)
    with named(group, "mesh_tp"):  # the description that a mesh gives to its axis tp
        with Calls() as forward:
            loss = model(region.own(x) if kind == "sequence" else x, region).sum()
        with Calls() as backward:
            loss.backward()
    return [[(op.op, op.axis, op.calls, op.called_bytes) for op in seen.ops()] for seen in (forward, backward)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slice_calls_one_all_reduce_per_pass(ranks: Ranks, world_size: int) -> None:
    nbytes = 2 * (world_size - 1) / world_size * 6 * 2 * WIDTH * 8
    wanted = ("all_reduce", "tp", 1, pytest.approx(nbytes))
    assert ranks(world_size, calls, "whole", 6) == [[[wanted], [wanted]]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_sequence_parallel_slices_send_the_same_bytes(ranks: Ranks, world_size: int) -> None:
    nbytes = 2 * (world_size - 1) / world_size * 6 * 2 * WIDTH * 8
    gathered = ("all_gather", "tp", 1, pytest.approx(nbytes / 2))
    scattered = ("all_to_all", "tp", 1, pytest.approx(nbytes / 2))
    assert ranks(world_size, calls, "sequence", 6) == [[[gathered, scattered], [gathered, scattered]]] * world_size


def phases_of(group: dist.ProcessGroup, kind: str) -> list[str]:
    region = SEAMS[kind](group)
    model, x = Sliced(8).slice(group, region), torch.ones(4, 2, WIDTH, dtype=torch.float64)
    with recorded() as spans:
        model(region.own(x) if kind == "sequence" else x, region).sum().backward()
    return [span.kind for span in spans]


def test_communication_is_recorded_as_phases(ranks: Ranks) -> None:
    assert ranks(2, phases_of, "whole") == [["all_reduce"] * 2] * 2
    assert ranks(2, phases_of, "sequence") == [["all_gather", "reduce_scatter"] * 2] * 2


def summed(group: dist.ProcessGroup) -> list[Any]:
    sums = [torch.full((2, 3), group.rank() + 1.0), torch.ones(1)]
    with Calls() as calls:
        sum_together(sums, group)
    return [[total.tolist() for total in sums], sum(op.calls for op in calls.ops())]


def test_gradients_are_summed_in_one_call(ranks: Ranks) -> None:
    assert ranks(3, summed) == [[[[[6.0] * 3] * 2, [3.0]], 1]] * 3


# Embedding and cross-entropy over a sliced vocabulary, compared with dense ones at uneven sizes and extreme scores.


VECTOR = 3


def embedded(group: dist.ProcessGroup, vocabulary: int, by_rows: bool, all_the_same: bool) -> list[float]:
    """The errors compared with the dense embedding: of the vectors, and of this rank's gradient."""
    generator = torch.Generator().manual_seed(5)
    dense = nn.Embedding.from_pretrained(torch.randn(vocabulary, VECTOR, generator=generator).double(), freeze=False)
    tokens = torch.zeros(5, 2, dtype=torch.long)  # only the first rank stores this token's vector
    if not all_the_same:
        tokens = torch.randint(vocabulary, (5, 2), generator=generator)
    sizes = partition_sizes(vocabulary, group.size())
    region = SequenceParallelRegion(group) if by_rows else ReplicatedRegion(group)
    part = VocabularyParallelEmbedding(dense, sizes, group.rank(), region)
    found, wanted = part(tokens), dense(tokens)
    factor = torch.arange(30.0).view(5, 2, VECTOR).double()  # a gradient that differs from place to place
    (wanted * factor).sum().backward()
    if isinstance(region, SequenceParallelRegion):
        wanted, factor = region.own(wanted), region.own(factor)
    (found * factor).sum().backward()
    assert part.weight.grad is not None and dense.weight.grad is not None
    gradient = part.slices["weight"].piece(dense.weight.grad, group.rank())
    return [(found - wanted).abs().sum().item(), (part.weight.grad - gradient).abs().sum().item()]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("all_the_same", [False, True])
@pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 4), (2, 8), (3, 7), (4, 4), (4, 9)])
def test_vocabulary_parallel_embedding_equals_dense(
    ranks: Ranks, world_size: int, vocabulary: int, by_rows: bool, all_the_same: bool
) -> None:
    for of_rank in ranks(world_size, embedded, vocabulary, by_rows, all_the_same):
        assert max(of_rank) < 1e-12


def losses(group: dist.ProcessGroup, vocabulary: int, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """The loss, its errors compared with the dense one, and its calls."""
    generator = torch.Generator().manual_seed(6)
    dense = (torch.randn(4, 3, vocabulary, generator=generator).double() * scale).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (4, 3), generator=generator)
    sizes = partition_sizes(vocabulary, group.size())
    scores = dense.detach().split(sizes, -1)[group.rank()].clone().requires_grad_()
    with Calls() as calls:
        loss = VocabularyParallelCrossEntropy(sizes, group)(scores, targets)
        (loss * 0.5).backward()
    wide = dense.to(torch.promote_types(dtype, torch.float32))
    wanted = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")
    (wanted * 0.5).backward()
    assert dense.grad is not None and scores.grad is not None
    return {
        "loss": loss.item(),
        "relative_error": abs(loss.item() - wanted.item()) / abs(wanted.item()),
        "gradient": (scores.grad - dense.grad.split(sizes, -1)[group.rank()]).abs().max().item(),
        "sent": [(op.op, op.calls, op.raw_bytes) for op in calls.ops()],
    }


@pytest.mark.parametrize("scale", [1.0, 1e4])  # exp of the second is infinite without its maximum
@pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 4), (2, 8), (3, 256), (4, 7)])
def test_vocabulary_parallel_loss_equals_dense(ranks: Ranks, world_size: int, vocabulary: int, scale: float) -> None:
    found = ranks(world_size, losses, vocabulary, scale, torch.float64)
    assert len({of_rank["loss"] for of_rank in found}) == 1  # to the bit
    for of_rank in found:
        assert of_rank["relative_error"] < 1e-13 and of_rank["gradient"] < 1e-13
        assert of_rank["sent"] == [("all_reduce", 2, 3 * 12 * 8)]  # three numbers per token, and no scores


def test_bfloat16_scores_are_summed_in_float32(ranks: Ranks) -> None:
    for of_rank in ranks(2, losses, 8, 1.0, torch.bfloat16):
        assert of_rank["relative_error"] < 1e-6
        assert of_rank["gradient"] < 1e-2
        assert of_rank["sent"] == [("all_reduce", 2, 3 * 12 * 4)]
