"""How often layers are passed, and what of them is alive in between."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.lab.config import Config
from distlab.lab.verify.counted import Passes, check_in_flight, check_passes, outlined, saved, saved_bytes
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import Model, build_model
from distlab.techniques.mesh.strategy import Stacked
from distlab.techniques.pipeline_parallel.strategy import Pipelined
from tests.lab.verify.model_statements import Alive
from tests.labs import TINY

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
    written: list[Any] = []
    lab: Any = SimpleNamespace(check=lambda name, off, tolerance, **_: written.append((name, off, tolerance)))
    check_passes(lab, "flat", passes)
    assert written == [("computed again", 2 * DEPTH, 0)]


@pytest.mark.parametrize(("recompute", "enough"), [(True, True), (False, False)])
def test_what_is_alive_between_two_passes(recompute: bool, enough: bool) -> None:
    _, model, inputs = passed("mlp", recompute=True)
    model.zero_grad()
    kept: list[Any] = []
    if not recompute:  # as if all that a layer saves stayed
        for layer in model.layers:
            layer.register_forward_hook(lambda _, args, out: kept.append([args[0] * each for each in range(8)]))
    seen = Alive(list(model.layers), torch.device("cpu"))
    with seen.storages:
        seen.begin(inputs)
        model(inputs, inputs).backward()
    assert (seen.worst <= 4) == enough


# Microbatches that a rank keeps compared with what its schedule allows, of both kinds of strategies that have stages.

pytestmark = pytest.mark.timeout(60)


def claims(kind: type, kept: int | None, schedule: str, chunks: int = 1) -> list[bool]:
    """What the second of three stages, of five microbatches, claims."""
    made: list[bool] = []

    def check(_name: str, difference: float, tolerance: float, *_: str, **__: str) -> None:
        made.append(difference <= tolerance)

    mesh = SimpleNamespace(size=lambda _axis: 3, index=lambda _axis: 1)
    lab: Any = SimpleNamespace(check=check, mesh=mesh, config=SimpleNamespace(num_microbatches=5))
    strategy: Any = object.__new__(kind)
    strategy.engine = SimpleNamespace(most_in_flight=kept)
    strategy.parts = SimpleNamespace(stages=[*range(chunks)])
    check_in_flight(lab, "any", strategy, schedule)
    return made


@pytest.mark.parametrize("kind", [Pipelined, Stacked])
@pytest.mark.parametrize(("schedule", "allowed"), [("1f1b", 2), ("zb_h1", 3), ("gpipe", 5)])
def test_too_many_in_flight_fail(kind: type, schedule: str, allowed: int) -> None:
    assert claims(kind, allowed, schedule) == [True]
    assert claims(kind, allowed + 1, schedule) == [False]


def test_chunks_are_those_that_the_rank_has() -> None:
    assert claims(Stacked, 8, "interleaved", chunks=2) == [True]
    assert claims(Stacked, 9, "interleaved", chunks=2) == [False]


def test_of_an_engine_that_does_not_count_nothing_is_claimed() -> None:
    assert claims(Pipelined, None, "1f1b") == []


# What a strategy keeps: the most of its microbatches, which are made one at a time.


# One process's passes: what happens in them, in which order, and what is alive then.


def lab_of(**settings: str) -> Any:
    """As much of a Lab as an outline needs: rank 0 of 2."""
    config = Config.read(
        TINY | {"RUN_MODE": "dp", "WORLD_SIZE": "2", "LAB_BATCH": "4", "LAB_MODEL": "mlp", "LAB_DEPTH": "3"} | settings
    )
    device = torch.device("cpu")
    return SimpleNamespace(
        config=config, device=device, model=lambda dtype: build_model(config, config.seed).to(dtype),
        batches=lambda dtype: Batches(config, proof=False, device=device, dtype=dtype),
        microbatches=lambda batches, step: batches.microbatches(step, 0, 2),
    )  # fmt: skip


def test_layers_run_to_the_end_and_gradients_come_back_and_are_dropped() -> None:
    events = outlined(lab_of())
    words = [(each.kind, each.layer) for each in events if each.kind not in ("gradient", "delivered")]
    assert words == [
        ("batch", -1), ("layer", 0), ("layer_end", 0), ("layer", 1), ("layer_end", 1), ("layer", 2), ("layer_end", 2),
        ("output", 2), ("output", 1), ("output", 0), ("microbatch_end", -1),
    ]  # fmt: skip
    delivered = [each.name for each in events if each.kind == "delivered"]
    assert len(delivered) == len(set(delivered)) == 3 * 6
    assert events[-1].live < 600  # the batch, no activation and no gradient
    assert max(each.highest for each in events) > 4000


def test_what_was_there_before_may_end_meanwhile() -> None:
    lab, left = lab_of(), [torch.ones(1000)]
    dealt = lab.microbatches

    def assign_and_drop(batches: Batches, step: int) -> Any:
        left.clear()
        return dealt(batches, step)

    lab.microbatches = assign_and_drop
    assert outlined(lab) == outlined(lab_of())


def test_two_microbatches_pass_one_after_the_other_and_keep_less() -> None:
    one, two = (max(each.highest for each in outlined(lab_of(LAB_MICROBATCHES=number))) for number in ("1", "2"))
    assert two < one


@pytest.mark.parametrize("way", [{"again": True}, {"recompute": True}])
def test_recomputed_layers_are_not_kept(way: dict[str, Any]) -> None:
    lab = lab_of(LAB_BATCH="32")
    assert max(each.highest for each in outlined(lab, **way)) < 0.7 * max(each.highest for each in outlined(lab))


def test_what_a_run_of_layers_saves_is_what_it_saves_in_the_model() -> None:
    lab = lab_of()
    (microbatch,) = lab.microbatches(lab.batches(torch.float32), 0)
    whole = saved(lab, range(3), microbatch)
    first, rest = (saved(lab, run, microbatch) for run in (range(1), range(1, 3)))
    assert first.all_bytes + rest.all_bytes == pytest.approx(whole.all_bytes, rel=0.1)
    assert 0 < first.all_bytes < rest.all_bytes
    assert saved_bytes(lab, range(3), microbatch) == whole.all_bytes
    assert all(0 < part.linear_bytes < part.all_bytes for part in (first, rest, whole))
    assert first.linear_bytes + rest.linear_bytes == whole.linear_bytes
