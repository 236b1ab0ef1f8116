"""Load a lesson by its name, or by the path of one outside of experiments/; and other imports before a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from distlab.contract import Mode
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import modes
from distlab.lab.rank import main
from distlab.lab.rank.mode_loader import CHECKPOINTS, COMPILER, load, modes_that, modules_needed, with_names_of_today

LESSON = """\"\"\"The idea.

More of it.\"\"\"
from distlab.contract import Mode, Variant
import {sibling}
MODE = Mode(variants=(Variant("one"),))
"""


@pytest.mark.parametrize("mode", modes())
def test_every_mode_of_the_lab_has_an_idea(mode: str) -> None:
    lesson = load(mode)
    assert len(lesson.idea.splitlines()) > 3
    assert lesson.variants or mode == "train"


def test_a_lesson_can_be_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(LESSON.format(sibling="helps_outside"))
    (tmp_path / "helps_outside.py").write_text("")
    lesson = load(str(tmp_path / "outside.py"))
    assert (lesson.idea, lesson.names) == ("The idea.\n\nMore of it.", ("one",))


def test_a_lesson_can_be_a_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "folded").mkdir()
    (tmp_path / "folded" / "__init__.py").write_text(LESSON.format(sibling="folded.part"))
    (tmp_path / "folded" / "part.py").write_text("")
    assert load(str(tmp_path / "folded")).names == ("one",)


def test_a_variant_with_an_injected_bug_keeps_its_description() -> None:
    mode = load("dp")
    assert [each.description for each in mode.mistaken("no_broadcast").variants] == [
        each.description for each in mode.variants
    ]
    assert mode.variants[1].description.startswith("One all_reduce for all gradients in one bucket")


@pytest.mark.parametrize(
    ("run_mode", "name", "variants"),
    [
        ("dp", "naive", ("per_parameter",)),
        ("pp", "gpipe,naive,one_microbatch", ("gpipe", "one_microbatch")),
        ("fsdp", "zero3,naive", ("zero3", "zero3_blocking")),
        ("cp", "naive", ("naive",)),  # cp has no variant with this older name
    ],
)
def test_a_variant_is_found_by_its_older_name(run_mode: str, name: str, variants: tuple[str, ...]) -> None:
    config = Config.read({"RUN_MODE": run_mode, "LAB_VARIANT": name})
    assert with_names_of_today(config, load(run_mode)).variant == variants


OPTIONS = """from distlab.lab.config.settings import Field, ModeOptions

class Options(ModeOptions):
    speed: float = Field(2.5, alias="LAB_SPEED", description="how fast")
"""


def test_a_folder_can_have_its_own_variables(tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "__init__.py").write_text(
        "from .options import Options\n" + LESSON.format(sibling="quick.options")
    )
    (tmp_path / "quick" / "options.py").write_text(OPTIONS)
    config = Config.read({"RUN_MODE": str(tmp_path / "quick"), "LAB_SPEED": "3"})
    assert load(config.run_mode).names == ("one",)
    assert config.options.model_dump() == {"speed": 3.0}
    assert sys.modules["quick"].Options is type(config.options)


def test_a_file_with_its_own_variables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(OPTIONS + LESSON.format(sibling="json"))
    with pytest.raises(ConfigError, match=r"it must be a folder with class Options in .*/quick/options\.py"):
        load(str(tmp_path / "quick.py"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", "has no MODE: the file of a mode ends with MODE = Mode(...)"),
        ("MODE = 3\n", "has no MODE"),
        ("x = 1\nraise KeyError('word')\n", "cannot be imported: KeyError: 'word' (line 2)"),
        ("x = 1\n\ndef f(:\n", "cannot be imported: SyntaxError: invalid syntax (line 3)"),
        (
            "import nowhere_to_be_found\n",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found' (line 1)",
        ),
    ],
)
def test_a_file_that_is_no_lesson_is_refused_in_one_sentence(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "wrong.py").write_text(source)
    with pytest.raises(ConfigError) as refused:
        load(str(tmp_path / "wrong.py"))
    (sentence,) = refused.value.faults
    assert sentence.startswith("RUN_MODE=") and words in sentence


def test_modes_are_listed_by_a_property() -> None:
    assert modes_that(lambda mode: any(name.startswith("ddp") for name in mode.by_torch)) == "compress, dp"
    assert modes_that(lambda mode: False) == ""


# What torch would import during a run is imported and frozen before it.

FEW_OBJECTS = """
import gc, sys
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import import_and_freeze
from distlab.lab.rank.mode_loader import load
config = Config.read({"LAB_OPTIMIZER": "adamw", "LAB_CHECKPOINT_EVERY": "2"})
import_and_freeze(config, load("dp"))
there = set(sys.modules)
from distlab.lab.workload import model, optimizer
optimizer.make_optimizer(model.build_model(config, 1).parameters(), config)
late = len(set(sys.modules) - there)
assert late < 20, late
assert len(gc.get_objects()) < 20_000, len(gc.get_objects())
"""


@pytest.mark.parametrize(
    ("run_mode", "settings", "modules"),
    [
        ("dp", {}, [COMPILER]),
        ("dp", {"LAB_VARIANT": "per_parameter,bucketed"}, []),
        ("dp", {"LAB_VARIANT": "flat", "LAB_OPTIMIZER": "adamw"}, [COMPILER]),
        ("dp", {"LAB_VARIANT": "flat", "LAB_CHECKPOINT_EVERY": "5"}, [CHECKPOINTS]),
        ("dp", {"LAB_VARIANT": "flat", "LAB_FAULTS": "kill@step2"}, [CHECKPOINTS]),
        ("fsdp", {"LAB_VARIANT": "fsdp2", "LAB_RESUME": "somewhere"}, [COMPILER, CHECKPOINTS]),
        ("comm", {}, []),  # comm's variants need no compiler
        ("precision", {}, [COMPILER]),  # autocast needs DDP
        ("precision", {"LAB_VARIANT": "fp16,bf16"}, []),
    ],
)
def test_only_modules_that_the_run_uses_are_imported(
    run_mode: str, settings: dict[str, str], modules: list[str]
) -> None:
    config = Config.read({"RUN_MODE": run_mode} | settings)
    assert modules_needed(config, load(run_mode)) == modules


def test_a_run_imports_no_more_of_torch_and_walks_few_objects() -> None:
    subprocess.run([sys.executable, "-c", FEW_OBJECTS], check=True, timeout=100)


@pytest.mark.parametrize(("run_mode", "imported"), [("dp", ["dp"]), ("mine/mode.py", [])])
def test_the_launcher_imports_only_lessons_of_the_lab(
    monkeypatch: pytest.MonkeyPatch, run_mode: str, imported: list[str]
) -> None:
    done: list[str] = []

    def import_and_freeze(config: Config, mode: Mode) -> None:
        assert mode.names == load(config.run_mode).names
        done.append(config.run_mode)

    monkeypatch.setattr(main, "import_and_freeze", import_and_freeze)
    main.import_for_ranks(Config.read({}).model_copy(update={"run_mode": run_mode}))
    assert done == imported
