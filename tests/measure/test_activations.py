"""The bytes held for the backward pass: exact for a model small enough to count by hand."""

import pytest
import torch
from torch import nn

from distlab.measure.activations import SavedActivations

pytestmark = pytest.mark.timeout(60)

ROWS, WIDTH = 5, 7
ONE = ROWS * WIDTH * 4  # bytes of one activation in float32


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))


def test_a_forward_pass_holds_inputs_and_outputs_but_no_weights() -> None:
    layers, inputs = model(), torch.randn(ROWS, WIDTH)
    with SavedActivations() as saved:
        out = layers(inputs)
        assert saved.live_bytes == 2 * ONE  # the first input; what sigmoid returned, which the last layer saves too
        out.sum().backward()
        assert saved.live_bytes == 0
    assert saved.peak_bytes == 2 * ONE


def test_two_passes_in_flight_hold_twice_as_much() -> None:
    layers = model()
    with SavedActivations() as saved:
        outputs = [layers(torch.randn(ROWS, WIDTH)) for _ in range(2)]
        for out in outputs:
            out.sum().backward()
            del out
    assert saved.peak_bytes == 4 * ONE


def test_a_forward_pass_outside_of_the_block_counts_nothing() -> None:
    layers = model()
    with SavedActivations() as saved:
        pass
    layers(torch.randn(ROWS, WIDTH)).sum().backward()
    assert saved.peak_bytes == 0
