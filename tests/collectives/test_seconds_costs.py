"""The estimate of a step, by hand."""

import pytest

from distlab.collectives.costs import (
    all_reduce_bytes,
    all_reduce_rounds,
    all_reduce_seconds,
    attention_flops,
    exposed_seconds,
    message_seconds,
    step_seconds,
    training_flops,
)


def test_gpt3_took_as_many_operations_as_its_paper_says() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 for 174.6 billion parameters and 300 billion tokens, at 6 a parameter and
    token."""
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=1e-3)
    # Narayanan et al. 2021, section 5.1: recomputed, at 140 TFLOP/s on each of 1024 GPUs, 34 days.
    assert round(training_flops(175e9, 300e9, "full") / (1024 * 140e12) / 86400) == 34
    assert training_flops(1, 1, "full") / training_flops(1, 1, "selective") == 8 / 6


def test_attention_is_half_of_what_it_is_without_a_mask() -> None:
    """Narayanan et al. 2021, appendix: 96·B·s·L·h²(1 + s/6h + V/16Lh) with recomputation, of which s/6h is
    attention's."""
    layers, width, seq = 96, 12288, 2048
    whole = 96 * seq * layers * width**2 * seq / (6 * width)
    assert attention_flops(layers, width, seq, seq, "full") == pytest.approx(whole / 2)
    assert attention_flops(1, 1, 1, 1) == 6


def test_a_message_is_what_the_collectives_say() -> None:
    ours = message_seconds(all_reduce_rounds("ring", 4), all_reduce_bytes("ring", 4, 4096), 1e-5, 1e9)
    assert ours == pytest.approx(all_reduce_seconds("ring", 4, 4096, 1e-5, 1e9), rel=1e-12)


def test_what_is_hidden_costs_nothing_and_a_bubble_stretches() -> None:
    assert exposed_seconds(3.0, 2.0) == 1.0
    assert exposed_seconds(2.0, 3.0) == 0.0
    assert step_seconds(6.0, 0.25, 1.0) == 9.0
