"""Masks by sample and position: what is dropped, how often, and that no cut of a batch changes it."""

import pytest
import torch
from torch import Tensor

from distlab.config import Config
from distlab.workload.model import Dropouts, build_model, dropping

pytestmark = pytest.mark.timeout(60)

SIZES = {"LAB_WIDTH": "16", "LAB_HEADS": "2", "LAB_DEPTH": "2", "LAB_SEQ": "8"}


def text(samples: int) -> Tensor:
    return torch.randint(256, (samples, 8), generator=torch.Generator().manual_seed(3))


def loss_of(batches: list[Tensor], share: float = 0.3) -> float:
    """The loss of these batches, one after the other, in one model."""
    config = Config.read(SIZES)
    model = dropping(build_model(config, 1).double(), config, share)
    return sum(float(model(batch, batch.roll(-1, 1)).item()) for batch in batches)


def test_a_batch_in_parts_drops_what_it_drops_whole() -> None:
    batch = text(5)
    assert loss_of([batch[:2], batch[2:]]) == pytest.approx(loss_of([batch]), rel=1e-12)
    assert loss_of([batch]) != pytest.approx(loss_of([batch], 0.0), rel=1e-9)


def test_a_share_is_dropped_and_the_sum_stays() -> None:
    mask = Dropouts([], 0.25, 1, (64, 64)).mask("1.mlp", 7)
    assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert mask.mean().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("part", "sample", "seed"), [("2.mlp", 7, 1), ("1.mlp", 8, 1), ("1.mlp", 7, 2)])
def test_another_layer_sample_or_run_draws_anew(part: str, sample: int, seed: int) -> None:
    mask = Dropouts([], 0.5, 1, (8, 8)).mask("1.mlp", 7)
    assert torch.equal(mask, Dropouts([], 0.5, 1, (8, 8)).mask("1.mlp", 7))
    assert not torch.equal(mask, Dropouts([], 0.5, seed, (8, 8)).mask(part, sample))


def test_own_rows_are_rows_of_the_whole_mask() -> None:
    config = Config.read(SIZES)
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
