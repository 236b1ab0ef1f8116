"""The package that users install: the wheel's contents and metadata, and its command in users' folders.

One wheel is built and installed into one environment, which finds torch and the other dependencies where this
environment has them. An editable install and a checkout without an install are tested too.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_run import SMALL

TOP = Path(__file__).parent.parent
NOT_OURS = ("LAB_", "RUN_MODE", "WORLD_SIZE", "RANK", "MASTER_", "PYTHON")
RUN = ("run", "dp", *(f"{name}={value}" for name, value in SMALL.items()))
HOSTILE = "raise SystemExit('a package of the user, not the lab')\n"  # a module that must not be imported
SCRIPT = """
import torch
import torch.distributed as dist
import only_installed

dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
print("sum", x[0].item())
dist.destroy_process_group()
"""
MODEL = """
import torch
from torch import nn


def model(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def batch(seed, step):
    numbers = torch.Generator().manual_seed(seed + step)
    return torch.randn(8, 4, generator=numbers), torch.randn(8, 2, generator=numbers)


def loss(model, inputs, targets):
    return (model(inputs) - targets).square().sum()
"""
# An entry of site-packages for the dependencies: those of this environment, without its editable install of the lab.
DEPENDENCIES = """import sys; sys.path.append({place!r})
"""


class Installed(NamedTuple):
    """An environment with the package, and the wheel that was installed."""

    python: Path
    wheel: Path

    @property
    def command(self) -> str:
        return str(self.python.with_name("distlab"))


def call(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
    return subprocess.run(
        command, cwd=folder, env=clean | {"OMP_NUM_THREADS": "1"} | variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110, check=False,
    )  # fmt: skip


def ended_well(command: Sequence[str], folder: Path, **variables: str) -> str:
    """Return the output of a command that must end with 0."""
    done = call(command, folder, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment(folder: Path) -> Path:
    """Return the Python of a new environment with the dependencies but without the lab."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(DEPENDENCIES.format(place=sysconfig.get_path("purelib")))
    (site / "only_installed.py").write_text("")
    return folder / "bin" / "python"


def install(python: Path, what: Sequence[str], folder: Path) -> None:
    """Install with this environment's pip, without a network."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    ended_well([*pip, "--no-build-isolation", "--no-compile", *what], folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of the wheel to a folder, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "distlab", "experiments", "engines", "workers"):
        (folder / name).symlink_to(TOP / name)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Installed:
    """Install the wheel in an environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    ended_well([*pip, "--wheel-dir", str(folder)], source)
    (wheel,) = folder.glob("distlab-*.whl")
    python = environment(folder / "venv")
    install(python, [str(wheel)], folder)
    return Installed(python, wheel)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with packages named like the checkout's folders, and with a script and a model."""
    for name in ("experiments", "workers", "engines", "tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(HOSTILE)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


# --- the wheel ---


def test_the_wheel_has_one_package_with_all_its_files(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    wanted = [
        f"{prefix}{path.relative_to(TOP).as_posix()}"
        for prefix, top in (("", "distlab"), ("distlab/", "experiments"), ("distlab/", "engines"))
        for path in (TOP / top).rglob("*")
        if path.suffix in (".py", ".typed", ".yaml", ".json", ".html", ".css", ".js", ".svg")
    ]
    assert sorted(names) == sorted(wanted)
    assert {
        "distlab/lab/report/templates/report.html", "distlab/engines/kubernetes/jobset.yaml", "distlab/experiments/dp/__init__.py",
        "distlab/experiments/dp/checks.py", "distlab/py.typed", "distlab/tools/plan/published.json",
    } <= set(names)  # fmt: skip


def test_the_wheel_has_its_metadata(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        by_name = {Path(name).name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" in name}
    metadata = message_from_bytes(by_name["METADATA"])
    assert (metadata["Name"], metadata["License-Expression"]) == ("distlab", "MIT")
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])
    assert by_name["top_level.txt"].decode().split() == ["distlab"]
    assert "distlab = distlab.__main__:main" in by_name["entry_points.txt"].decode()
    assert "distlab = distlab.tools.testing.plugin" in by_name["entry_points.txt"].decode()


# --- the command of the wheel, in an empty folder ---


def test_the_command_without_arguments_prints_help(installed: Installed, tmp_path: Path) -> None:
    for words in ([], ["--help"]):
        assert ended_well([installed.command, *words], tmp_path).startswith("usage: distlab COMMAND ...")
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys, distlab.__main__ as command; sys.argv = ['distlab']; command.main(); sys.exit('torch' in"
        " sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=TOP, stdout=subprocess.DEVNULL, timeout=60, check=True)


def test_a_run_and_its_report_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    assert "rank 0 | PASS" in ended_well([installed.command, *RUN], tmp_path)
    page = tmp_path / "runs" / "latest" / "report.html"
    page.unlink()
    assert "PASS" in ended_well([installed.command, "report", "runs/latest"], tmp_path)
    assert page.is_file()
    assert "clean      no run in runs/" in ended_well([installed.command, "report", "--clean", "30"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("explain dp", "RUN_MODE=dp"),
        ("plan --params 7B --gpus 64 --gpu-memory 80GB", "7"),
        ("engine kubernetes --ranks 3 dp", "completions: 3"),
    ],
)
def test_a_command_that_starts_no_rank(installed: Installed, tmp_path: Path, words: str, output: str) -> None:
    assert output in ended_well([installed.command, *words.split()], tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- a user's folder: packages of the user's own, a script, a model ---


def test_a_users_packages_do_not_disturb_a_run(installed: Installed, hostile: Path) -> None:
    command = [str(installed.python), "-m", "distlab"]  # puts the working folder first on the path
    assert "rank 0 | PASS" in ended_well([*command, *RUN], hostile)


def test_a_users_packages_do_not_disturb_a_check(installed: Installed, hostile: Path) -> None:
    """The script imports its own packages, and those that are installed next to the lab."""
    (hostile / "workers" / "__init__.py").write_text("MINE = 'of the user'\n")
    (hostile / "train.py").write_text(SCRIPT + "import workers\nprint(workers.MINE)\n")
    output = ended_well([installed.command, "check", "WORLD_SIZE=2", "train.py"], hostile)
    assert output.count("sum 2.0") == 2
    assert "rank 1 | of the user" in output


def test_a_users_packages_do_not_disturb_a_proof(installed: Installed, hostile: Path) -> None:
    assert "PASS" in ended_well([installed.command, "prove", "WORLD_SIZE=2", "model.py"], hostile)


def test_ranks_that_torchrun_starts_check_a_script(installed: Installed, hostile: Path) -> None:
    torchrun = [str(installed.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = ended_well([*torchrun, "-m", "distlab", "check", "train.py"], hostile)
    assert output.count("sum 2.0") == 2


# --- an editable install, and a checkout without an install ---


def test_an_editable_install_runs_in_any_folder(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    install(python, ["--editable", str(source)], tmp_path)
    command = str(python.with_name("distlab"))
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "RUN_MODE=dp" in ended_well([command, "explain", "dp"], folder)
    assert "completions: 2" in ended_well([command, "engine", "kubernetes", "--ranks", "2", "dp"], folder)
    assert "rank 0 | PASS" in ended_well([command, *RUN], folder)


@pytest.mark.parametrize("launcher", ["", "torch.distributed.run --standalone --nproc-per-node 2 -m"])
def test_a_checkout_needs_no_install(tmp_path: Path, launcher: str) -> None:
    """Python finds the lab only in the working folder, as in a container."""
    python = environment(tmp_path / "venv")
    runs = {"LAB_RUNS_DIR": str(tmp_path / "runs")}
    ended_well([str(python), "-m", "distlab", "explain", "dp"], TOP)
    command = [str(python), "-m", *launcher.split(), "workers"]
    variables = SMALL if not launcher else {name: value for name, value in SMALL.items() if name != "WORLD_SIZE"}
    assert "PASS" in ended_well(command, TOP, RUN_MODE="dp", **variables, **runs)


def test_a_users_mode_needs_only_the_contract() -> None:
    from distlab import contract

    assert set(contract.__all__) == {"Mode", "Variant", "Mistake", "Mistakes", "Instead", "Needs", "Strategy"}
    assert {getattr(contract, name).__module__ for name in contract.__all__} == {"distlab.contract"}
