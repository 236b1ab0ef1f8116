"""One process's passes: what happens in them, in which order, and what is alive then."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.config import Config
from distlab.verify.counted import outlined, saved, saved_bytes
from distlab.workload.data import Batches
from distlab.workload.model import build_model
from tests.labs import TINY


def lab_of(**settings: str) -> Any:
    """As much of a Lab as an outline needs: rank 0 of 2."""
    config = Config.read(
        TINY | {"RUN_MODE": "dp", "WORLD_SIZE": "2", "LAB_BATCH": "4", "LAB_MODEL": "mlp", "LAB_DEPTH": "3"} | settings
    )
    device = torch.device("cpu")
    return SimpleNamespace(
        config=config, device=device, model=lambda dtype: build_model(config, config.seed).to(dtype),
        batches=lambda dtype: Batches(config, proof=False, device=device, dtype=dtype),
        dealt=lambda batches, step: batches.dealt(step, 0, 2),
    )  # fmt: skip


def test_layers_run_to_the_end_and_gradients_come_back_and_are_dropped() -> None:
    happenings = outlined(lab_of())
    words = [
        (each.what, each.layer) for each in happenings if each.what in ("dealt", "layer", "left", "output", "passed")
    ]
    assert words == [
        ("dealt", -1), ("layer", 0), ("left", 0), ("layer", 1), ("left", 1), ("layer", 2), ("left", 2),
        ("output", 2), ("output", 1), ("output", 0), ("passed", -1),
    ]  # fmt: skip
    taken = [each.name for each in happenings if each.what == "taken"]
    assert len(taken) == len(set(taken)) == 3 * 6
    assert happenings[-1].live < 600  # the batch, no activation and no gradient
    assert max(each.highest for each in happenings) > 4000


def test_two_microbatches_pass_one_after_the_other_and_hold_less() -> None:
    one, two = (max(each.highest for each in outlined(lab_of(LAB_MICROBATCHES=number))) for number in ("1", "2"))
    assert two < one


@pytest.mark.parametrize("way", [{"again": True}, {"recompute": True}])
def test_what_is_computed_again_is_not_held(way: dict[str, Any]) -> None:
    lab = lab_of(LAB_BATCH="32")
    assert max(each.highest for each in outlined(lab, **way)) < 0.7 * max(each.highest for each in outlined(lab))


def test_what_a_run_of_layers_saves_is_what_it_saves_in_the_model() -> None:
    lab = lab_of()
    (microbatch,) = lab.dealt(lab.batches(torch.float32), 0)
    whole = saved(lab, range(3), microbatch)
    first, rest = (saved(lab, run, microbatch) for run in (range(1), range(1, 3)))
    assert first.all_bytes + rest.all_bytes == pytest.approx(whole.all_bytes, rel=0.1)
    assert 0 < first.all_bytes < rest.all_bytes
    assert saved_bytes(lab, range(3), microbatch) == whole.all_bytes
    assert all(0 < part.linear_bytes < part.all_bytes for part in (first, rest, whole))
    assert first.linear_bytes + rest.linear_bytes == whole.linear_bytes
