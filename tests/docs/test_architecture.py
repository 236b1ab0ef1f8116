"""docs/architecture.md: the map is that of the house, and every variant of every mode is told in two files beside its
lesson at most."""

import re

from distlab.config.settings import modes
from distlab.rank.mode_loader import load
from tests.docs.pages import TOP, fenced, page
from tests.documents import spans, tables

PAGE = page("architecture")
MOST_BESIDE = 2


def test_the_map_names_what_stands_in_the_house_and_nothing_else() -> None:
    drawn = [line.split()[0] for line in fenced(PAGE, "text") if line.startswith("  ")]
    folders = [f"{path.parent.name}/" for path in TOP.glob("workers/*/__init__.py")]
    files = [path.name for path in TOP.glob("workers/*.py") if path.name != "__init__.py"]
    assert sorted(drawn) == sorted(folders + files)


def test_a_reader_opens_at_most_two_files_beside_the_lesson() -> None:
    told: dict[str, list[str]] = {}
    mode = ""
    for heading, (first, variants, beside) in tables(PAGE):
        if heading != "How many files one opens":
            continue
        mode = first.strip("`") or mode
        files = [span for span in spans(beside) if span.endswith(".py")]
        assert 0 < len(files) <= MOST_BESIDE or beside == "nothing", (mode, variants)
        told.setdefault(mode, []).extend(spans(variants))
    assert sorted(told) == modes()
    for name, named in told.items():
        lesson = load(name)
        assert sorted(named) == sorted(lesson.names), name


def test_every_folder_has_its_floor() -> None:
    (floors,) = re.findall(r"Floors from the top: (.*?)\.", PAGE, re.DOTALL)
    assert {path.parent.name for path in TOP.glob("workers/*/__init__.py")} <= set(spans(floors))
