"""Experts on ranks compared with one process: placement, transport of rows, routing, and the layer around them."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distlab.lab.workload.experts import Mixing, Mixture
from distlab.techniques.expert_parallel import layer
from distlab.techniques.expert_parallel.layer import AllToAll, Dispatch, MixtureOfExperts, Placement, Routed
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
WIDTH, HIDDEN = 4, 6


# Placement: each copy stores all experts once, as evenly as possible, and each piece knows its offset.


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_each_copy_stores_every_weight_once(experts: int, hidden: int, copies: int, ep: int, tp: int) -> None:
    placement = Placement.spread(experts, hidden, copies=copies, ep=ep, tp=tp)
    for name, shape in (("up", (experts, WIDTH, hidden)), ("down", (experts, hidden, WIDTH))):
        for copy in range(copies):
            times = torch.zeros(shape)
            for rank in placement.members(copy * ep * tp):
                part = times[placement.box(name, rank)]
                part += 1
                assert placement.shape(name, part) == shape
            assert bool((times == 1).all())


def test_ranks_are_laid_out_as_a_mesh() -> None:
    placement = Placement.spread(5, 8, copies=2, ep=2, tp=2)
    assert [placement.experts_of(rank) for rank in range(4)] == [range(3), range(3), range(3, 5), range(3, 5)]
    assert [placement.hidden_of(rank) for rank in range(4)] == [range(4), range(4, 8)] * 2
    assert placement.experts_of(6) == range(3, 5)
    assert [placement.members(rank) for rank in (0, 3, 4, 7)] == [range(4), range(4), range(4, 8), range(4, 8)]


def test_surplus_ranks_have_no_experts() -> None:
    placement = Placement.spread(2, 4, ep=3)
    assert [len(placement.experts_of(rank)) for rank in range(3)] == [1, 1, 0]
    assert placement.piece("up", torch.zeros(0, WIDTH, 4), 2).boxes == []


def test_a_piece_knows_its_offset() -> None:
    placement = Placement.spread(4, 6, ep=2, tp=2)
    part = torch.zeros(2, 3, WIDTH)
    piece = placement.piece("down", part, 3)
    assert piece.shape == (4, 6, WIDTH)
    assert [offset for offset, _ in piece.boxes] == [(2, 3, 0)]


# Transport: rows go to the ranks of their experts and return in order, in uneven numbers; so do their gradients.


def rows_of(rank: int, number: int) -> torch.Tensor:
    """Rows of two numbers: the rank and the index of the row."""
    return torch.stack([torch.full((number,), float(rank)), torch.arange(float(number))], 1)


def swapped(group: dist.ProcessGroup, table: list[list[int]]) -> list[list[float]]:
    """The rows that arrive at this rank if rank r sends `table[r][p]` rows to p."""
    rank = group.rank()
    num_sent, num_received = table[rank], [of_rank[rank] for of_rank in table]
    received: list[list[float]] = AllToAll(group)(rows_of(rank, sum(num_sent)), num_sent, num_received).tolist()
    return received


@pytest.mark.parametrize(
    "table", [[[1, 2], [0, 3]], [[0, 0], [0, 0]], [[2, 0, 1], [0, 0, 0], [3, 1, 4]]], ids=["two", "none", "three"]
)
def test_rows_arrive_in_rank_order(ranks: Ranks, table: list[list[int]]) -> None:
    for rank, received in enumerate(ranks(len(table), swapped, table)):
        wanted = []
        for source, of_rank in enumerate(table):
            first = sum(of_rank[:rank])
            wanted += [[float(source), float(first + index)] for index in range(of_rank[rank])]
        assert received == wanted


def through_experts(
    group: dist.ProcessGroup, experts_of_ranks: list[range], admitted: list[list[int]]
) -> tuple[Any, Any, Any, tuple[list[int], list[int]]]:
    """Expert e multiplies by e + 1: return the results, the gradients of the rows, and the rows that each computed."""
    rank, computed = group.rank(), []
    dispatch = Dispatch(experts_of_ranks, range(group.size()), rank, AllToAll(group))
    sorted_rows = rows_of(rank, sum(admitted[rank]))
    rows = sorted_rows[dispatch.send_order(admitted)].requires_grad_()

    def compute(arrived: torch.Tensor, counts: list[int]) -> torch.Tensor:
        computed.append(counts)
        factors = torch.tensor([float(expert + 1) for expert in experts_of_ranks[rank]])
        return arrived * factors.repeat_interleave(torch.tensor(counts, dtype=torch.long))[:, None]

    back = dispatch(rows, admitted, compute)
    back.sum().backward()
    assert rows.grad is not None
    return back.tolist(), rows.grad.tolist(), computed, dispatch.count_rows(admitted)


ADMITTED = [[2, 0, 1], [1, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "experts_of_ranks",
    [[range(2), range(2, 3), range(3, 3)], [range(1), range(1, 2), range(2, 3)]],
    ids=["an empty rank", "even"],
)
def test_rows_reach_their_experts_and_return(ranks: Ranks, experts_of_ranks: list[range]) -> None:
    for rank, (back, gradient, computed, (num_sent, num_received)) in enumerate(
        ranks(3, through_experts, experts_of_ranks, ADMITTED)
    ):
        factors = [float(expert + 1) for expert, count in enumerate(ADMITTED[rank]) for _ in range(count)]
        assert back == [[rank * factor, index * factor] for index, factor in enumerate(factors)]
        assert gradient == [[factor, factor] for factor in factors]
        assert computed == [[sum(of_rank[expert] for of_rank in ADMITTED) for expert in experts_of_ranks[rank]]]
        assert (sum(num_sent), sum(num_received)) == (sum(ADMITTED[rank]), sum(computed[0]))


def test_replicated_experts_all_receive_the_rows(ranks: Ranks) -> None:
    """Both ranks have both experts: each row goes to both and returns from both."""
    admitted = [[1, 1], [2, 0]]
    (first, gradient, computed, numbers), _ = ranks(2, through_experts, [range(2), range(2)], admitted)
    assert first == [[0.0, 0.0], [0.0, 2.0]] * 2
    assert gradient == [[1.0, 1.0], [2.0, 2.0]] * 2
    assert computed == [[3, 1]]
    assert numbers == ([2, 2], [2, 2])


# Routing on ranks equals one process: queues, places, balance and gates do not depend on how tokens are distributed.


def scores_of(seed: int, tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def queues(experts: Tensor, num_experts: int, places: int) -> dict[int, list[tuple[int, int]]]:
    """For each expert the admitted (choice, token) pairs in order, as one process computes them."""
    admitted: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(num_experts)}
    for choice, of_tokens in enumerate(experts.tolist()):
        for token, expert in enumerate(of_tokens):
            if len(admitted[expert]) < places:
                admitted[expert].append((choice, token))
    return admitted


@settings(max_examples=50)
@given(
    st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3),
    st.integers(0, 9),
)  # fmt: skip
def test_capacity_admits_the_tokens_of_one_process(
    seed: int, tokens_of_ranks: list[int], experts: int, top_k: int, places: int
) -> None:  # fmt: skip
    top_k = min(top_k, experts)
    scores = scores_of(seed, sum(tokens_of_ranks), experts)
    wanted = queues(layer.choose(scores, top_k).experts, experts, places)
    of_ranks = [layer.choose(part, top_k) for part in scores.split(tokens_of_ranks)]
    table = torch.stack([each.wanted for each in of_ranks])
    found: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(experts)}
    first = 0
    for rank, choices in enumerate(of_ranks):
        kept = layer.within_capacity(choices.experts, table, rank, places)
        chosen = choices.experts.flatten()[kept]
        assert chosen.tolist() == sorted(chosen.tolist())
        assert chosen.bincount(minlength=experts).tolist() == layer.admitted(table, places)[rank].tolist()
        for number, expert in zip(kept.tolist(), chosen.tolist(), strict=True):
            found[expert].append((number // tokens_of_ranks[rank], first + number % tokens_of_ranks[rank]))
        first += tokens_of_ranks[rank]
    assert {expert: sorted(of) for expert, of in found.items()} == {e: sorted(of) for e, of in wanted.items()}


def test_first_choices_precede_second_choices() -> None:
    """Two ranks with two tokens each, which all choose expert 0, as first or second choice."""
    table = torch.tensor([[[1, 1], [1, 1]], [[2, 0], [0, 2]]])  # [n, k, E]
    assert layer.queued(table).tolist() == [[[0, 0], [3, 1]], [[1, 1], [4, 2]]]
    assert layer.admitted(table, 3).tolist() == [[1, 2], [2, 1]]


def test_a_single_gate_and_normalized_gates() -> None:
    scores = scores_of(1, 7, 4)
    one, two = layer.choose(scores, 1), layer.choose(scores, 2)
    assert torch.equal(one.gates[0], scores.softmax(-1).max(-1).values)
    assert torch.allclose(two.gates.sum(0), torch.ones(7, dtype=torch.float64))
    assert torch.equal(one.experts[0], two.experts[0])
    assert one.wanted.sum() == 7


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "places"),
    [(1024, 2, 8, 1.25, 320), (37, 1, 5, 1.0, 8), (3, 1, 8, 0.5, 1), (11, 2, 4, 0.0, 11)],
)
def test_capacity_equals_gshard(tokens: int, top_k: int, experts: int, factor: float, places: int) -> None:
    assert layer.capacity(tokens, top_k, experts, factor) == places


def test_balance_losses_of_ranks_add_up() -> None:
    scores, experts = scores_of(3, 12, 4), 4
    whole = layer.choose(scores, 2)
    share, mean = whole.wanted.sum(0).double() / 24, whole.probabilities.mean(0)
    of_ranks = [layer.choose(part, 2) for part in scores.split([7, 0, 5])]
    table = torch.stack([each.wanted for each in of_ranks])
    parts = sum(layer.balance_loss(each.probabilities, table) for each in of_ranks)
    assert float(parts) == pytest.approx(12 * experts * float((share * mean).sum()), rel=1e-14)


def test_balance_loss_of_an_even_batch() -> None:
    probabilities = torch.full((8, 4), 0.25)
    assert float(layer.balance_loss(probabilities, torch.full((1, 1, 4), 2))) == pytest.approx(8)


def test_z_loss_sums_over_tokens() -> None:
    assert float(layer.z_loss(torch.zeros(3, 8))) == pytest.approx(3 * math.log(8) ** 2)


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5], [1, 1, 3]])
def test_each_expert_computes_its_own_rows(counts: list[int]) -> None:
    rows, up, down = torch.randn(5, 3), torch.randn(3, 3, 4), torch.randn(3, 4, 3)
    expert_of = torch.arange(3).repeat_interleave(torch.tensor(counts))
    wanted = [torch.nn.functional.gelu(row @ up[e]) @ down[e] for row, e in zip(rows, expert_of, strict=True)]
    assert torch.allclose(layer.grouped(rows, counts, up, down), torch.stack(wanted), atol=1e-6)


def test_a_rank_without_experts_computes_nothing() -> None:
    assert layer.grouped(torch.zeros(0, 3), [], torch.zeros(0, 3, 4), torch.zeros(0, 4, 3)).shape == (0, 3)


# The layer on ranks compared with one process's mixture: outputs, gradients, losses, and the recorded routing.


def dense(mixing: Mixing) -> Mixture:
    torch.manual_seed(5)
    layer = Mixture(WIDTH, HIDDEN, mixing).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return layer


def on_ranks(mixing: Mixing, group: dist.ProcessGroup) -> MixtureOfExperts:
    """This rank's part of the dense layer."""
    layer, placement = dense(mixing), Placement.spread(mixing.num_experts, HIDDEN, ep=group.size())
    for key in ("up", "down"):
        part = getattr(layer.experts, key).detach()[placement.box(key, group.rank())].clone()
        setattr(layer.experts, key, torch.nn.Parameter(part))
    experts_of_ranks = [placement.experts_of(rank) for rank in range(group.size())]
    dispatch = Dispatch(experts_of_ranks, range(group.size()), group.rank(), AllToAll(group))
    return MixtureOfExperts(layer.router, layer.experts, mixing, group, dispatch)


