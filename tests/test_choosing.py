"""docs/choosing.md: every row ends with an existing command, and every number equals its formula."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.plan import read_question
from distlab.lab.config.settings import modes
from tests.documents import TOP, faults, spans, tables

PAGE = (TOP / "docs" / "choosing.md").read_text()
ROWS = list(tables(PAGE))
FORMULAS = (
    "lab.measure.storages", "experiments.compress.predictions",
    *(f"techniques.{technique}.costs" for technique in (
        "collectives", "context_parallel", "pipeline_parallel", "sharded", "tensor_parallel"
    )),
)  # fmt: skip


def command_faults(command: str) -> list[str]:
    """Return the faults of the command at the end of a row."""
    if command == "./run plan --score":
        return []
    if command.startswith("./run plan "):
        read_question(command.removeprefix("./run plan ").split())  # raises what it refuses
        return []
    if command.startswith("RUN_MODE="):
        overlays = re.findall(r"-f (\S+)", command)
        return faults(command) + [fault for overlay in overlays for fault in faults(overlay)]
    if command.startswith("docker compose"):
        return [fault for overlay in re.findall(r"-f (\S+)", command) for fault in faults(overlay)]
    targets = re.findall(r"^(\w+):", Path(TOP / "Makefile").read_text(), re.MULTILINE)
    return [] if command.removeprefix("make ") in targets else [f"{command} is no command of the lab"]


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{heading}: {row[0][:40]}" for heading, row in ROWS])
def test_each_row_ends_with_an_existing_command(row: list[str]) -> None:
    (command,) = spans(row[-1])
    assert command_faults(command) == []
    assert [fault for span in spans(" ".join(row[:-1])) for fault in faults(span)] == []


def test_every_mode_has_a_row() -> None:
    named = set(re.findall(r"RUN_MODE=(\w+)", PAGE))
    assert named == set(modes())


def agrees(printed: str, formula: str) -> bool:
    """Return whether the formula equals the number, to the printed digits."""
    names: dict[str, Any] = {}
    for part in FORMULAS:
        names |= vars(importlib.import_module(f"distlab.{part}"))
    digits = len(printed.partition(".")[2])
    return bool(round(float(eval(formula, names)), digits) == float(printed))


NUMBERS = [row for heading, row in ROWS if heading == "Numbers"]


@pytest.mark.parametrize("row", NUMBERS, ids=[row[0][:40] for row in NUMBERS])
def test_each_number_equals_its_formula(row: list[str]) -> None:
    (formula,) = spans(row[2])
    assert agrees(row[1], formula)


def test_wrong_rows_are_found() -> None:
    assert not agrees("56", "mixed_precision_bytes(7e9) / 1e9")
    assert not agrees("0.274", "bubble(4, 8)")
    for command in (
        "RUN_MODE=ddp make run", "RUN_MODE=dp LAB_VARIANT=fast make run", "RUN_MODE=dp LAB_BUG=none make run",
        "RUN_MODE=dp LAB_SPEED=1 make run", "make coffee", "docker compose -f compose/absent.yaml up",
    ):  # fmt: skip
        assert command_faults(command), command
