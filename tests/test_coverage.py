"""tests/coverage.toml and docs/lessons.md cover all topics of the lessons, and everything that they name exists."""

import pytest

from distlab.lab.config.settings import modes
from tests.documents import TOP, coverage_rows, faults, names_a_file, points_somewhere, spans, tables

ROWS = coverage_rows()

# The modes of the README; how many things the lessons teach under each heading, how often they are wrong, and how many
# results they give formulas for: counted once, when the lessons were read.
TAUGHT = {
    "Modes": 14,
    "Concepts, systems, history": 8,
    "Data parallel": 19,
    "Model, pipeline, tensor, sharded": 9,
    "Optimisation": 4,
    "Communication lab": 6,
    "Operations": 5,
    "Tables, exercises, classic bugs": 4,
    "Where the lessons are wrong": 23,
    "Formulas": 19,
}
# Nothing about data may be missing.
COMPLETE = (
    "Modes",
    "Data parallel",
    "Optimisation",
    "Communication lab",
    "Tables, exercises, classic bugs",
    "Where the lessons are wrong",
)


def test_pages_and_commands_are_not_files_with_code() -> None:
    named = (
        "docs/choosing.md",
        "RUN_MODE=dp",
        "experiments/train/__init__.py",
        "compose/net.yaml",
        "workers/zero.py::Zero",
        "a.b",
    )
    assert [span for span in named if names_a_file(span)] == list(named[2:5])


def test_there_are_as_many_rows_as_topics() -> None:
    counted = {heading: sum(1 for other, _ in ROWS if other == heading) for heading, _ in ROWS}
    assert counted == TAUGHT
    for rows in (ROWS, tables((TOP / "docs" / "lessons.md").read_text())):
        numbers = [row[0] for heading, row in rows if heading == "Where the lessons are wrong"]
        assert numbers == [f"W{number}" for number in range(1, 24)]
    named = [row[0] for heading, row in ROWS if heading == "Modes"]
    assert sorted(named) == [f"`RUN_MODE={mode}`" for mode in modes()]


@pytest.mark.parametrize("heading", TAUGHT)
def test_everything_that_a_row_names_exists(heading: str) -> None:
    rows = [row for other, row in ROWS if other == heading]
    assert [fault for row in rows for span in spans(" ".join(row)) for fault in faults(span)] == []


@pytest.mark.parametrize("heading", TAUGHT)
def test_each_row_names_a_file_or_a_reason(heading: str) -> None:
    for row in (row for other, row in ROWS if other == heading):
        assert any(points_somewhere(span) for span in spans(" ".join(row))), row[0]
        assert heading not in COMPLETE or any(names_a_file(span) for span in spans(" ".join(row))), row[0]
        missing = " ".join(row).partition("not yet")[2]
        assert "not yet" not in " ".join(row) or (missing.startswith(": ") and len(missing) > 20), row[0]
        assert heading not in COMPLETE or "not yet" not in " ".join(row), row[0]


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ("workers/absent.py", "does not exist"),
        ("docs/", ""),
        ("absent.yaml", "does not exist"),
        ("tests/test_coverage.py::test_absent", "has no test_absent"),
        ("tests/test_coverage.py::TAUGHT", ""),
        ("RUN_MODE=absent", "no mode"),
        ("RUN_MODE=dp LAB_VARIANT=flat,absent", "no variant absent"),
        ("RUN_MODE=dp LAB_BUG=absent", "no LAB_BUG=absent"),
        ("RUN_MODE=dp LAB_ABSENT=1", "no variable LAB_ABSENT"),
        ("2(N-1)/N·S", ""),
    ],
)
def test_missing_names_are_found(span: str, words: str) -> None:
    found = faults(span)
    assert words in " ".join(found)
    assert bool(words) == bool(found)
