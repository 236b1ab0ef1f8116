"""Layers that compute themselves again: the same gradients to the bit, and only their inputs kept in between."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from distlab.config import Config
from distlab.measure.activations import SavedActivations
from distlab.testing.warm_ranks import Ranks
from distlab.workload.data import Batches
from distlab.workload.model import Model, build_model, recomputed
from tests.experiments.test_dp import TOLERANCE, config_of, differences

SMALL = {"LAB_WIDTH": "16", "LAB_DEPTH": "5", "LAB_HEADS": "2", "LAB_SEQ": "7", "LAB_BATCH": "5"}


def passed(**settings: str) -> tuple[Model, Tensor, SavedActivations]:
    """A model after forward and backward of one batch, the loss, and what was held for the backward pass."""
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


def test_a_layer_more_costs_its_input_alone() -> None:
    hidden = 5 * 7 * 16 * 4
    deep, deeper = (passed(LAB_RECOMPUTE="1", LAB_DEPTH=depth)[2].peak_bytes for depth in ("5", "6"))
    assert deeper - deep == hidden
    deep, deeper = (passed(LAB_DEPTH=depth)[2].peak_bytes for depth in ("5", "6"))
    assert deeper - deep > 10 * hidden


def test_a_layer_runs_twice_and_stops_at_what_it_saved_last() -> None:
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


def test_nothing_is_left_of_a_pass() -> None:
    layer, hidden = nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.ones(2, 3)
    gone = weakref.ref(hidden)
    recomputed(layer, hidden).sum().backward()
    del hidden
    gc.collect()
    assert gone() is None


def test_every_variant_of_dp_is_proven(ranks: Ranks) -> None:
    for of_rank in ranks(3, differences, config_of(3, LAB_RECOMPUTE="1", LAB_MICROBATCHES="2", LAB_TIE="1")):
        for name, worst in of_rank.items():
            assert max(worst.values()) <= TOLERANCE, (name, worst)
