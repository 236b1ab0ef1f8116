"""Count what a reader has to open: `python -m tests.budget` prints lines and files by folder beside their budgets, the
largest files, and how many files a variant takes; `python -m tests.budget variants` prints the table of the variants.

What one opens for a variant is counted from the function that builds it: the files of all functions and classes that it
reaches by name, as far as they are defined in the mode's own folder or in the folder of its technique. Not counted is
what it calls of another folder (the optimizer, a collective, another technique), and the mode's `options.py`, whose
variables docs/variables.md explains.
"""

import dis
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import NamedTuple

from distlab.collectives.by_hand import ALGORITHMS, OVER_TCP
from distlab.config.settings import modes
from distlab.elastic.strategy import RescaledSurvivor, ShardedSurvivor, Survivor
from distlab.experiments.dp import line_lesson
from distlab.experiments.elastic import POLICIES
from distlab.experiments.elastic.recovery import Course
from distlab.experiments.largebatch import RECIPES
from distlab.experiments.largebatch.training import Trainee
from distlab.parameter_server.server import ParameterServer, Worker
from distlab.rank.mode_loader import load

TOP = Path(__file__).parent.parent
BUDGETS = {  # folders: lines, files
    "distlab + workers": (30_000, 190), "experiments": (12_000, 85), "benchmarks": (4_000, 40), "tests": (31_000, None),
}  # fmt: skip
LESSONS = "distlab.experiments"
TECHNIQUES = {
    "comm": "collectives", "dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel", "fsdp": "sharded",
    "cp": "context_parallel", "moe": "expert_parallel", "mesh": "mesh", "compress": "compression",
    "precision": "precision", "largebatch": "large_batch", "server": "parameter_server", "elastic": "elastic",
}  # fmt: skip
# Where one begins with a variant that its mode's own `run` makes.
BUILT_BY_RUN: dict[str, dict[str, object]] = {
    "comm": {"gloo": None, **ALGORITHMS, "tcp": (OVER_TCP["server"], OVER_TCP["pairs"])},
    "dp": {"means": line_lesson.means, "coordinator": line_lesson.coordinator},
    "elastic": {
        policy.name: (Course, ShardedSurvivor if policy.sharded else RescaledSurvivor if policy.rescaled else Survivor)
        for policy in POLICIES
    },
    "largebatch": {name: (recipe, Trainee) for name, recipe in RECIPES.items()},
    "server": dict.fromkeys(("ssp", "downpour"), (Worker, ParameterServer)),
}


class Opened(NamedTuple):
    """The files that one opens to follow a variant of a mode, the lesson first."""

    mode: str
    variant: str
    files: list[Path]

    @property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.files))


def python_files(folder: str) -> list[Path]:
    """The Python files below a folder; `rglob` follows no link."""
    return sorted((TOP / folder).rglob("*.py"))


def num_lines(path: Path) -> int:
    """Lines of a file, blank ones and comments included."""
    return path.read_text().count("\n")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def named_in(function: FunctionType) -> Iterator[object]:
    """The globals that a function names, and of a module that it names (`ring.all_reduce`) the attributes."""
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
    """What the cells of a closure hold; one that is not set yet has nothing."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def used_by(thing: object) -> Iterator[object]:
    """The objects that one meets in reading a function, class, partial, container or module, or an object's fields."""
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
    """The module of a function or class, of an object its class's, of a module itself."""
    if isinstance(thing, ModuleType):
        return thing.__name__
    owner = thing if isinstance(thing, (FunctionType, type)) else type(thing)
    return owner.__module__ or ""


def reached(start: Iterable[object], folders: tuple[str, ...]) -> set[Path]:
    """The files of all functions and classes in these folders that one comes to from `start`."""
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
    """What one opens for each variant of each mode, the lesson first, then its folder, then the technique's."""
    for mode in modes():
        folders = (f"{LESSONS}.{mode}", f"distlab.{TECHNIQUES.get(mode, mode)}")
        lesson = TOP / "experiments" / mode / "__init__.py"
        for variant in load(mode).variants:
            start = variant.build or BUILT_BY_RUN[mode][variant.name]
            others = reached([start], folders) - {lesson, lesson.with_name("options.py")}
            ordered = sorted(others, key=lambda path: (not path.is_relative_to(TOP / "experiments"), path))
            yield Opened(mode, variant.name, [lesson, *ordered])


def variants_table() -> str:
    """A row for all variants of a mode that take the same files: how many files and lines, and which beside the lesson."""
    rows = ["| mode | variants | files | lines | beside `experiments/MODE/__init__.py` |", "|---|---|---|---|---|"]
    alike: dict[tuple[str, tuple[Path, ...]], list[Opened]] = {}
    for opened in variants():
        alike.setdefault((opened.mode, tuple(opened.files)), []).append(opened)
    for (mode, (_, *files)), group in alike.items():
        names = ", ".join(f"`{opened.variant}`" for opened in group)
        which = ", ".join(f"`{path.relative_to(TOP)}`" for path in files) or "nothing"
        rows.append(f"| `{mode}` | {names} | {1 + len(files)} | {group[0].num_lines} | {which} |")
    return "\n".join(rows)


def summary() -> str:
    """Lines and files beside their budgets, the largest files, and the files that a variant takes."""
    rows = []
    for folders, (lines, files) in BUDGETS.items():
        paths = [path for folder in folders.split(" + ") for path in python_files(folder)]
        total = sum(map(num_lines, paths))
        rows.append(f"{folders:18} {total:6} lines, budget {lines:6}; {len(paths):3} files, budget {files or '-'}")
    product = [path for folder in ("distlab", "workers", "experiments") for path in python_files(folder)]
    rows.append(f"{'these without tests':18} {sum(map(num_lines, product)):6} lines in {len(product)} files")
    rows += [f"{num_lines(path):6} {path.relative_to(TOP)}" for path in sorted(product, key=num_lines)[:-6:-1]]
    num_files = [len(opened.files) for opened in variants()]
    rows.append(
        f"files opened for a variant: {max(num_files)} at most, {median(num_files):g} in the median of {len(num_files)}"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    print(variants_table() if "variants" in sys.argv else summary())
