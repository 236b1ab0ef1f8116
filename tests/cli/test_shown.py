"""`--see`: the layout that was taken, on at most 8 ranks, in a command that the lab takes."""

import itertools
import math
import shlex

import pytest

from distlab.cli.plan import MOST_RANKS, command, main, read_job, shrunk
from distlab.config import Config
from distlab.experiments.mesh import MODE
from distlab.plan.costs import KINDS, Layout, layouts

SEVEN = "--params 7B --gpus 64 --gpu-memory 80GB"

pytestmark = pytest.mark.timeout(60)


def settings(told: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(told) if "=" in word)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(8, 16, 32, 1), (2, 2, 1, 2)),
        (Layout(1, 1, 64, 3), (8, 1, 1, 1)),
        (Layout(8, 1, 2, 0), (2, 1, 1, 4)),
        (Layout(1, 3, 2, 0), (2, 3, 1, 1)),
        (Layout(1, 1, 1, 0), (1, 1, 1, 1)),
        (Layout(8, 1, 4, 0, 2), (2, 1, 2, 2)),
        (Layout(8, 2, 4, 1, 2), (1, 2, 2, 2)),  # four axes of two ranks would be 16
    ],
)
def test_no_axis_gets_lost(layout: Layout, sizes: tuple[int, ...]) -> None:
    assert tuple(shrunk(layout).values()) == sizes
    assert math.prod(sizes) <= MOST_RANKS


def test_every_kind_is_a_run_that_the_lab_takes() -> None:
    job, _ = read_job([*SEVEN.split(), "--recompute"])
    for (_, tensor, pipeline, stage), context in itertools.product(KINDS, (False, True)):
        given = settings(command(next(layouts(job, tensor, pipeline, stage, context)), job))
        config = Config.read(given)
        assert ("cp" in given["LAB_MESH"]) == context
        assert MODE.refuse(config) == []
        assert not set(config.variant) & set(MODE.cannot(config))
        assert config.recompute
        assert (f"zero{stage}" in config.variant) == bool(stage)


@pytest.mark.parametrize("see", [True, False])
def test_the_answer_ends_with_it_where_it_is_asked_for(see: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN.split(), *(["--see"] if see else [])]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert ("RUN_MODE=mesh" in last) == see
    assert not see or settings(last)["LAB_MESH"] == "dp8"


def test_long_samples_are_shown_on_a_mesh_that_cuts_them(capsys: pytest.CaptureFixture[str]) -> None:
    long = "--seq 131072 --recompute selective --node-link 900GB/s --link 100Gbit --see"
    assert main([*SEVEN.split(), *long.split()]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert settings(last)["LAB_MESH"] == "dp2,cp2,tp2"
