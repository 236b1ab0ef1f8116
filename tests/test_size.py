"""Limits on the amount of code: statements and files of each folder, and the files that a reader opens for a variant.

Statements are those of Python's grammar, so several on one line count as several. A commit that makes a folder larger
than its row in SIZES raises the row and explains why.

    python -m tests.test_size    prints the current rows of SIZES

The files of a variant are counted from the function that builds it: the files of all functions and classes that it
reaches by name in the folder of the mode or of its technique. Not counted are files of other folders (the optimizer, a
collective, another technique) and the mode's `options.py`, whose variables docs/variables.md explains.
"""

import ast
import dis
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import median
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import NamedTuple

import pytest

from distlab.experiments.elastic import POLICIES
from distlab.experiments.elastic.recovery import Course
from distlab.experiments.largebatch import RECIPES
from distlab.experiments.largebatch.training import Trainee
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from distlab.techniques.collectives.by_hand import ALGORITHMS
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.elastic.strategy import ShardedSurvivor, Survivor
from distlab.techniques.parameter_server.server import ParameterServer, Worker

TOP = Path(__file__).parent.parent
GROUPS = ("distlab/techniques", "distlab/lab", "distlab/tools")
WHOLE = ("distlab/cli", "experiments", "workers", "engines", "tests", "benchmarks")  # one row each
SIZES = {  # statements and files, at most
    "distlab": (276, 4),
    "distlab/techniques": (1, 1),
    "distlab/lab": (198, 2),
    "distlab/tools": (1, 1),
    "distlab/techniques/collectives": (1_125, 12),
    "distlab/techniques/compression": (238, 3),
    "distlab/techniques/context_parallel": (339, 5),
    "distlab/techniques/data_parallel": (233, 6),
    "distlab/techniques/elastic": (499, 4),
    "distlab/techniques/expert_parallel": (274, 3),
    "distlab/techniques/large_batch": (107, 1),
    "distlab/techniques/mesh": (302, 4),
    "distlab/techniques/parameter_server": (314, 3),
    "distlab/techniques/pipeline_parallel": (654, 7),
    "distlab/techniques/precision": (48, 1),
    "distlab/techniques/sharded": (545, 4),
    "distlab/techniques/tensor_parallel": (364, 4),
    "distlab/techniques/transport": (1_082, 7),
    "distlab/lab/checkpoint": (877, 8),
    "distlab/lab/cluster": (2_386, 16),
    "distlab/lab/config": (925, 7),
    "distlab/lab/measure": (1_240, 9),
    "distlab/lab/rank": (1_132, 9),
    "distlab/lab/report": (3_432, 26),
    "distlab/lab/verify": (1_658, 11),
    "distlab/lab/workload": (1_022, 7),
    "distlab/tools/check": (6_111, 47),
    "distlab/tools/drill": (807, 6),
    "distlab/tools/notebook": (474, 5),
    "distlab/tools/plan": (1_726, 15),
    "distlab/tools/prove": (2_690, 16),
    "distlab/tools/puzzle": (1_600, 43),
    "distlab/tools/ranks": (364, 4),
    "distlab/tools/testing": (242, 3),
    "distlab/cli": (1_163, 13),
    "experiments": (7_964, 89),
    "workers": (6, 2),
    "engines": (57, 1),
    "tests": (30_871, 535),
    "benchmarks": (2_419, 37),
}
MOST_FILES, MEDIAN_FILES, BUCKETED_LINES = 6, 3, 650
READ = {  # found by reading the code: files of the mode and of distlab/, without the lesson itself
    ("dp", "bucketed"): "data_parallel/buckets.py data_parallel/slow_link.py data_parallel/strategy.py",
    ("tp", "megatron"): "tensor_parallel/layers.py tensor_parallel/strategy.py",
    ("pp", "1f1b"): (
        "pipeline_parallel/pipeline.py pipeline_parallel/pretend.py pipeline_parallel/schedules.py"
        " pipeline_parallel/strategy.py pipeline_parallel/zero_bubble.py"
    ),
    ("fsdp", "zero3"): "sharded/flat_parameter.py sharded/zero.py",
    ("comm", "ring"): "collectives/point_to_point.py collectives/ring.py",
    ("moe", "ep"): "moe/predictions.py expert_parallel/layer.py expert_parallel/strategy.py",
}
LESSONS = "distlab.experiments"
TECHNIQUES = {
    "comm": "collectives", "dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel", "fsdp": "sharded",
    "cp": "context_parallel", "moe": "expert_parallel", "mesh": "mesh", "compress": "compression",
    "precision": "precision", "largebatch": "large_batch", "server": "parameter_server", "elastic": "elastic",
}  # fmt: skip
# Where a reader begins with a variant that its mode's own `run` builds.
BUILT_BY_RUN: dict[str, dict[str, object]] = {
    "comm": {"gloo": None, **ALGORITHMS, "tcp": (ALGORITHMS["server"], ALGORITHMS["direct"])},
    "elastic": {policy.name: (Course, ShardedSurvivor if policy.sharded else Survivor) for policy in POLICIES},
    "largebatch": {name: (recipe, Trainee) for name, recipe in RECIPES.items()},
    "server": {"downpour": (Worker, ParameterServer)},
}


