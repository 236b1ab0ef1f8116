"""The reference process: its snapshots equal torch's own arithmetic."""

import pytest
import torch

from distlab.lab.config import Config
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import Losses, Snapshot, divided, losses, move_by_a_unit, train

LINE = {"LAB_MODEL": "line"}


def snapshots(steps: int, **settings: str) -> tuple[list[Snapshot], Microbatch, Config]:
    config = Config.read(LINE | settings)
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
    return list(train(build_model(config, 1).double(), batches, config, steps)), batches.full(0), config


def test_sgd_equals_the_lessons_formulas() -> None:
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


def test_snapshots_have_clipped_gradients() -> None:
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


def kept(
    dtype: torch.dtype = torch.float64, *, masters: bool = False, parts: int = 1, lr: str = "", **settings: str
) -> Losses:
    config = Config.read(LINE | {"LAB_BATCH": "7", "LAB_LR": lr} | settings)
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=dtype)
    return losses(build_model(config, 1).to(dtype), batches, config, 5, masters=masters, parts=parts)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_long_training_keeps_losses_and_first_gradients(optimizer: str) -> None:
    settings = {"LAB_BATCH": "7", "LAB_OPTIMIZER": optimizer, "LAB_CLIP": "0.5"}
    seen, _, _ = snapshots(5, **settings)
    long = kept(LAB_OPTIMIZER=optimizer, LAB_CLIP="0.5")
    assert long.values == [snapshot.loss for snapshot in seen]
    assert all(torch.equal(long.first[name], gradient) for name, gradient in seen[0].gradients.items())


def test_a_batch_in_parts_is_equal_up_to_rounding() -> None:
    config = Config.read(LINE | {"LAB_BATCH": "7"})
    whole = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64).full(0)
    assert [len(part.inputs) for part in divided(whole, 3)] == [3, 2, 2]
    assert len(divided(whole, 99)) == 7
    assert kept(parts=3).values == pytest.approx(kept().values, abs=1e-14)


def test_masters_add_up_what_16_bits_round_away() -> None:
    """Updates of 1e-4 of a weight are rounded away in bf16, but add up in its masters."""
    exact = kept(torch.float32, lr="1e-4")
    lost, added = (kept(torch.bfloat16, masters=masters, lr="1e-4") for masters in (False, True))
    assert lost.values != added.values
    assert added.values == pytest.approx(exact.values, rel=0.02)


def test_a_perturbed_model_differs_by_one_unit_in_the_last_place() -> None:
    model = build_model(Config.read({"LAB_MODEL": "mlp", "LAB_WIDTH": "8", "LAB_DEPTH": "1"}), 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    move_by_a_unit(model, 3)
    for old, new in zip(before, model.parameters(), strict=True):
        apart = (new.detach().double() - old.double()).abs() / old.double().abs().clamp(min=1e-30)
        assert ((apart > 0) == (old != 0)).all()
        assert apart.max() <= 2 * torch.finfo(torch.float32).eps  # the sum is rounded, too