def compared(
    group: dist.ProcessGroup, mixing: Mixing, tokens_of_ranks: list[int]
) -> tuple[dict[str, float], list[Routed]]:
    """The errors of this rank's outputs, its gradients and its losses compared with one process."""
    torch.manual_seed(7)
    tokens = torch.randn(sum(tokens_of_ranks), WIDTH, dtype=torch.float64)
    alone, mine = dense(mixing), on_ranks(mixing, group)
    whole = tokens.clone().requires_grad_()
    wanted = alone(whole)
    assert alone.extra is not None
    (wanted.square().sum() + alone.extra).backward()
    here = tokens.split(tokens_of_ranks)[group.rank()].clone().requires_grad_()
    mine.seen = []
    found = mine(here)
    assert mine.extra is not None
    (found.square().sum() + mine.extra).backward()
    scores: Any = mine.router
    router, extra = scores.weight.grad.clone(), mine.extra.detach().clone()
    dist.all_reduce(router, group=group)
    dist.all_reduce(extra, group=group)
    box = Placement.spread(mixing.num_experts, HIDDEN, ep=group.size()).box("up", group.rank())
    assert whole.grad is not None
    assert alone.experts.up.grad is not None
    pairs: dict[str, tuple[Any, Any]] = {
        "outputs": (found, wanted.split(tokens_of_ranks)[group.rank()]),
        "tokens": (here.grad, whole.grad.split(tokens_of_ranks)[group.rank()]),
        "experts": (mine.experts.up.grad, alone.experts.up.grad[box]),
        "router": (router, alone.router.weight.grad),
        "extra": (extra, alone.extra),
    }
    return {
        name: (one - other).abs().max().item()
        for name, (one, other) in pairs.items()
        if one is not None and one.numel()
    }, mine.seen


