"""Models: the same numbers everywhere, sums as losses, and the handles that strategies hold them by."""

import math

import pytest
import torch

from distlab.config import Config
from distlab.workload import model as models
from distlab.workload.data import Batches
from distlab.workload.model import build_model, outline

SIZES = {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "6", "LAB_BATCH": "4"}


def config_of(**settings: str) -> Config:
    return Config.read(SIZES | settings)


@pytest.mark.parametrize("name", ["gpt", "mlp", "line"])
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    config = config_of(LAB_MODEL=name)
    first = build_model(config, 3)
    torch.rand(7)
    again = build_model(config, 3)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    if name != "line":  # begins at zero, as in its lesson
        assert any(
            not torch.equal(one, other)
            for one, other in zip(first.parameters(), build_model(config, 4).parameters(), strict=True)
        )


def test_float64_begins_with_the_same_numbers() -> None:
    config = config_of()
    drawn_late = build_model(config, 9).double()
    drawn_late.initialise(3)
    for one, other in zip(build_model(config, 3).double().parameters(), drawn_late.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["gpt", "mlp", "line"])
def test_the_loss_is_a_sum_so_that_parts_add_up(name: str) -> None:
    config = config_of(LAB_MODEL=name)
    model = build_model(config, 1).double()
    inputs, targets, _ = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64).full(0)
    whole = model(inputs, targets)
    parts = model(inputs[:1], targets[:1]) + model(inputs[1:], targets[1:])
    assert whole.shape == ()
    assert abs(whole.item() - parts.item()) <= 1e-12 * whole.item()


def test_gpt_may_be_told_where_its_bytes_stand_and_how_they_look_at_each_other() -> None:
    model = build_model(config_of(), 1).double()
    tokens, order = torch.arange(6)[None], torch.tensor([4, 0, 5, 1, 3, 2])
    hidden = model.layers[0](tokens)
    first, attention = model.layers[0], model.layers[1].get_submodule("attention")
    assert isinstance(first, models.Embedding) and isinstance(attention, models.Attention)
    wanted = attention(hidden)
    first.positions = order
    assert torch.equal(first(tokens[:, order]), hidden[:, order])
    seen = order[:, None] >= order
    attention.attend = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert torch.allclose(attention(hidden[:, order]), wanted[:, order], atol=1e-14)


def test_gpt_sees_no_later_byte() -> None:
    model = build_model(config_of(), 1)
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 99
    hidden = []
    for row in (tokens, changed):
        for layer in model.layers:
            row = layer(row)
        hidden.append(row)
    assert torch.equal(hidden[0][:, :4], hidden[1][:, :4])
    assert not torch.equal(hidden[0][:, 4:], hidden[1][:, 4:])


def test_attention_counts_the_heads_that_its_projections_hold() -> None:
    """Two halves of the heads, each with its columns of o, add up to the whole: tensor parallelism's cut."""
    whole = models.Attention(16, 4).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = torch.zeros_like(x)
    for half in (slice(0, 8), slice(8, 16)):
        part = models.Attention(16, 4).double()
        for name in ("q", "k", "v"):
            source = getattr(whole, name)
            getattr(part, name).weight = torch.nn.Parameter(source.weight[half].detach())
            getattr(part, name).bias = torch.nn.Parameter(source.bias[half].detach())
        part.o.weight = torch.nn.Parameter(whole.o.weight[:, half].detach())
        part.o.bias = torch.nn.Parameter(whole.o.bias.detach() / 2)
        total += part(x)
    assert (total - whole(x)).abs().max() <= 1e-12


def test_tied_weights_are_one_and_learn_from_both_ends() -> None:
    model = build_model(config_of(LAB_TIE="1"), 1)
    for tied in (model, model.double()):
        first, last = tied.layers[0], tied.layers[-1]
        assert isinstance(first, models.Embedding)
        assert isinstance(last, models.Head)
        assert first.token.weight is last.project.weight
    untied = build_model(config_of(), 1)
    assert untied.num_parameters() - model.num_parameters() == 256 * 16
    assert outline(config_of(LAB_TIE="1")).num_parameters() == model.num_parameters()


def test_the_loss_can_be_replaced() -> None:
    model = build_model(config_of(), 1)
    model.loss = torch.nn.Module()
    model.loss.forward = lambda scores, targets: scores.sum() * 0 + targets.numel()
    assert model(torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)).item() == 12


def test_16_bit_scores_are_summed_in_float32() -> None:
    scores = torch.zeros(300, 256, dtype=torch.bfloat16)
    loss = models.CrossEntropy()(scores, torch.zeros(300, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(300 * math.log(256), rel=1e-6)


def test_default_sizes_and_description() -> None:
    assert build_model(Config.read({}), 1).describe() == "gpt, 1.7M parameters"
    assert build_model(config_of(LAB_MODEL="line"), 1).describe() == "line, 2 parameters"


def test_width_that_heads_cannot_share_is_refused() -> None:
    assert models.refusals(config_of(LAB_HEADS="5")) == [
        "LAB_WIDTH=16 is not a multiple of LAB_HEADS=5: heads share the width equally"
    ]
    assert models.refusals(config_of(LAB_HEADS="5", LAB_MODEL="mlp")) == []
