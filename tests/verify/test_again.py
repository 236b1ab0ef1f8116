"""How often layers are passed, and what of them is alive in between."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.config import Config
from distlab.verify.repeated import Alive, Passes, check_passes
from distlab.workload.model import Model, build_model

DEPTH = 3


def passed(name: str, *, recompute: bool) -> tuple[Passes, Model, torch.Tensor]:
    """A model whose layers were run forward and back twice."""
    settings = {"RUN_MODE": "dp", "LAB_MODEL": name, "LAB_DEPTH": str(DEPTH), "LAB_WIDTH": "8", "LAB_SEQ": "4"}
    model = build_model(Config.read(settings), 1)
    model.recompute = recompute
    inputs = torch.ones(2, 4).long() if name == "gpt" else torch.ones(2, 8)
    passes = Passes(dict(enumerate(model.layers)))
    with passes.watched():
        for _ in range(2):
            model(inputs, inputs).backward()
    return passes, model, inputs


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_layer_that_is_computed_again_is_passed_twice(name: str) -> None:
    passes, *_ = passed(name, recompute=True)
    assert passes.first == passes.again
    assert passes.first.total() == 2 * (DEPTH + (name == "gpt"))  # an embedding does not count
    assert passes.missing() == 0


def test_a_layer_that_is_not_computed_again_is_seen() -> None:
    passes, *_ = passed("mlp", recompute=False)
    said: list[Any] = []
    lab: Any = SimpleNamespace(check=lambda name, off, tolerance, **_: said.append((name, off, tolerance)))
    check_passes(lab, "flat", passes)
    assert said == [("computed again", 2 * DEPTH, 0)]


@pytest.mark.parametrize(("recompute", "enough"), [(True, True), (False, False)])
def test_what_is_alive_between_two_passes(recompute: bool, enough: bool) -> None:
    _, model, inputs = passed("mlp", recompute=True)
    model.zero_grad()
    kept: list[Any] = []
    if not recompute:  # as if all that a layer saves stayed
        for layer in model.layers:
            layer.register_forward_hook(lambda _, given, out: kept.append([given[0] * each for each in range(8)]))
    seen = Alive(list(model.layers), torch.device("cpu"))
    with seen.storages:
        seen.begin(inputs)
        model(inputs, inputs).backward()
    assert (seen.worst <= 4) == enough
