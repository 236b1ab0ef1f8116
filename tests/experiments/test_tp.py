"""Tensor parallelism: its formulas, the size of slices, and the error of one bug."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.tp import MODE, compare_saved
from distlab.experiments.tp.predictions import SAVED
from distlab.lab.config import Config
from distlab.lab.measure.prediction import Prediction
from distlab.lab.workload.model import outline
from tests.experiments.test_proofs import SMALL
from tests.lab.test_lab import held, lab_alone
from tests.trained import microbatches_of, strategy_of
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL["tp"] | {"RUN_MODE": "tp", "WORLD_SIZE": str(world_size)} | settings)


def test_double_reduce_multiplies_gradients_by_the_number_of_ranks(ranks: Ranks) -> None:
    config = config_of(2, LAB_BUG="double_reduce", LAB_MODEL="mlp", LAB_DEPTH="1")
    wrong, right = (ranks(2, gradient_of_up, config.model_copy(update={"bug": bug}))[0] for bug in (config.bug, None))
    assert torch.allclose(wrong, 2 * right, rtol=1e-12)


def gradient_of_up(group: dist.ProcessGroup, config: Config) -> Tensor:
    strategy = strategy_of("megatron", group, config)
    strategy.backward(microbatches_of(config, group, 0))
    gradient: Tensor = next(each for label, _, each in strategy.held("gradients") if label == "layers.0.mlp.up.weight")
    return gradient


def test_a_layer_makes_two_all_reduces_per_direction() -> None:
    """4 per layer with 8(t-1)/t·b·s·h elements (Shoeybi 2019, section 3), and 4 for the ends and the loss."""
    for world_size in range(1, 9):
        shallow, deep = (config_of(world_size, LAB_DEPTH=depth) for depth in ("3", "4"))
        before, after = (
            {p.variant: p for p in MODE.predict(config) if p.name == "wire bytes"} for config in (shallow, deep)
        )
        assert after["megatron"].calls - before["megatron"].calls == 4
        assert before["megatron"].calls == 4 * 3 + 4
        elements = 8 * (world_size - 1) / world_size * 5 * 7 * 16
        for rank in range(world_size):
            assert after["megatron"].value[rank] - before["megatron"].value[rank] == pytest.approx(4 * elements)
        # With `sequence`, all ranks together send the same bytes in chunks, and 6·h for the layer's norms and biases.
        whole = 2 * (world_size - 1) / world_size * 6 * 16
        more = sum(after["sequence"].value) - sum(before["sequence"].value)
        assert more == pytest.approx(4 * world_size * (elements + whole))


def test_traffic_doubles_with_the_batch() -> None:
    one, two = (MODE.predict(config_of(4, LAB_BATCH=batch))[2] for batch in ("8", "16"))
    assert one.variant == "megatron" and one.name == "wire bytes"
    assert two.value == tuple(2 * value for value in one.value)


def count_elements(group: dist.ProcessGroup, config: Config) -> tuple[int, int]:
    strategy = strategy_of("megatron", group, config)
    return sum(tensor.numel() for *_, tensor in strategy.held("weights")), sum(
        p.numel() for _, p in strategy.replicated()
    )


def test_slices_add_up_to_the_model(ranks: Ranks) -> None:
    config = config_of(3, LAB_TIE="1")
    found = ranks(3, count_elements, config)
    whole = found[0][1]
    assert sum(stored - whole for stored, _ in found) + whole == outline(config).num_parameters()
    assert max(stored for stored, _ in found) < 0.5 * outline(config).num_parameters()


@pytest.mark.parametrize(("saved", "holds"), [(100, True), (99, False), (0, False)])
def test_wrong_savings_of_activations_fail(saved: int, holds: bool) -> None:
    lab = lab_alone()
    held_bytes = {"megatron": 500, "sequence": 500 - saved}
    measured: Any = {name: SimpleNamespace(activation_bytes=nbytes) for name, nbytes in held_bytes.items()}
    compare_saved(lab, [Prediction("sequence", SAVED, "B", "", (100.0, 100.0), 0)], measured)
    assert held(lab) == {SAVED: holds}
