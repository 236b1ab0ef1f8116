"""Everything that a page refers to exists: pages, headings, files, commands, settings."""

import importlib.util
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from distlab.lab.config.commands import COMMANDS
from distlab.lab.config.variables import names
from tests.docs.pages import PAGES, TOP, anchors, fenced, page, page_id, prose
from tests.documents import faults, spans
from tests.tools.prove.planted import PLANTED

LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
WIDEST = 120
MOST_PAGES, PAGE_BYTES, DOCS_BYTES, WITHOUT_MODES_BYTES = 18, 16_384, 200_000, 150_000
VARIABLES = {*names(), "COMPOSE_FILE"}


def dead_links(text: str, folder: Path) -> list[str]:
    """Return links to a missing page or heading; links to other sites are not followed."""
    dead = []
    for link in LINK.finditer(prose(text)):
        path, anchor = link["path"], link["anchor"]
        if "://" in path:
            continue
        target = folder / path if path else None
        if target is not None and not target.exists():
            dead.append(path)
        elif anchor and anchor not in anchors(target.read_text() if target else text):
            dead.append(f"{path}#{anchor}")
    return dead


def command_faults(line: str) -> list[str]:
    """Return the targets, modules, files and variables of a shell line that do not exist."""
    wrong = []
    for part in line.split("&&"):
        words = shlex.split(part, comments=True)
        variables = [word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)]
        wrong += [f"there is no variable {name}" for name in variables if name not in VARIABLES]
        wrong += program_faults(words[len(variables) :])
    return wrong


def program_faults(words: list[str]) -> list[str]:
    """Return what a called program refers to and does not exist."""
    files = [name for option, name in pairwise(words) if option == "-f" and name != "-"]  # the standard input
    wrong = [f"{name} does not exist" for name in files if not (TOP / name).exists()]
    if words[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
        wrong += [f"make has no {word}" for word in words[1:] if "=" not in word and word not in targets]
    if words[:1] == ["./run"]:
        named = ".".join(words[1:2])
        wrong += missing_module(COMMANDS[named].module if named in COMMANDS else ".".join(["workers", *words[1:2]]))
    if "-m" in words and words[0] in ("python", "torchrun"):
        wrong += missing_module(words[words.index("-m") + 1])
    return wrong


def missing_module(name: str) -> list[str]:
    """Return a sentence if `python -m` could not run this module."""
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    return [] if found else [f"there is no module {name}"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_have_a_target(page: Path) -> None:
    assert dead_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_and_commands_exist(page: Path) -> None:
    named = [span for span in spans(prose(page.read_text())) if not span.startswith("python -m ")]
    assert [fault for span in named for fault in faults(span)] == []
    modules = re.findall(r"`python -m ([\w.]+\w)", prose(page.read_text()))
    assert [fault for module in modules for fault in missing_module(module)] == []
    assert [fault for line in fenced(page.read_text(), "sh") for fault in command_faults(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lines_are_not_too_long(page: Path) -> None:
    free = ("|", "<!--", "![")  # tables, comments and images
    lines = [line for line in prose(page.read_text()).splitlines() if not line.startswith(free)]
    assert [line for line in lines if len(line) > WIDEST] == []


def too_large(docs: Path) -> list[str]:
    """Return the pages of a folder that have too many bytes, and sums and numbers of pages that are too large."""
    sizes = {str(path.relative_to(docs)): path.stat().st_size for path in docs.glob("**/*.md")}
    without_modes = sum(size for name, size in sizes.items() if not name.startswith("modes"))
    bounds = [(name, size, PAGE_BYTES) for name, size in sizes.items()] + [
        ("all pages", sum(sizes.values()), DOCS_BYTES),
        ("all pages but the modes", without_modes, WITHOUT_MODES_BYTES),
        ("number of pages", sum("/" not in name for name in sizes), MOST_PAGES),
    ]
    return [f"{name}: {found:_}, at most {most:_}" for name, found, most in bounds if found > most]


def test_the_pages_are_short_and_few() -> None:
    """Move what does not fit: outputs to benchmarks/RESULTS.md, lists of files and tests to tests/coverage.toml."""
    assert too_large(TOP / "docs") == []


def test_pages_that_are_too_large_are_found(tmp_path: Path) -> None:
    for number in range(MOST_PAGES + 1):
        (tmp_path / f"{number}.md").write_text("a" * (PAGE_BYTES + 1))
    assert len(too_large(tmp_path)) == MOST_PAGES + 1 + 3, "each page, both sums, and the number of pages"


def test_the_readme_links_to_every_page() -> None:
    linked = {link["path"] for link in LINK.finditer((TOP / "README.md").read_text())}
    assert {str(page.relative_to(TOP)) for page in PAGES} - {"README.md"} <= linked


@pytest.mark.parametrize(
    "text", ["[a](docs/absent.md)", "[a](docs/running.md#absent)", "[a](#absent)", "# A b\n[a](#a-c)"]
)
def test_a_dead_link_is_found(text: str) -> None:
    assert dead_links(text, TOP)


def test_a_link_to_a_heading_is_followed() -> None:
    assert (
        dead_links("## A `b` c?\n[x](#a-b-c) [y](docs/running.md#exit-codes) [z](https://ui.perfetto.dev)", TOP) == []
    )


@pytest.mark.parametrize(
    "line",
    [
        "make coffee", "LAB_SPEED=1 make run", "./run absent runs/latest", "python -m workers.absent", "torchrun -m absent",
        "docker compose -f compose/absent.yaml up", "make run && make coffee",
    ],
)  # fmt: skip
def test_an_unknown_command_is_found(line: str) -> None:
    assert command_faults(line)


@pytest.mark.parametrize(
    "line",
    [
        "RUN_MODE=dp make run",
        "./run",
        "./run report runs/latest --figures x",
        "./run plan --params 7B",
        "python -m distlab.experiments",
    ],
)
def test_an_existing_command_has_no_fault(line: str) -> None:
    assert command_faults(line) == []


def test_the_page_lists_the_tested_bugs() -> None:
    _, _, bugs = page("prove").partition("| found in | what it is |\n|---|---|\n")
    assert re.findall(r"^\| ([^|]+) \| [^|]+ \|$", bugs, re.MULTILINE) == [planted.issue for planted in PLANTED]
