"""Experts on ranks: placement, the way of rows, routing, and the layer around them, as one process has them."""

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


# Who holds which experts: all of them once a copy, as even as it goes, and each piece where it belongs.


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


# Rows go to the ranks of their experts and come back in their order, in uneven numbers; so do their gradients.


def rows_of(rank: int, number: int) -> torch.Tensor:
    """Rows of two numbers: whose they are, and which."""
    return torch.stack([torch.full((number,), float(rank)), torch.arange(float(number))], 1)


def swapped(group: dist.ProcessGroup, table: list[list[int]]) -> list[list[float]]:
    """What comes to this rank, where rank r sends `table[r][p]` rows to p."""
    rank = group.rank()
    give, take = table[rank], [of_rank[rank] for of_rank in table]
    came: list[list[float]] = AllToAll(group)(rows_of(rank, sum(give)), give, take).tolist()
    return came


@pytest.mark.parametrize(
    "table", [[[1, 2], [0, 3]], [[0, 0], [0, 0]], [[2, 0, 1], [0, 0, 0], [3, 1, 4]]], ids=["two", "none", "three"]
)
def test_rows_arrive_in_rank_order(ranks: Ranks, table: list[list[int]]) -> None:
    for rank, came in enumerate(ranks(len(table), swapped, table)):
        wanted = []
        for source, of_rank in enumerate(table):
            first = sum(of_rank[:rank])
            wanted += [[float(source), float(first + index)] for index in range(of_rank[rank])]
        assert came == wanted


def around(
    group: dist.ProcessGroup, held: list[range], admitted: list[list[int]]
) -> tuple[Any, Any, Any, tuple[list[int], list[int]]]:
    """Experts that multiply by their number and one: what comes back, the gradient of the rows, what was computed."""
    rank, computed = group.rank(), []
    carries = Dispatch(held, range(group.size()), rank, AllToAll(group))
    sorted_rows = rows_of(rank, sum(admitted[rank]))
    rows = sorted_rows[carries.send_order(admitted)].requires_grad_()

    def compute(there: torch.Tensor, counts: list[int]) -> torch.Tensor:
        computed.append(counts)
        factors = torch.tensor([float(expert + 1) for expert in held[rank]])
        return there * factors.repeat_interleave(torch.tensor(counts, dtype=torch.long))[:, None]

    back = carries(rows, admitted, compute)
    back.sum().backward()
    assert rows.grad is not None
    return back.tolist(), rows.grad.tolist(), computed, carries.count_rows(admitted)


