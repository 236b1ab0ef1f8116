"""docs/architecture.md: the layout matches the tree, and the layers match those of tests/test_imports.py."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import TOP, fenced, page
from tests.documents import spans
from tests.test_imports import ALLOWED

PAGE = page("architecture")
PACKAGE = TOP / "distlab"
GROUPS = ("techniques", "lab", "tools")
PARTS = [
    path.parent for name in ("*", *(f"{group}/*" for group in GROUPS)) for path in PACKAGE.glob(f"{name}/__init__.py")
]
FOLDERS = [path for path in PARTS if not path.is_symlink()]


def layers() -> dict[str, int]:
    """Return the number of each folder's layer, 0 at the top."""
    (text,) = re.findall(r"From the top: (.*?)\.\n", PAGE, re.DOTALL)
    return {name: number for number, layer in enumerate(text.split(" > ")) for name in spans(layer)}


def test_the_layout_lists_the_folders_and_files() -> None:
    drawn = [line.split()[0] for line in fenced(PAGE, "text") if line.startswith("  ")]
    folders = [f"{path.name}/" for path in FOLDERS]
    files = [path.name for folder in ("", "lab") for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"]
    assert sorted(drawn) == sorted(folders + files)


def test_the_top_folders_exist() -> None:
    named = re.findall(r"([\w/-]+/)(?=[, ])", "\n".join(line for line in fenced(PAGE, "text") if line[:1] != " "))
    assert [name for name in named if not (TOP / name).is_dir()] == []
    assert {"workers/", "experiments/", "distlab/", "tests/"} <= set(named)


def test_every_folder_has_a_layer() -> None:
    folders = {path.name for path in PARTS} - {"techniques", "tools"}
    assert set(layers()) == folders | {"benchmarks", "workers", "lab", "contract", "engines"}


def test_the_layers_agree_with_the_allowed_imports() -> None:
    number = layers()
    named = {place: re.sub(r"^distlab\.((lab|techniques|tools)\.)?", "", place) for place in ALLOWED}
    arrows = [(named[place], named.get(to, "")) for place, others in ALLOWED.items() for to in others]
    compared = [(upper, lower) for upper, lower in arrows if upper in number and lower in number]
    assert len(compared) > 50
    assert [(upper, lower) for upper, lower in compared if number[upper] > number[lower]] == []


NAMED = re.compile(r"(?<![\w*{}/.<-])((?:[a-z_]+/)*[a-z_]\w*\.py)\b")
BENCHMARK = re.compile(r"\bbenchmarks\.([a-z_]+)")
SOURCES = [*TOP.glob("distlab/**/*.py"), *TOP.glob("experiments/**/*.py")]
# The last three belong to the standard library; the code recognizes waits by them.
FILES = {path.name for path in (*SOURCES, *TOP.glob("tests/**/*.py"))} | {"threading.py", "queue.py", "selectors.py"}


def missing_files(source: str) -> list[str]:
    """Return the files and benchmarks that a source names, by path or by name, and that do not exist."""
    named = [name for name in NAMED.findall(source) if not name.startswith(("mine/", "torch/"))]
    files = [name for name in named if not ((TOP / name).exists() if "/" in name else name in FILES)]
    benchmarks = {path.stem for path in (TOP / "benchmarks").iterdir()}
    return files + [f"benchmarks.{name}" for name in BENCHMARK.findall(source) if name not in benchmarks]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TOP)))
def test_the_files_that_a_source_names_exist(path: Path) -> None:
    assert missing_files(path.read_text()) == []


def test_a_missing_file_is_found() -> None:
    named = "as buckets.py does, and distlab/techniques/data_parallel/strategy.py; see ring_buckets.py, data_parallel/buckets.py"
    assert missing_files(named) == ["ring_buckets.py", "data_parallel/buckets.py"]
    assert missing_files("`python -m\n# benchmarks.never`, and benchmarks.gpu or benchmarks.steps") == [
        "benchmarks.never"
    ]
