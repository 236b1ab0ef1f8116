"""Activations of a transformer's layer, against what the paper printed and against what the lab's own gpt keeps."""

from typing import Any

import pytest
import torch

from distlab.config import Config
from distlab.measure.activations import SavedActivations
from distlab.tensor_parallel.costs import layer_activation_bytes, stage_activation_bytes
from distlab.workload.data import Batches
from distlab.workload.model import build_model

GPT3: Any = {"seq": 2048, "samples": 1, "width": 12288, "heads": 96}
MT_NLG: Any = {"seq": 2048, "samples": 1, "width": 20480, "heads": 128}


@pytest.mark.parametrize(("model", "scores", "saved"), [(GPT3, 80, 0.70), (MT_NLG, 64, 0.65)])
def test_the_papers_two_models(model: Any, scores: int, saved: float) -> None:
    """Korthikanti et al. 2022, section 5: 5as/h is 80 and 64, and leaving the scores out saves 70 % and 65 %."""
    unit = model["seq"] * model["samples"] * model["width"]
    whole, selective = (layer_activation_bytes(**model, recompute=how) for how in ("none", "selective"))
    assert whole / unit == 34 + scores
    assert selective / unit == 34
    assert round(1 - selective / whole, 2) == saved
    assert layer_activation_bytes(**model, recompute="full") / unit == 2


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_tensor_and_sequence_parallelism(ranks: int) -> None:
    unit = 2048 * 12288
    tensor = layer_activation_bytes(**GPT3, tensor_ranks=ranks) / unit
    sequence = layer_activation_bytes(**GPT3, tensor_ranks=ranks, sequence_parallel=True) / unit
    assert tensor == pytest.approx(10 + 24 / ranks + 80 / ranks, rel=1e-12)
    assert sequence == pytest.approx((34 + 80) / ranks, rel=1e-12)


def test_numbers_of_four_bytes_beside_masks_of_one() -> None:
    unit = 2048 * 12288
    assert layer_activation_bytes(**GPT3, itemsize=4) / unit == 66 + 9 * 16


def test_a_stage_holds_a_layer_for_each_microbatch_in_flight_and_one_more_that_is_recomputed() -> None:
    assert stage_activation_bytes(10.0, 4, 3) == 120
    assert stage_activation_bytes(2.0, 4, 3, 100.0) == 124


def kept_by_a_layer(width: int, heads: int) -> int:
    """What one more layer of the lab's gpt leaves for the backward pass: 4 samples of 32 bytes, in float32."""
    sizes = {"LAB_WIDTH": str(width), "LAB_HEADS": str(heads), "LAB_SEQ": "32", "LAB_BATCH": "4", "WORLD_SIZE": "1"}
    kept = []
    for depth in (2, 3):
        config = Config.read(sizes | {"RUN_MODE": "dp", "LAB_DEPTH": str(depth)})
        inputs, targets, _ = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32).dealt(
            0, 0, 1
        )[0]
        model = build_model(config, seed=1)
        with SavedActivations() as saved:
            model(inputs, targets)
        kept.append(saved.peak_bytes)
    return kept[1] - kept[0]


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (128, 8)])
def test_the_labs_own_layer_keeps_what_the_formula_says(width: int, heads: int) -> None:
    """Less dropout's two masks, which it lacks; and two numbers a norm and position, and one of the softmax a head and
    position."""
    tokens = 4 * 32
    formula = layer_activation_bytes(32, 4, width, heads, itemsize=4, recompute="selective")
    assert kept_by_a_layer(width, heads) == formula - 2 * tokens * width + tokens * 4 * (2 * 2 + heads)
