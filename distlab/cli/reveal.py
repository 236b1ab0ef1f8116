"""Which bug a run had that LAB_BUG=mystery:7 injected: `distlab reveal runs/latest`, once you have guessed.

It tells the bug's name, what it breaks, and which check caught it. Exit codes: 0 told, 2 the run cannot be read or had
no injected bug.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distlab.cli.report import read_and_judge
from distlab.report.mystery import is_sealed, open_mistake
from distlab.report.reading import BrokenRecord
from distlab.report.records import Run
from distlab.report.sentences import claim_name, failures, seen_sentence
from distlab.report.table import wrapped


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the bug of a run; returns the exit code."""
    made = argparse.ArgumentParser(
        prog="distlab reveal",
        description="Tell which bug a run with LAB_BUG=mystery:7 had, what it breaks, and which check caught it.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/latest")
    folder = made.parse_args(arguments).run
    try:
        run, _ = read_and_judge(folder)
        told = reveal(run) if run["mistake"] else []
    except (BrokenRecord, OSError, ValueError) as error:
        print(f"refused    {error}", file=sys.stderr)
        return 2
    if not told:
        print(f"refused    {folder} had no injected bug: LAB_BUG was not set", file=sys.stderr)
        return 2
    print("\n".join(told))
    return 0


def reveal(run: Run) -> list[str]:
    """The lines that tell the injected bug of a run, and how it was seen."""
    hidden, mistake = is_sealed(run["mistake"]), open_mistake(run["mistake"])
    opened = run | {"mistake": mistake}
    asked = f"LAB_BUG={run['mistake']['name']} was {mistake['name']}" if hidden else f"LAB_BUG={mistake['name']}"
    others = sorted({claim_name(claim) for claim in failures(run) if claim["name"] != mistake["check"]})
    return [
        *wrapped("bug", f"{asked}: {mistake['what']}"),
        *wrapped("check", f"{mistake['check']} is meant to catch it"),
        *wrapped("seen", seen_sentence(opened)),
        *(wrapped("also", f"failed: {', '.join(others)}") if others else []),
        *wrapped("explain", f"make explain RUN_MODE={run['run_mode']} LAB_BUG={mistake['name']}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
