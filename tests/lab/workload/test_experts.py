"""The reference mixture of experts: computed by hand on small numbers, and its auxiliary losses."""

import math

import pytest
import torch
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.experts import Mixing, Mixture, MixtureModel, build_mixture, outline_mixture
from distlab.lab.workload.reference import backward, losses, move_by_a_unit

pytestmark = pytest.mark.timeout(60)
SMALL = {"LAB_WIDTH": "8", "LAB_HEADS": "2", "LAB_SEQ": "4", "LAB_DEPTH": "2", "LAB_BATCH": "6"}


def mixing(
    num_experts: int = 2, top_k: int = 1, factor: float = 0.0, balance: float = 0.0, z: float = 0.0
) -> Mixing:  # fmt: skip
    return Mixing(num_experts, top_k, factor, balance, z)


def mixture(wanted: list[int], mixed: Mixing) -> tuple[Mixture, torch.Tensor]:
    """Return a mixture of width 2 and hidden 1 that sends token t to expert `wanted[t]`, and the tokens."""
    layer = Mixture(2, 1, mixed).double()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2))
        layer.experts.up.copy_(torch.ones(2, 2, 1))
        layer.experts.down.copy_(torch.tensor([[[1.0, 1.0]], [[10.0, 10.0]]]))
    return layer, torch.eye(2, dtype=torch.float64)[torch.tensor(wanted)]


def test_with_one_choice_an_expert_is_weighted_by_its_probability() -> None:
    layer, tokens = mixture([0, 1], mixing())
    gate, made = math.e / (math.e + 1), F.gelu(torch.ones(1)).item()
    assert layer(tokens)[:, 0].tolist() == pytest.approx([gate * made, 10 * gate * made], rel=1e-6)


def test_two_choices_share_one() -> None:
    layer, tokens = mixture([0], mixing(top_k=2))
    gate, made = math.e / (math.e + 1), F.gelu(torch.ones(1)).item()
    assert layer(tokens)[0, 0].item() == pytest.approx((gate + 10 * (1 - gate)) * made, rel=1e-6)


@pytest.mark.parametrize(("factor", "kept"), [(0.0, 5), (1.0, 3), (0.5, 2), (0.4, 1)])
def test_the_last_tokens_of_a_full_expert_are_dropped(factor: float, kept: int) -> None:
    """Five of five tokens want expert 0, which has ceil(factor·5/2) places."""
    layer, tokens = mixture([0] * 5, mixing(factor=factor))
    assert (layer(tokens)[:, 0] != 0).tolist() == [token < kept for token in range(5)]


def test_second_choices_come_after_all_first_ones() -> None:
    """Tokens want 0, 0, 1 first and the other one second; of 3 places each expert has one for a second choice."""
    layer, tokens = mixture([0, 0, 1], mixing(top_k=2, factor=1.0))
    chosen = layer._preferred(layer.router(tokens).softmax(-1))
    assert layer._queues(chosen) == [[(0, 0), (1, 0), (2, 1)], [(2, 0), (0, 1), (1, 1)]]
    layer.mixing = mixing(top_k=2, factor=0.6)  # two places
    assert layer._queues(chosen) == [[(0, 0), (1, 0)], [(2, 0), (0, 1)]]


def test_the_auxiliary_losses_equal_the_papers() -> None:
    layer, tokens = mixture([0, 0, 0, 1], mixing(balance=0.5, z=0.25))
    layer(tokens)
    high = math.e / (math.e + 1)
    mean = [(3 * high + 1 - high) / 4, (3 * (1 - high) + high) / 4]
    balance = 2 * (0.75 * mean[0] + 0.25 * mean[1])
    assert layer.extra is not None
    assert layer.extra.item() == pytest.approx(4 * (0.5 * balance + 0.25 * math.log(math.e + 1) ** 2), rel=1e-12)


def model_of(mixed: Mixing, **settings: str) -> tuple[MixtureModel, Batches, Config]:
    config = Config.read(SMALL | settings)
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
    model = build_mixture(config, 1, mixed)
    model.double()
    return model, batches, config


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_models_loss_includes_the_means_of_its_mixtures(name: str) -> None:
    mixed = mixing(num_experts=4, top_k=2, z=1.0)
    model, batches, config = model_of(mixed, LAB_MODEL=name)
    plain, _, _ = model_of(mixing(num_experts=4, top_k=2), LAB_MODEL=name)
    squares: list[float] = []
    for mixture in model.mixtures.values():
        mixture.router.register_forward_hook(
            lambda _, __, scores: squares.append(scores.logsumexp(-1).square().mean().item())
        )
    off = backward(model, [batches.full(0)], config.clip)[0] - backward(plain, [batches.full(0)], config.clip)[0]
    assert len(squares) == 2
    assert off == pytest.approx(sum(squares), rel=1e-9)
    assert all(mixture.extra is None for mixture in model.mixtures.values())


def test_weights_are_drawn_by_the_seed_and_an_outline_has_none() -> None:
    one, _, config = model_of(mixing(num_experts=3))
    other = build_mixture(config, 1, mixing(num_experts=3)).double()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    outline = outline_mixture(config, mixing(num_experts=3))
    assert outline.num_parameters() == one.num_parameters()
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}


def test_a_batch_of_a_mixture_is_not_divided_for_the_perturbed_model() -> None:
    mixed = mixing(num_experts=4, top_k=2, factor=1.0, balance=0.1)
    config, values = model_of(mixed)[2], []
    for parts in (1, 3):
        model, batches, _ = model_of(mixed)
        values.append(losses(model, batches, config, 2, parts=parts).values)
    assert values[0] == values[1]


def test_a_perturbed_model_chooses_the_other_of_two_nearly_equal_experts() -> None:
    model, batches, config = model_of(mixing(num_experts=2))
    model.float()
    first = model.mixtures["layers.1.mlp"]
    with torch.no_grad():
        first.router.weight[1] = first.router.weight[0] * (1 + 1e-6)
    twin = build_mixture(config, 1, mixing(num_experts=2))
    twin.load_state_dict(model.state_dict())
    move_by_a_unit(twin, 1)
    chosen = []
    for each in (model, twin):
        layer = each.mixtures["layers.1.mlp"]
        layer.router.register_forward_hook(
            lambda _, __, scores, layer=layer: chosen.append(layer._preferred(scores.softmax(-1)))
        )
        inputs, targets, share = batches.full(0)
        backward(each, [Microbatch(inputs, targets, share)], config.clip)
    assert not torch.equal(*chosen)
