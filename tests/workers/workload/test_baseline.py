"""One process: what it yields is what a step left behind, by torch's own arithmetic."""

import pytest
import torch

from workers.config import Config
from workers.workload.baseline import Snapshot, train
from workers.workload.data import Batches, Microbatch
from workers.workload.model import build_model

LINE = {"LAB_MODEL": "line"}


def snapshots(steps: int, **settings: str) -> tuple[list[Snapshot], Microbatch, Config]:
    config = Config.read(LINE | settings)
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
    return list(train(build_model(config, 1).double(), batches, config, steps)), batches.full(0), config


def test_sgd_by_the_lessons_own_formulas() -> None:
    seen, (x, y, _), config = snapshots(3)
    w = b = 0.0
    for snapshot in seen:
        error = w * x + b - y
        assert snapshot.loss == pytest.approx(error.square().mean().item(), abs=1e-14)
        grad_w, grad_b = (2 * error * x).mean().item(), (2 * error).mean().item()
        assert snapshot.gradients["layers.0.weight"].item() == pytest.approx(grad_w, abs=1e-14)
        w, b = w - config.learning_rate * grad_w, b - config.learning_rate * grad_b
        assert [value.item() for value in snapshot.weights.values()] == pytest.approx([w, b], abs=1e-14)
        assert snapshot.optimizer == {}


def test_gradients_are_shown_as_clipped() -> None:
    seen, _, _ = snapshots(1, LAB_CLIP="0.5")
    norm = torch.cat([gradient.flatten() for gradient in seen[0].gradients.values()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


def test_adamw_state_has_dense_names() -> None:
    seen, _, config = snapshots(2, LAB_OPTIMIZER="adamw")
    assert {"exp_avg.layers.0.weight", "exp_avg_sq.layers.0.bias", "step.layers.0.bias"} <= set(seen[0].optimizer)
    assert config.learning_rate == 0.001
    first = seen[0].gradients["layers.0.bias"]
    assert torch.allclose(seen[0].optimizer["exp_avg.layers.0.bias"], 0.1 * first)  # (1 - beta1) g


def test_snapshots_are_copies() -> None:
    seen, _, _ = snapshots(2)
    assert not torch.equal(seen[0].weights["layers.0.weight"], seen[1].weights["layers.0.weight"])
