"""Who may import whom: floors, no arrow that runs up, and no circle of files. What is not allowed is denied, and no
file is exempt.

Imports inside of a function or under TYPE_CHECKING count like any other, and so do those by importlib.import_module: a
file that needs another to be understood stands above it. Only the modules in BY_NAME import what they are told to.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from pathlib import Path
from typing import TypeGuard

import pytest

TOP = Path(__file__).parent.parent

# A place, and the places that it may import beside itself.
FORMULAS, MEASURE, WORKLOAD = "workers.measure.formulas", "workers.measure", "workers.workload"
CONFIG, REPORT, PARALLEL, CLUSTER = "workers.config", "workers.report", "workers.parallel", "workers.cluster"
STORES = [f"{PARALLEL}.{name}" for name in ("handshake", "store", "store_host")]
STRATEGIES, CONTRACT, LAB, CHECKPOINT = "workers.strategies", "workers.contract", "workers.lab", "workers.checkpoint"
PASSES, RANK, PLAN, FAULTS = "workers.passes", "workers.rank", "workers.plan", "workers.faults"
COMPARED = [f"{MEASURE}.difference", f"{MEASURE}.hashing"]
BELOW_LAB = [CONFIG, CONTRACT, REPORT, PARALLEL, MEASURE, WORKLOAD, CLUSTER]
FLOORS: dict[str, list[str]] = {
    CONFIG: [],
    REPORT: [CONFIG],
    PARALLEL: [],
    MEASURE: [CONFIG],
    CLUSTER: [CONFIG, MEASURE, f"{REPORT}.records", f"{REPORT}.output", f"{PARALLEL}.store"],
    WORKLOAD: [CONFIG, f"{PARALLEL}.kept"],
    PLAN: [CONFIG, MEASURE, REPORT, WORKLOAD],
    CONTRACT: [CONFIG, MEASURE, PARALLEL, WORKLOAD],
    STRATEGIES: [CONFIG, PARALLEL, WORKLOAD],
    LAB: BELOW_LAB,
    CHECKPOINT: [*BELOW_LAB, LAB],
    FAULTS: [MEASURE],
    PASSES: [*BELOW_LAB, LAB, CHECKPOINT],
    RANK: [*BELOW_LAB, LAB, CHECKPOINT, FAULTS, PASSES, f"{STRATEGIES}.own"],
    "workers.explain": [CONFIG, CONTRACT, REPORT, FORMULAS, RANK],
    "workers.engine": [CONFIG],
    "workers.live": [CONFIG, REPORT],
    "workers.check": [CONFIG, REPORT, MEASURE, CLUSTER, *STORES, f"{RANK}.end", f"{RANK}.sections", f"{RANK}.start"],
    "workers.prove": [CONFIG, REPORT, CLUSTER, PARALLEL, WORKLOAD, "workers.check", *COMPARED],
    "workers.testing": ["workers.check", "workers.prove", f"{CLUSTER}", f"{PARALLEL}.dialling", *STORES],
    "workers.__main__": [CONFIG, CLUSTER, RANK, f"{REPORT}.output", "workers.live.beside"],
    "experiments": [
        CONFIG, CONTRACT, PARALLEL, FORMULAS, *COMPARED, f"{MEASURE}.order", WORKLOAD, STRATEGIES, LAB, PASSES,
        f"{CHECKPOINT}.mistakes",
    ],
    "experiments.__main__": [CONFIG, RANK],
    "ranklab": [CONTRACT, "workers.__main__", "workers.testing"],
    "benchmarks": ["workers", "experiments", "tests"],
    "engines": [CONFIG, f"{CLUSTER}.launch"],
}  # fmt: skip

# The modules that call importlib.import_module with a name that does not stand there, and what they reach by it.
BY_NAME = {
    "workers.rank.modes": "a lesson, by RUN_MODE",
    "workers.rank.imports": "torch's compiler and checkpoints",
    "workers.testing.rewriting": "a user's tests",
    "benchmarks.engines.__main__": "one of its siblings, as do the next two",
    "benchmarks.fuzz.__main__": "",
    "benchmarks.mutants.__main__": "",
}
PLACES = ("workers", "experiments", "ranklab", "benchmarks", "engines")
FILES = sorted(path for place in PLACES for path in TOP.glob(f"{place}/**/*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path.read_text() for path in FILES}


PACKAGES = {module_name(path) for path in FILES if path.name == "__init__.py"}


def imported(module: str, source: str) -> set[str]:
    """What a module imports of the project, at the top or inside a function: names of modules, and of what is in
    them."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{origin(module, node)}.{alias.name}" for alias in node.names}
        elif is_import_call(node) and isinstance(node.args[0], ast.Constant):
            names.add(str(node.args[0].value))
    return {name for name in names if name.split(".")[0] in (*PLACES, "tests")}


def origin(module: str, node: ast.ImportFrom) -> str:
    """The module from which `module` imports, in full where it stands there by dots."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def is_import_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it calls import_module or __import__."""
    if not isinstance(node, ast.Call):
        return False
    return ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")


def floor_of(module: str) -> str | None:
    return max((floor for floor in FLOORS if within(module, floor)), key=len, default=None)


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def climbing(module: str, source: str) -> list[str]:
    """What `module` imports from a floor that it may not reach; of a module on no floor, itself, unless it is empty."""
    place = floor_of(module)
    if place is None:
        return [module] if source.strip() else []
    own = ".".join(module.split(".")[:2]) if place == "experiments" else place  # lessons never import each other
    allowed = [own, *FLOORS[place]]
    return [name for name in sorted(imported(module, source)) if not any(within(name, floor) for floor in allowed)]


def graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The files that each file imports: of `from a.b import c` the file a.b.c if there is one, else a.b."""

    def file_of(name: str) -> str | None:
        return name if name in modules else (name.rpartition(".")[0] if name.rpartition(".")[0] in modules else None)

    return {
        module: {to for name in imported(module, text) if (to := file_of(name))} - {module}
        for module, text in modules.items()
    }


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of files of which each reaches every other; by what is left once all files that import nothing else are
    taken away."""
    left = {name: set(others) for name, others in arrows.items()}
    while leaves := [name for name, others in left.items() if not others & set(left)]:
        for name in leaves:
            del left[name]
    inside = {name: {to for to in others if to in left} for name, others in left.items()}
    return [sorted(inside)] if inside else []


@pytest.mark.parametrize("module", MODULES)
def test_no_import_runs_up(module: str) -> None:
    assert climbing(module, MODULES[module]) == []


def test_the_graph_of_files_has_no_circle() -> None:
    assert circles(graph(MODULES)) == []


def test_the_floors_have_no_circle() -> None:
    places = {place: {floor_of(to) or to for to in allowed} - {place} for place, allowed in FLOORS.items()}
    assert circles(places) == []


def test_no_other_module_imports_by_a_name_that_does_not_stand_there() -> None:
    callers = {
        module
        for module, source in MODULES.items()
        for node in ast.walk(ast.parse(source))
        if is_import_call(node) and not isinstance(node.args[0], ast.Constant)
    }
    assert callers == set(BY_NAME)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("workers.parallel.buckets", "from workers.lab import Lab"),
        ("workers.report.judge", "import workers.measure.ledger"),
        ("workers.strategies.replica", "from experiments.dp import mistakes"),
        ("workers.lab", "if TYPE_CHECKING:\n    from workers.checkpoint.saver import Saver"),
        ("experiments.dp.line", "from experiments.comm import ring"),
        ("workers.config", "def f():\n    import workers.lab"),
        ("experiments.dp.line", "from ..comm import ring"),
        ("workers.config", "importlib.import_module('workers.lab')"),
        ("workers.unknown", "from workers.config import Config"),
        ("workers.unknown", "import json"),  # a file on no floor fails, whatever it imports
    ],
)
def test_an_import_that_runs_up_is_seen(module: str, source: str) -> None:
    assert climbing(module, source)


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ({"workers.a": "from workers import b", "workers.b": "import workers.a"}, ["workers.a", "workers.b"]),
        (
            {"workers.a": "from workers.b import x", "workers.b": "def f():\n    from workers.a import y"},
            ["workers.a", "workers.b"],
        ),
        (
            {"workers.a": "from workers.b import x", "workers.b": "import_module('workers.a')"},
            ["workers.a", "workers.b"],
        ),
        ({"workers.a": "from .b import x", "workers.b": "from . import a"}, ["workers.a", "workers.b"]),
        ({"workers.a": "from workers.b import x", "workers.b": "from workers.c import x", "workers.c": ""}, []),
    ],
)
def test_a_circle_is_seen(modules: dict[str, str], found: list[str]) -> None:
    assert circles(graph(modules)) == ([found] if found else [])


def test_nothing_stays_loose_in_workers() -> None:
    loose = {path.name for path in (TOP / "workers").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "explain.py", "contract.py", "lab.py"}


def test_parallel_imports_torch_and_its_siblings_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "workers"}
    for path in TOP.glob("workers/parallel/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_only_config_reads_the_environment() -> None:
    """launch.py may pass an environment on, rendezvous reads what torchrun sets, and __main__ sets what torch reads as
    it comes in."""
    readers = {
        module
        for module, source in MODULES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert "workers.config" in readers
    readers = {reader for reader in readers if not within(reader, "benchmarks")}
    assert readers <= {
        "workers.__main__", "workers.config", "workers.cluster.launch", "workers.cluster.rendezvous",
        "workers.cluster.parent",  # the launcher's end of a socket
        "workers.rank.estimate",  # how many ranks a launcher put on this machine
        "workers.testing.preloaded", "workers.testing.rank", "workers.testing.rewriting",  # what torch and pytest read
        "workers.check.start",  # sets what torch reads as it comes in
        "workers.check.rank", "workers.check.meeting",  # what torchrun sets
        "workers.check.script",  # the script's own
        "engines.ray.job",  # which starts ranks with an environment of its own
    }  # fmt: skip


@pytest.mark.parametrize("module", ["workers.report.judge", "workers.report.log"])
def test_the_report_imports_neither_torch_nor_what_draws(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'pygal', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["pygal", "jinja2", "torch.distributed.checkpoint", "starlette", "uvicorn", "anyio"])
def test_a_rank_imports_nothing_that_it_may_not_need(module: str) -> None:
    """The launcher's part of the live page is there too: local ranks are forked from it."""
    program = (
        "import sys, workers.live.beside, workers.rank.start, workers.passes.timed, experiments.dp;"
        f" print({module!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_settings_are_read_without_torch() -> None:
    """A mode's own variables too, which stand in a lesson that imports torch."""
    program = (
        "import sys; from workers.config import Config; from workers.config.values import modes\n"
        "print([Config.read({'RUN_MODE': mode}).run_mode for mode in modes()] and 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