class Opened(NamedTuple):
    """The files that a reader opens to follow a variant of a mode, the lesson first."""

    mode: str
    variant: str
    files: list[Path]

    @property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.files))


def folders() -> dict[str, list[Path]]:
    """Return the Python files of each folder with a row, without following links."""
    found = {f"{group}": sorted((TOP / group).glob("*.py")) for group in ("distlab", *GROUPS)}
    inside = [path for group in GROUPS for path in sorted((TOP / group).iterdir()) if path.is_dir()]
    for path in [*inside, *(TOP / name for name in WHOLE)]:
        if not path.is_symlink() and (files := sorted(path.rglob("*.py"))):
            found[path.relative_to(TOP).as_posix()] = files
    return found


def num_statements(source: str) -> int:
    """Count the statements of a source, nested ones and docstrings too, also several on one line."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))


def sizes() -> dict[str, tuple[int, int]]:
    """Return statements and files of each folder."""
    return {
        name: (sum(num_statements(path.read_text()) for path in files), len(files)) for name, files in folders().items()
    }


def num_lines(path: Path) -> int:
    """Count the lines of a file, with blank ones and comments."""
    return path.read_text().count("\n")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def named_in(function: FunctionType) -> Iterator[object]:
    """Yield the globals that a function names, and attributes of modules that it names (`ring.all_reduce`)."""
    for code in codes_in(function.__code__):
        last: object = None
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                last = function.__globals__.get(step.argval)
                yield last
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(last, ModuleType):
                last = getattr(last, step.argval, None)
                yield last
            else:
                last = None


def closed_over(function: FunctionType) -> Iterator[object]:
    """Yield the contents of a closure's cells, except empty ones."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def used_by(thing: object) -> Iterator[object]:
    """Yield the objects that a reader of a function, class, partial, container or object meets."""
    if isinstance(thing, FunctionType):
        yield from named_in(thing)
        yield from closed_over(thing)
        yield from (
            thing.__defaults__ or (),
            *(thing.__kwdefaults__ or {}).values(),
            getattr(thing, "__wrapped__", None),
        )
    elif isinstance(thing, (MethodType, classmethod, staticmethod)):
        yield thing.__func__
    elif isinstance(thing, property):
        yield thing.fget
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, type):
        yield from (*thing.__bases__, *vars(thing).values())
    elif isinstance(thing, (dict, MappingProxyType)):
        yield from thing.values()
    elif isinstance(thing, (tuple, list)):
        yield from thing
    else:
        yield from getattr(thing, "__dict__", {}).values()


def defined_in(thing: object) -> str:
    """Return the module of a function, of a class, or of an object's class; a module itself."""
    if isinstance(thing, ModuleType):
        return thing.__name__
    owner = thing if isinstance(thing, (FunctionType, type)) else type(thing)
    return owner.__module__ or ""


