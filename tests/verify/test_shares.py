"""A variant that is in a run for what it shows takes its share of the timed steps, and says so."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.contract import Variant
from distlab.report import records
from distlab.testing.warm_ranks import Ranks
from distlab.verify.run_all import timed_ends
from tests.labs import failed, run_experiment

pytestmark = pytest.mark.timeout(100)


def lab_of(**settings: Any) -> Any:
    config = SimpleNamespace(**{"steps": 20, "backend": "gloo", "world_size": 4} | settings)
    mode = SimpleNamespace(variants=[Variant("slow", timed_part=3), Variant("fast"), Variant("other")])
    return SimpleNamespace(config=config, mode=mode)


@pytest.mark.parametrize(("steps", "slow"), [(3, 3), (5, 5), (12, 5), (20, 7), (100, 34)])
def test_a_slow_variant_takes_a_part_of_the_steps_and_five_at_least(steps: int, slow: int) -> None:
    assert timed_ends(lab_of(steps=steps), ["slow", "fast"], alike=False) == {"slow": slow, "fast": steps}


@pytest.mark.parametrize(
    ("settings", "chosen", "alike"),
    [
        ({}, ["slow"], False),
        ({}, ["slow", "fast"], True),
        ({"backend": "tcp"}, ["slow", "fast"], False),
        ({"world_size": 1}, ["slow", "fast"], False),
    ],
)
def test_it_takes_all_alone_where_nothing_is_slow_and_where_all_have_to_be_alike(
    settings: dict[str, Any], chosen: list[str], alike: bool
) -> None:
    assert set(timed_ends(lab_of(**settings), chosen, alike=alike).values()) == {20}


def test_a_run_times_fewer_and_holds_them_as_all_others(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "dp", "LAB_STEPS": "9", "LAB_VARIANT": "naive,flat"}
    run, by_rank = run_experiment(ranks, 2, tmp_path, **settings)
    assert failed(run) == set()
    timed = {each.variant: len(each.step_seconds) for each in by_rank[0] if isinstance(each, records.Steps)}
    assert timed == {"naive": 5 - 2, "flat": 9 - 2}
    held = {(claim["variant"], claim["name"]): claim["detail"] for claim in run["checks"]}
    assert held["naive", "timed steps"].startswith("steps 0 to 4, audited: 0,")
    assert held["flat", "timed steps"].startswith("steps 0 to 8, audited: 0,")
    assert ("naive", "timed losses") in held
    said = [each.text for each in by_rank[0] if isinstance(each, records.Said)]
    assert any("naive takes 5 of 9 timed steps" in text for text in said)