ADMITTED = [[2, 0, 1], [1, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "held", [[range(2), range(2, 3), range(3, 3)], [range(1), range(1, 2), range(2, 3)]], ids=["an empty rank", "even"]
)
def test_rows_reach_their_experts_and_return(ranks: Ranks, held: list[range]) -> None:
    for rank, (back, gradient, computed, (give, take)) in enumerate(ranks(3, around, held, ADMITTED)):
        factors = [float(expert + 1) for expert, count in enumerate(ADMITTED[rank]) for _ in range(count)]
        assert back == [[rank * factor, index * factor] for index, factor in enumerate(factors)]
        assert gradient == [[factor, factor] for factor in factors]
        assert computed == [[sum(of_rank[expert] for of_rank in ADMITTED) for expert in held[rank]]]
        assert (sum(give), sum(take)) == (sum(ADMITTED[rank]), sum(computed[0]))


def test_replicated_experts_all_receive_the_rows(ranks: Ranks) -> None:
    """Both hold both experts: each row goes to each, and comes back from each."""
    admitted = [[1, 1], [2, 0]]
    (first, gradient, computed, numbers), _ = ranks(2, around, [range(2), range(2)], admitted)
    assert first == [[0.0, 0.0], [0.0, 2.0]] * 2
    assert gradient == [[1.0, 1.0], [2.0, 2.0]] * 2
    assert computed == [[3, 1]]
    assert numbers == ([2, 2], [2, 2])


# Routing on ranks is that of one process: the same queues, places, balance and gates, however tokens are dealt.


def scores_of(seed: int, tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def queues(experts: Tensor, num_experts: int, places: int) -> dict[int, list[tuple[int, int]]]:
    """Of each expert the (choice, token) that it takes, one after the other: what one process does."""
    taken: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(num_experts)}
    for choice, of_tokens in enumerate(experts.tolist()):
        for token, expert in enumerate(of_tokens):
            if len(taken[expert]) < places:
                taken[expert].append((choice, token))
    return taken


@settings(max_examples=50)
@given(
    st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3),
    st.integers(0, 9),
)  # fmt: skip
def test_capacity_admits_the_tokens_of_one_process(
    seed: int, dealt: list[int], experts: int, top_k: int, places: int
) -> None:  # fmt: skip
    top_k = min(top_k, experts)
    scores = scores_of(seed, sum(dealt), experts)
    wanted = queues(layer.choose(scores, top_k).experts, experts, places)
    of_ranks = [layer.choose(part, top_k) for part in scores.split(dealt)]
    table = torch.stack([each.wanted for each in of_ranks])
    found: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(experts)}
    first = 0
    for rank, choices in enumerate(of_ranks):
        kept = layer.within_capacity(choices.experts, table, rank, places)
        chosen = choices.experts.flatten()[kept]
        assert chosen.tolist() == sorted(chosen.tolist())
        assert chosen.bincount(minlength=experts).tolist() == layer.admitted(table, places)[rank].tolist()
        for number, expert in zip(kept.tolist(), chosen.tolist(), strict=True):
            found[expert].append((number // dealt[rank], first + number % dealt[rank]))
        first += dealt[rank]
    assert {expert: sorted(of) for expert, of in found.items()} == {e: sorted(of) for e, of in wanted.items()}


def test_first_choices_precede_second_choices() -> None:
    """Two ranks, two tokens each: expert 0 is everyone's, first or second."""
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


# The layer around experts on ranks: outputs, gradients and losses of one process's mixture, and what it notes.


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
    held = [placement.experts_of(rank) for rank in range(group.size())]
    carries = Dispatch(held, range(group.size()), group.rank(), AllToAll(group))
    return MixtureOfExperts(layer.router, layer.experts, mixing, group, carries)


def compared(group: dist.ProcessGroup, mixing: Mixing, dealt: list[int]) -> tuple[dict[str, float], list[Routed]]:
    """How far this rank's tokens, their gradients, its experts and its router are from one process's."""
    torch.manual_seed(7)
    tokens = torch.randn(sum(dealt), WIDTH, dtype=torch.float64)
    alone, mine = dense(mixing), on_ranks(mixing, group)
    whole = tokens.clone().requires_grad_()
    wanted = alone(whole)
    assert alone.extra is not None
    (wanted.square().sum() + alone.extra).backward()
    here = tokens.split(dealt)[group.rank()].clone().requires_grad_()
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
        "outputs": (found, wanted.split(dealt)[group.rank()]),
        "tokens": (here.grad, whole.grad.split(dealt)[group.rank()]),
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
    ("mixing", "dealt"),
    [
        (Mixing(4, 1, 1.0, 0.1, 0.01), [9, 4]),
        (Mixing(5, 2, 0.6, 0.1, 0.0), [6, 1, 7]),
        (Mixing(2, 2, 0.0, 0.0, 0.1), [3, 3, 3]),
    ],
    ids=["switch", "top_2", "more ranks than experts"],
)
def test_layer_equals_one_process(ranks: Ranks, mixing: Mixing, dealt: list[int]) -> None:
    notes = []
    for differences, seen in ranks(len(dealt), compared, mixing, dealt):
        assert {"outputs", "tokens", "router", "extra"} <= set(differences)
        assert max(differences.values()) < 1e-12, differences
        notes.append(seen)
    assert all(seen == notes[0] for seen in notes)
    ((wanted, admitted, places),) = notes[0]
    assert sum(sum(map(sum, of_rank)) for of_rank in wanted) == sum(dealt) * mixing.top_k
    taken = [sum(of) for of in zip(*admitted, strict=True)]
    assert max(taken) <= places
    assert (sum(taken) < sum(dealt) * mixing.top_k) == (mixing.capacity_factor > 0)


def unnoted(group: dist.ProcessGroup) -> tuple[Any, Any]:
    layer = on_ranks(Mixing(2, 1, 0.0, 0.0, 0.0), group)
    return layer(torch.zeros(2, 3, WIDTH, dtype=torch.float64)).shape, layer.seen


def test_routing_is_recorded_only_on_request(ranks: Ranks) -> None:
    assert ranks(1, unnoted) == [(torch.Size([2, 3, WIDTH]), None)]