def reached(start: Iterable[object], folders: tuple[str, ...]) -> set[Path]:
    """Return the files of all functions and classes in these folders that are reachable from `start`."""
    found: set[Path] = set()
    waiting = list(start)
    seen: list[object] = []
    while waiting:
        thing = waiting.pop()
        module = defined_in(thing)
        inside = any(module == folder or module.startswith(folder + ".") for folder in folders)
        if any(thing is other for other in seen) or not (inside or module in ("builtins", "functools", "types")):
            continue
        if isinstance(thing, (type, str, bytes, int, float)) and not inside:
            continue
        seen.append(thing)
        if inside and isinstance(thing, (FunctionType, type)):
            found.add(Path(sys.modules[module].__file__ or "").resolve())
        waiting += used_by(thing)
    return found


def variants() -> Iterator[Opened]:
    """Yield the files to open for each variant of each mode: the lesson, then its folder, then the technique's."""
    for mode in modes():
        folders = (f"{LESSONS}.{mode}", f"distlab.techniques.{TECHNIQUES.get(mode, mode)}")
        lesson = TOP / "experiments" / mode / "__init__.py"
        for variant in load(mode).requested(()).variants:  # a lesson.py is one file
            start = variant.build or BUILT_BY_RUN[mode][variant.name]
            others = reached([start], folders) - {lesson, lesson.with_name("options.py")}
            ordered = sorted(others, key=lambda path: (not path.is_relative_to(TOP / "experiments"), path))
            yield Opened(mode, variant.name, [lesson, *ordered])


def test_no_folder_is_larger_than_its_row() -> None:
    """A commit that adds code raises the row and explains why."""
    found = sizes()
    assert set(found) == set(SIZES)
    larger = {
        name: f"{size}, the row has {SIZES[name]}" for name, size in found.items() if larger_than(size, SIZES[name])
    }
    assert larger == {}


def larger_than(size: tuple[int, int], row: tuple[int, int]) -> bool:
    return size[0] > row[0] or size[1] > row[1]


@pytest.mark.parametrize(("size", "expected"), [((5, 2), False), ((4, 1), False), ((6, 1), True), ((4, 3), True)])
def test_a_statement_or_a_file_more_is_larger(size: tuple[int, int], expected: bool) -> None:
    assert larger_than(size, (5, 2)) == expected


@pytest.mark.parametrize(
    "source", ["if a:\n    b = 1\n    c = 2\n", "if a: b = 1; c = 2", "if a:  # why\n\n  b = 1; c = 2\n"]
)
def test_denser_lines_do_not_lower_the_count(source: str) -> None:
    assert num_statements(source) == 3


@cache
def by_variant() -> dict[tuple[str, str], Opened]:
    return {(opened.mode, opened.variant): opened for opened in variants()}


def test_the_counted_files_are_the_expected_ones() -> None:
    for (mode, variant), expected in READ.items():
        lesson, *others = by_variant()[mode, variant].files
        assert lesson == TOP / "experiments" / mode / "__init__.py"
        assert " ".join("/".join(path.parts[-2:]) for path in others) == expected


def test_a_variant_spans_few_files() -> None:
    num_files = {key: len(opened.files) for key, opened in by_variant().items()}
    assert max(num_files.values()) <= MOST_FILES
    assert median(num_files.values()) <= MEDIAN_FILES
    assert by_variant()["dp", "bucketed"].num_lines <= BUCKETED_LINES


def test_closures_partials_and_classes_are_followed() -> None:
    buckets = TOP / "distlab/techniques/data_parallel/buckets.py"
    folders = ("distlab.techniques.data_parallel", __name__)

    def made(kind: type[GradientBuckets] = GradientBuckets) -> object:
        return kind

    def closing() -> object:
        return made

    class Derived(GradientBuckets):
        """A class of another file, reachable only through its base."""

    for start in (made, closing, partial(made), partial(print, kind=GradientBuckets), [{"a": Derived}]):
        assert buckets in reached([start], folders)
    assert reached([GradientBuckets], ("distlab.elsewhere",)) == set()


if __name__ == "__main__":
    print("\n".join(f'    "{name}": ({statements:_}, {files}),' for name, (statements, files) in sizes().items()))