@pytest.mark.parametrize(
    ("mixing", "tokens_of_ranks"),
    [
        (Mixing(4, 1, 1.0, 0.1, 0.01), [9, 4]),
        (Mixing(5, 2, 0.6, 0.1, 0.0), [6, 1, 7]),
        (Mixing(2, 2, 0.0, 0.0, 0.1), [3, 3, 3]),
    ],
    ids=["switch", "top_2", "more ranks than experts"],
)
def test_layer_equals_one_process(ranks: Ranks, mixing: Mixing, tokens_of_ranks: list[int]) -> None:
    notes = []
    for differences, seen in ranks(len(tokens_of_ranks), compared, mixing, tokens_of_ranks):
        assert {"outputs", "tokens", "router", "extra"} <= set(differences)
        assert max(differences.values()) < 1e-12, differences
        notes.append(seen)
    assert all(seen == notes[0] for seen in notes)
    ((wanted, admitted, places),) = notes[0]
    assert sum(sum(map(sum, of_rank)) for of_rank in wanted) == sum(tokens_of_ranks) * mixing.top_k
    admitted_rows = [sum(of) for of in zip(*admitted, strict=True)]
    assert max(admitted_rows) <= places
    assert (sum(admitted_rows) < sum(tokens_of_ranks) * mixing.top_k) == (mixing.capacity_factor > 0)


def shape_and_record(group: dist.ProcessGroup) -> tuple[Any, Any]:
    layer = on_ranks(Mixing(2, 1, 0.0, 0.0, 0.0), group)
    return layer(torch.zeros(2, 3, WIDTH, dtype=torch.float64)).shape, layer.seen


def test_routing_is_recorded_only_on_request(ranks: Ranks) -> None:
    assert ranks(1, shape_and_record) == [(torch.Size([2, 3, WIDTH]), None)]
