"""What torch would import in the middle of a run is there, and frozen, before it begins."""

import subprocess
import sys

import pytest

from distlab.config import Config
from distlab.contract import Mode
from distlab.rank import main
from distlab.rank.imports import CHECKPOINTS, COMPILER, needed
from distlab.rank.mode_loader import load

HELD = """
import gc, sys
from distlab.config import Config
from distlab.rank.imports import import_and_freeze
from distlab.rank.mode_loader import load
config = Config.read({"LAB_OPTIMIZER": "adamw", "LAB_CHECKPOINT_EVERY": "2"})
import_and_freeze(config, load("dp"))
there = set(sys.modules)
from distlab.workload import model, optimizer
optimizer.make_optimizer(model.build_model(config, 1).parameters(), config)
late = len(set(sys.modules) - there)
assert late < 20, late
assert len(gc.get_objects()) < 20_000, len(gc.get_objects())
"""


@pytest.mark.parametrize(
    ("run_mode", "settings", "modules"),
    [
        ("dp", {}, [COMPILER]),
        ("dp", {"LAB_VARIANT": "naive,bucketed"}, []),
        ("dp", {"LAB_VARIANT": "flat", "LAB_OPTIMIZER": "adamw"}, [COMPILER]),
        ("dp", {"LAB_VARIANT": "flat", "LAB_CHECKPOINT_EVERY": "5"}, [CHECKPOINTS]),
        ("fsdp", {"LAB_VARIANT": "fsdp2", "LAB_RESUME": "somewhere"}, [COMPILER, CHECKPOINTS]),
        ("comm", {}, []),  # gloo's own needs no compiler
        ("precision", {}, []),
    ],
)
def test_no_more_than_the_run_uses(run_mode: str, settings: dict[str, str], modules: list[str]) -> None:
    config = Config.read({"RUN_MODE": run_mode} | settings)
    assert needed(config, load(run_mode)) == modules


def test_a_run_imports_no_more_of_torch_and_walks_few_objects() -> None:
    subprocess.run([sys.executable, "-c", HELD], check=True, timeout=100)


@pytest.mark.parametrize(("run_mode", "imported"), [("dp", ["dp"]), ("mine/mode.py", [])])
def test_the_launcher_imports_for_its_ranks_what_is_ours_and_no_lesson_from_outside(
    monkeypatch: pytest.MonkeyPatch, run_mode: str, imported: list[str]
) -> None:
    done: list[str] = []

    def import_and_freeze(config: Config, mode: Mode) -> None:
        assert mode.names == load(config.run_mode).names
        done.append(config.run_mode)

    monkeypatch.setattr(main, "import_and_freeze", import_and_freeze)
    main.import_for_ranks(Config.read({}).model_copy(update={"run_mode": run_mode}))
    assert done == imported
