"""Models: equal weights in every process, summed losses, and the parts that strategies replace."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.workload import model as models
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import Dropouts, Model, build_model, dropping, outline, recomputed
from distlab.lab.workload.user_model import SummedLoss
from tests.experiments.test_dp import config_of as dp_config
from tests.trained import TOLERANCE, differences
from tests.warm_ranks import Ranks

SIZES = {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "6", "LAB_BATCH": "4"}


def config_of(**settings: str) -> Config:
    return Config.read(SIZES | settings)


@pytest.mark.parametrize("name", ["gpt", "mlp", "line"])
def test_weights_depend_only_on_the_seed(name: str) -> None:
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


def test_gpt_accepts_positions_and_another_attention() -> None:
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


def test_attention_infers_its_heads_from_the_projections() -> None:
    """Two halves of the heads, each with its columns of o, add up to the whole, as in tensor parallelism."""
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


def test_tied_weights_get_gradients_from_both_ends() -> None:
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
    loss = SummedLoss()(scores, torch.zeros(300, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(300 * math.log(256), rel=1e-6)


def test_default_sizes_and_description() -> None:
    assert build_model(Config.read({"RUN_MODE": "fsdp"}), 1).describe() == "gpt, 1.7M parameters"
    assert build_model(config_of(LAB_MODEL="line"), 1).describe() == "line, 2 parameters"


def test_a_width_that_is_no_multiple_of_the_heads_is_refused() -> None:
    assert models.refusals(config_of(LAB_HEADS="5")) == [
        "LAB_WIDTH=16 is not a multiple of LAB_HEADS=5: heads share the width equally"
    ]
    assert models.refusals(config_of(LAB_HEADS="5", LAB_MODEL="mlp")) == []


# Masks by sample and position: what is dropped, how often, and that no cut of a batch changes it.

pytestmark = pytest.mark.timeout(60)

DROPPING = {"LAB_WIDTH": "16", "LAB_HEADS": "2", "LAB_DEPTH": "2", "LAB_SEQ": "8"}


def text(samples: int) -> Tensor:
    return torch.randint(256, (samples, 8), generator=torch.Generator().manual_seed(3))


def loss_of(batches: list[Tensor], share: float = 0.3) -> float:
    """Return the loss of these batches, one after the other, in one model."""
    config = Config.read(DROPPING)
    model = dropping(build_model(config, 1).double(), config, share)
    return sum(float(model(batch, batch.roll(-1, 1)).item()) for batch in batches)


def test_a_batch_in_parts_drops_the_same_numbers() -> None:
    batch = text(5)
    assert loss_of([batch[:2], batch[2:]]) == pytest.approx(loss_of([batch]), rel=1e-12)
    assert loss_of([batch]) != pytest.approx(loss_of([batch], 0.0), rel=1e-9)


def test_dropout_keeps_the_expected_sum() -> None:
    mask = Dropouts([], 0.25, 1, (64, 64)).mask("1.mlp", 7)
    assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert mask.mean().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("part", "sample", "seed"), [("2.mlp", 7, 1), ("1.mlp", 8, 1), ("1.mlp", 7, 2)])
def test_masks_depend_on_layer_sample_and_run(part: str, sample: int, seed: int) -> None:
    mask = Dropouts([], 0.5, 1, (8, 8)).mask("1.mlp", 7)
    assert torch.equal(mask, Dropouts([], 0.5, 1, (8, 8)).mask("1.mlp", 7))
    assert not torch.equal(mask, Dropouts([], 0.5, seed, (8, 8)).mask(part, sample))


def test_own_rows_are_rows_of_the_whole_mask() -> None:
    config = Config.read(DROPPING)
    layer = build_model(config, 1).layers[1]
    dropouts = Dropouts([layer], 0.5, 1, (8, 16))
    dropouts.samples, hidden = [7, 9], torch.ones(2, 8, 16)
    whole = dropouts._drop("0.mlp", layer, (), hidden)
    dropouts.rows = torch.tensor([1, 6])
    own = dropouts._drop("0.mlp", layer, (), hidden[:, :2])
    assert torch.equal(own, whole[:, [1, 6]])
    dropouts.rows_first = True
    assert torch.equal(dropouts._drop("0.mlp", layer, (), hidden[:, :2].transpose(0, 1)), own.transpose(0, 1))
    dropouts.samples = []
    assert torch.equal(dropouts._drop("0.mlp", layer, (), hidden), hidden)


# Layers that compute themselves again: the same gradients to the bit, and only their inputs kept in between.

SMALL = {"LAB_WIDTH": "16", "LAB_DEPTH": "5", "LAB_HEADS": "2", "LAB_SEQ": "7", "LAB_BATCH": "5"}


def passed(**settings: str) -> tuple[Model, Tensor, SavedActivations]:
    """Return a model after forward and backward of one batch, its loss, and the bytes kept for the backward pass."""
    config = Config.read(SMALL | settings)
    model = build_model(config, 1)
    inputs, targets, _ = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32).full(0)
    with SavedActivations() as saved:
        loss = model(inputs, targets)
        loss.backward()
    return model, loss, saved


@pytest.mark.parametrize("settings", [{}, {"LAB_TIE": "1"}, {"LAB_MODEL": "mlp"}, {"LAB_MODEL": "line"}])
def test_gradients_are_the_same_to_the_bit(settings: dict[str, str]) -> None:
    kept, loss, _ = passed(**settings)
    again, same_loss, saved = passed(LAB_RECOMPUTE="1", **settings)
    assert torch.equal(loss, same_loss)
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert saved.live_bytes == 0


def test_one_more_layer_keeps_only_its_input() -> None:
    hidden = 5 * 7 * 16 * 4
    deep, deeper = (passed(LAB_RECOMPUTE="1", LAB_DEPTH=depth)[2].peak_bytes for depth in ("5", "6"))
    assert deeper - deep == hidden
    deep, deeper = (passed(LAB_DEPTH=depth)[2].peak_bytes for depth in ("5", "6"))
    assert deeper - deep > 10 * hidden


def test_a_layer_runs_twice_and_stops_at_its_last_saved_tensor() -> None:
    runs: list[str] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, hidden: Tensor) -> Tensor:
            runs.append("begins")
            hidden = self.inner(hidden).exp()  # saves what it returns
            runs.append("ends")
            return hidden + 1  # saves nothing

    layer, hidden = Noting(), torch.ones(2, 3, requires_grad=True)
    out = recomputed(layer, hidden)
    assert runs == ["begins", "ends"]
    out.sum().backward()
    assert runs == ["begins", "ends", "begins"]


def test_a_pass_leaves_nothing_in_memory() -> None:
    layer, hidden = nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.ones(2, 3)
    gone = weakref.ref(hidden)
    recomputed(layer, hidden).sum().backward()
    del hidden
    gc.collect()
    assert gone() is None


def test_every_variant_of_dp_is_proven(ranks: Ranks) -> None:
    for of_rank in ranks(3, differences, dp_config(3, LAB_RECOMPUTE="1", LAB_MICROBATCHES="2", LAB_TIE="1")):
        for name, worst in of_rank.items():
            assert max(worst.values()) <= TOLERANCE, (name, worst)
