"""Routing on ranks is that of one process: the same queues, places, balance and gates, however tokens are dealt."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distlab.expert_parallel import layer

pytestmark = pytest.mark.timeout(60)


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


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3),
    st.integers(0, 9),
)  # fmt: skip
def test_ranks_keep_what_one_process_keeps(
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


def test_first_choices_of_all_come_before_second_ones() -> None:
    """Two ranks, two tokens each: expert 0 is everyone's, first or second."""
    table = torch.tensor([[[1, 1], [1, 1]], [[2, 0], [0, 2]]])  # [n, k, E]
    assert layer.queued(table).tolist() == [[[0, 0], [3, 1]], [[1, 1], [4, 2]]]
    assert layer.admitted(table, 3).tolist() == [[1, 2], [2, 1]]


def test_a_single_gate_is_its_probability_and_several_share_one() -> None:
    scores = scores_of(1, 7, 4)
    one, two = layer.choose(scores, 1), layer.choose(scores, 2)
    assert torch.equal(one.gates[0], scores.softmax(-1).max(-1).values)
    assert torch.allclose(two.gates.sum(0), torch.ones(7, dtype=torch.float64))
    assert torch.equal(one.experts[0], two.experts[0])
    assert one.wanted.sum() == 7


def test_a_bias_moves_the_choice_and_no_gate() -> None:
    scores, bias = scores_of(2, 9, 3), torch.tensor([0.0, 9.0, 0.0], dtype=torch.float64)
    choices = layer.choose(scores, 1, bias)
    assert choices.experts.unique().tolist() == [1]
    assert torch.equal(choices.gates[0], scores.softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "places"),
    [(1024, 2, 8, 1.25, 320), (37, 1, 5, 1.0, 8), (3, 1, 8, 0.5, 1), (11, 2, 4, 0.0, 11)],
)
def test_places_are_those_of_gshard(tokens: int, top_k: int, experts: int, factor: float, places: int) -> None:
    assert layer.capacity(tokens, top_k, experts, factor) == places


def test_parts_of_the_balance_loss_add_up_to_that_of_the_batch() -> None:
    scores, experts = scores_of(3, 12, 4), 4
    whole = layer.choose(scores, 2)
    share, mean = whole.wanted.sum(0).double() / 24, whole.probabilities.mean(0)
    of_ranks = [layer.choose(part, 2) for part in scores.split([7, 0, 5])]
    table = torch.stack([each.wanted for each in of_ranks])
    parts = sum(layer.balance_loss(each.probabilities, table) for each in of_ranks)
    assert float(parts) == pytest.approx(12 * experts * float((share * mean).sum()), rel=1e-14)


def test_an_even_batch_has_a_balance_loss_of_one_a_token() -> None:
    probabilities = torch.full((8, 4), 0.25)
    assert float(layer.balance_loss(probabilities, torch.full((1, 1, 4), 2))) == pytest.approx(8)


def test_z_loss_is_of_the_whole_sum() -> None:
    assert float(layer.z_loss(torch.zeros(3, 8))) == pytest.approx(3 * math.log(8) ** 2)


def test_a_bias_goes_down_where_an_expert_is_wanted_too_often() -> None:
    table = torch.tensor([[[5, 1, 0]], [[3, 1, 2]]])  # 8, 2, 2 of 12: the mean is 4
    assert layer.moved_bias(torch.zeros(3), table, 0.5).tolist() == [-0.5, 0.5, 0.5]
    assert layer.moved_bias(torch.ones(3), torch.full((1, 1, 3), 7), 0.5).tolist() == [1, 1, 1]


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5], [1, 1, 3]])
def test_each_expert_computes_its_own_rows(counts: list[int]) -> None:
    rows, up, down = torch.randn(5, 3), torch.randn(3, 3, 4), torch.randn(3, 4, 3)
    expert_of = torch.arange(3).repeat_interleave(torch.tensor(counts))
    wanted = [torch.nn.functional.gelu(row @ up[e]) @ down[e] for row, e in zip(rows, expert_of, strict=True)]
    assert torch.allclose(layer.grouped(rows, counts, up, down), torch.stack(wanted), atol=1e-6)


def test_a_rank_without_experts_computes_nothing() -> None:
    assert layer.grouped(torch.zeros(0, 3), [], torch.zeros(0, 3, 4), torch.zeros(0, 4, 3)).shape == (0, 3)
