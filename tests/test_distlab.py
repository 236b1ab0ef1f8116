"""The package that users install: its command from any folder, what it re-exports, and what the wheel holds."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.test_run import SMALL

TOP = Path(__file__).parent.parent


def distlab(folder: Path, *words: str, safe: bool = True) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, where Python looks for the lab as the installed command does: not in the working
    folder."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LAB_", "RUN_MODE", "WORLD_SIZE", "RANK"))
    }
    command = [sys.executable, *(["-P"] if safe else []), "-m", "distlab", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=clean | {"PYTHONPATH": str(TOP)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_run_in_a_folder_of_the_users_own(tmp_path: Path) -> None:
    """Its runs are there, and a folder of its own that is named like one of the lab's is left alone."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise SystemExit('not the lab')")
    done = distlab(tmp_path, "run", "dp", *(f"{name}={value}" for name, value in SMALL.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 | PASS" in done.stdout
    assert (tmp_path / "runs" / "latest" / "run.json").is_file()
    listed = distlab(tmp_path, "clean")
    assert "1 run in runs/" in listed.stdout, listed.stdout + listed.stderr


def test_the_command_alone_says_what_there_is(tmp_path: Path) -> None:
    done = distlab(tmp_path, safe=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: distlab COMMAND ...")
    assert list(tmp_path.iterdir()) == []


def test_help_waits_for_no_torch() -> None:
    program = (
        "import sys, distlab.__main__ as command; sys.argv = ['distlab']; command.main(); sys.exit('torch' in"
        " sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=TOP, stdout=subprocess.DEVNULL, timeout=60, check=True)


def test_a_mode_of_ones_own_needs_nothing_of_workers() -> None:
    from distlab import contract

    assert set(contract.__all__) == {"Mode", "Variant", "Mistake", "Mistakes", "Instead", "Needs", "Strategy"}
    assert {getattr(contract, name).__module__ for name in contract.__all__} == {"distlab.contract"}


def test_the_wheel_holds_the_lab_and_its_command(tmp_path: Path) -> None:
    program = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "workers", "experiments", "distlab", "engines"):
        (source / name).symlink_to(TOP / name)
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=source, capture_output=True, timeout=110, check=True)
    (wheel,) = tmp_path.glob("distlab-*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "distlab = distlab.__main__:main" in held.read(entry_points).decode()
    wanted = [
        path.relative_to(TOP).as_posix()
        for top in ("workers", "experiments", "distlab", "engines")
        for path in (TOP / top).rglob("*.*")
        if path.suffix in (".py", ".yaml", ".html", ".css", ".js", ".svg")
    ]
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(wanted)
