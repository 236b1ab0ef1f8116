"""`python -m benchmarks.mutants [NAME ...]`: apply each mutant to a copy, run it, and say which check caught it.

First every run is made without a mutant, and has to pass. NAME chooses files of this folder, such as `dp`. Returns 0 if
at least 95 % of the mutants are caught and each other one is argued.
"""

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import mutants
from benchmarks.mutants import Mutant

TOP = Path(__file__).parents[2]
SMALL = {
    "WORLD_SIZE": "3", "LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "2", "LAB_SEQ": "8", "LAB_STEPS": "4",
    "LAB_COLLECTIVE_TIMEOUT_S": "30",
}  # fmt: skip
RUN_TIMEOUT_S = 180
WANTED = 0.95


def main(names: Sequence[str]) -> int:
    """Run the mutants of the files that are named, by default of all; prints a row each as it is done."""
    by_file = {name: of_file(name) for name in names or files()}
    found = [mutant for mutants_of_it in by_file.values() for mutant in mutants_of_it]
    broken = [run for run in dict.fromkeys(each.run for each in found) if not holds(run)]
    if broken:
        print("\n".join(f"without any mutant this run does not pass: {run}" for run in broken))
        return 1
    print("| wrong line | run | caught by |\n|---|---|---|", flush=True)
    survivors = []
    for mutant in found:
        seen = seen_by(mutant)
        if not seen:
            survivors.append(mutant)
        words = seen or f"nothing: {mutant.argued or 'NOT ARGUED'}"
        print(
            f"| `{mutant.file}`: `{shown(mutant.was)}` -> `{shown(mutant.now)}` | {mutant.run} | {words} |", flush=True
        )
    caught = len(found) - len(survivors)
    print("\n| file | wrong lines | caught by their run |\n|---|---|---|")
    for name, mutants_of_it in by_file.items():
        print(f"| {name} | {len(mutants_of_it)} | {sum(each not in survivors for each in mutants_of_it)} |")
    print(f"| all | {len(found)} | {caught}, {caught / len(found):.0%} |")
    return int(caught < WANTED * len(found) or not all(mutant.argued for mutant in survivors))


def shown(line: str) -> str:
    """On one line, as a cell of a table."""
    return " ".join(line.split()).replace("|", "\\|")


def files() -> list[str]:
    """The names of the files of mutants."""
    return [module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name != "__main__"]


def of_file(name: str) -> list[Mutant]:
    """Its mutants."""
    found: list[Mutant] = importlib.import_module(f"benchmarks.mutants.{name}").MUTANTS
    return found


def holds(run: str) -> bool:
    """Whether the run passes as the code stands."""
    with Copied() as top:
        return run_in(top, run)[0] == 0


def seen_by(mutant: Mutant) -> str:
    """The checks that fail with the mutant, or the error that it ends in; empty where the run passes."""
    with Copied() as top:
        path = top / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.was) == 1, f"{mutant.file} holds {text.count(mutant.was)} times: {mutant.was}"
        path.write_text(text.replace(mutant.was, mutant.now), encoding="utf-8")
        code, failed = run_in(top, mutant.run)
        return "" if code == 0 else f"{code}: {failed}"


class Copied:
    """A copy of the code that runs, gone after the block."""

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        top = Path(self._folder.name)
        for name in ("distlab", "workers", "experiments", "engines"):
            shutil.copytree(
                TOP / name, top / name, symlinks=True
            )  # with its bytecode: a line that changes is compiled anew
        return top

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def run_in(top: Path, run: str) -> tuple[int, str]:
    """The exit code of the runs of the code in `top`, one `then` the other, up to the first that fails, and the claims
    that failed or the error that ended it."""
    code, said = 0, ""
    for settings in run.split(" then "):
        if code == 0:
            code, said = run_once(top, settings)
    return code, said


def run_once(top: Path, run: str) -> tuple[int, str]:
    """The same of one run."""
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", name)}
    settings = SMALL | dict(word.split("=", 1) for word in run.split())
    environ = clean | settings | {"LAB_RUNS_DIR": str(top / "runs"), "PYTHONPATH": str(top)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "workers"], cwd=top, env=environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=RUN_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 3, f"no end in {RUN_TIMEOUT_S} s"
    path = top / "runs" / "latest" / "run.json"
    if not path.exists():
        return done.returncode, done.stdout.strip().rpartition("\n")[2]
    return done.returncode, ", ".join(dict.fromkeys(words_of(json.loads(path.read_text(encoding="utf-8")))))


def words_of(run: dict[str, list[dict[str, str]]]) -> Iterator[str]:
    """What failed in a run: claims by name, else the error that ended a rank."""
    claims = [claim["name"] for claim in run["checks"] + run["comparisons"] if not claim["passed"]]
    yield from claims or [error["error"] for error in run["errors"]][:1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
