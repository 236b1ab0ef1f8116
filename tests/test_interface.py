"""What users have typed, scripted or stored still works: every name and default in `interface.toml` exists, and runs of
older versions get the same verdict.

New names need not be in the file; changing or removing a line breaks users' work and needs a note in CHANGELOG.md.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

import distlab as package
from distlab import contract
from distlab.cli.report import main as report
from distlab.lab.checkpoint import manifest
from distlab.lab.cluster.launch import worst
from distlab.lab.config import Config
from distlab.lab.config.commands import COMMANDS
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load, load_for
from distlab.lab.report import records
from distlab.lab.report import verdict as judge
from distlab.lab.report.reading import from_line, read_run, to_line
from distlab.lab.verify.run_all import expected
from distlab.tools.check.judge import rank_state
from distlab.tools.check.start.command import CheckOptions, ProofOptions
from distlab.tools.prove import compare, reference, verdict
from distlab.tools.testing import plugin
from tests.controls import TOP
from tests.interface import DATA, FROZEN, claims_of, missing
from tests.labs import TINY
from tests.mistakes import WORLD_SIZE, correct_settings

RUNS = sorted((DATA / "runs").iterdir())
# Settings with which a run has more checks than by default.
MORE = {
    "LAB_OPTIMIZER": "adamw", "LAB_CLIP": "1", "LAB_CHECKPOINT_EVERY": "2", "LAB_AUDIT_EVERY": "1", "LAB_BACKEND": "tcp",
    "LAB_RECOMPUTE": "1",
}  # fmt: skip
# Records that no stored run contains.
RARE = [
    {"record": "resumed", "epoch": 0, "step": 2, "path": "checkpoints/step-00000002"},
    {"record": "skipped", "variant": "ring", "reason": "one rank"},
    {"record": "finding", "check": "calls match", "sentence": "they do not", "ranks": [0]},
    {"record": "dropped", "by_fault": {"its seal": 1}, "by_source": {"10.0.0.1": 1}},
]


def printed(*command: str) -> str:
    """Return the output of a command that must end with 0."""
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- commands ---


@pytest.mark.parametrize(
    "lab", [[sys.executable, "-m", package.__name__], [sys.executable, "-m", "workers"], ["./run"]]
)
def test_every_command_is_offered(lab: list[str]) -> None:
    assert not missing(re.findall(r"^  (?:\./run )?(\w+) +\S", printed(*lab, "--help"), re.MULTILINE), "commands")


def test_every_command_has_a_module() -> None:
    assert not [name for name in FROZEN["commands"] if importlib.util.find_spec(COMMANDS[name].module) is None]


def test_every_target_of_make_exists() -> None:
    assert not missing(re.findall(r"^(\w+):.*## ", (TOP / "Makefile").read_text(), re.MULTILINE), "make")


def test_every_file_and_folder_of_the_top_exists() -> None:
    assert not missing((path.name for path in TOP.iterdir()), "top")


# --- variables ---


def test_every_variable_has_its_default() -> None:
    defaults: dict[str, dict[str, str]] = {"": {}}
    mode = ""
    shown = printed(sys.executable, "-m", f"{package.__name__}.lab.config.variables")
    for line in re.sub(r"(?m)^(`RUN_MODE=.*)\n(?=\S)", r"\1 ", shown).splitlines():  # a heading may have two lines
        if heading := re.match(r"`RUN_MODE=(\w+)`", line):
            mode = heading[1]
            defaults[mode] = dict(re.findall(r"`(LAB_\w+)` ([^\s,]+)", line))
        elif row := re.match(r"\| `(\w+)` \| (.*?) \|", line):
            defaults[mode][row[1]] = row[2]
    for name, settings in (("check", CheckOptions), ("prove", ProofOptions)):
        own = settings().model_dump(by_alias=True)
        defaults[name] = {alias: "" if value is None else f"{value:g}" for alias, value in own.items()}
    for name, frozen in {"": FROZEN["variables"], **FROZEN["variables_of"]}.items():
        now = {variable: defaults[name].get(variable) for variable in frozen}
        assert now == frozen, name or "every mode"


def test_an_unknown_variable_is_refused_with_2() -> None:
    command = [sys.executable, "-m", package.__name__, "run", "LAB_STEP=5"]
    assert subprocess.run(command, cwd=TOP, capture_output=True, timeout=60, check=False).returncode == 2


# --- exit codes ---


def worst_by_run(one: int, other: int) -> int:
    """Return the worse of two codes according to ./run."""
    functions = re.findall(r"^(?:severity|worst)\(\) \{\n.*?^\}\n", (TOP / "run").read_text(), re.MULTILINE | re.DOTALL)
    return int(printed("sh", "-c", f"{''.join(functions)}worst {one} {other}"))


@pytest.mark.parametrize("signalled", [130, 137])
def test_the_worse_of_two_exit_codes_wins(signalled: int) -> None:
    order = [signalled if code == 130 else code for code in FROZEN["worst_first"]]
    for worse, better in combinations(order, 2):
        assert worst([worse, better]) == worst([better, worse]) == worse
        assert worst_by_run(worse, better) == worst_by_run(better, worse) == worse


def test_every_verdict_has_its_exit_code() -> None:
    assert FROZEN["verdicts"] == judge.EXIT_CODES


# --- imports ---


def test_every_name_of_the_package_exists() -> None:
    for name, module in (("distlab", package), ("contract", contract), ("fixtures", plugin)):
        assert not missing(getattr(module, "__all__", vars(module)), name)


# --- modes ---


@pytest.mark.parametrize("mode", FROZEN["variants"])
def test_every_name_of_a_mode_exists(mode: str) -> None:
    lesson = load(mode)
    assert not missing(lesson.names, "variants", mode)
    assert FROZEN["formerly"].get(mode, {}).items() <= lesson.formerly.items()
    assert set(lesson.formerly.values()) <= set(lesson.names)
    checks = {bug: mistake.check for bug, mistake in lesson.mistakes.items()}
    assert FROZEN["bugs"].get(mode, {}).items() <= checks.items()
    assert mode in modes()


@pytest.mark.parametrize("mode", FROZEN["variants"])
def test_every_required_check_of_a_run_exists(mode: str) -> None:
    now: set[str] = set()
    for more in ({}, MORE):
        config = Config.read({"WORLD_SIZE": str(WORLD_SIZE)} | TINY | correct_settings(mode) | more)
        now |= {name for _, name, _, _ in expected(config, load_for(config)).claims}
    assert not [name for name in claims_of(mode, "claimed") if name not in now]


def test_every_check_of_a_users_script_exists() -> None:
    assert not missing(rank_state.CHECKS, "scripts", "check")
    proven = (compare.LOSSES, compare.GRADIENTS, compare.WEIGHTS, verdict.BEGINNING, verdict.WHOLE_MODEL)
    assert not missing((*proven, verdict.DROPOUT, reference.BUFFERS), "scripts", "prove")


# --- files ---

RECORD_TYPES = {kind.__name__.lower(): kind for kind in get_args(records.Record)}


def test_every_kind_of_record_has_its_fields() -> None:
    assert not missing(RECORD_TYPES, "records")
    for name in FROZEN["records"]:
        assert not missing(RECORD_TYPES[name].__annotations__, "records", name), name


def test_every_key_of_run_json_exists() -> None:
    judged = [judge.judge(read_run(run)) for run in RUNS]
    whole_run = read_run(DATA / "runs" / "passes")
    judged.append(judge.judge({0: [*whole_run[0], *(from_line(json.dumps(each)) for each in RARE)], 1: whole_run[1]}))
    for run in judged:
        assert run["schema"] == 1
        assert not missing(run, "run_json", "run")
    for name in set(FROZEN["run_json"]) - {"run"}:
        parts = [part for run in judged for part in (run[name] if isinstance(run[name], list) else [run[name]]) if part]
        assert parts, f"none of these runs has {name}"
        assert not [keys for part in parts if (keys := missing(part, "run_json", name))], name


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.name))
def test_an_old_run_gets_its_old_verdict(run: Path, tmp_path: Path) -> None:
    """Judged by the command, which also draws the page; sentences on faults may be worded differently."""
    before = json.loads((run / "run.json").read_text())
    again = Path(shutil.copytree(run, tmp_path / run.name))
    (again / "run.json").unlink()
    assert report([str(again)]) == FROZEN["verdicts"][before["verdict"]]
    assert (again / "report.html").is_file()
    after = json.loads((again / "run.json").read_text())
    drills = [[drill["held"] for drill in each.pop("drills")] for each in (before, after)]
    assert drills[0] == drills[1]
    assert contains_all(before, after)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.name))
def test_old_records_are_written_unchanged(run: Path) -> None:
    for path in run.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert contains_all(json.loads(line), json.loads(to_line(from_line(line))))


def contains_all(before: Any, after: Any) -> bool:
    """Return whether `after` has all of `before`; it may have more keys, and other tests as controls."""
    if isinstance(before, dict):
        return all(
            key in after and (key == "control" or contains_all(value, after[key])) for key, value in before.items()
        )
    if isinstance(before, list):
        return len(before) == len(after) and all(map(contains_all, before, after))
    return bool(before == after)


def test_the_manifest_of_an_old_checkpoint_is_unchanged(tmp_path: Path) -> None:
    old = DATA / "checkpoint"
    written = json.loads(manifest.write(tmp_path, manifest.read(old)).read_text())
    assert not missing(written, "manifest", "keys")
    assert not missing(written["settings"], "manifest", "settings")
    assert not missing(manifest.defining(Config.read({})), "manifest", "settings")
    assert contains_all(json.loads((old / manifest.FILE).read_text()), written)
