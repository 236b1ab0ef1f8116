"""The allowed imports: every folder has a layer, and neither imports from a higher layer nor cycles of files are allowed.

All files are checked. Imports inside a function or under TYPE_CHECKING count like any other, and so do those by
importlib.import_module. Only the modules in BY_NAME import by a computed name.
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

# Each place (a folder or module), and the other places that it may import.
D = "distlab"
CONFIG, REPORT, MEASURE, CLUSTER, WORKLOAD = (
    f"{D}.lab.{name}" for name in ("config", "report", "measure", "cluster", "workload")
)
CONTRACT = f"{D}.contract"
LAB, CHECKPOINT, VERIFY, RANK = (f"{D}.lab.{name}" for name in ("lab", "checkpoint", "verify", "rank"))
COLLECTIVES, TRANSPORT = f"{D}.techniques.collectives", f"{D}.techniques.transport"
MESSAGES = [f"{TRANSPORT}.{name}" for name in ("tcp", "handshake", "store", "store_server")]
GRID, PREDICTION = f"{D}.techniques.mesh.grid", f"{MEASURE}.prediction"
COMMON = [CONFIG, COLLECTIVES, WORKLOAD, PREDICTION, GRID]  # for all techniques
TECHNIQUES = [
    f"{D}.techniques.{name}"
    for name in (
        "data_parallel", "sharded", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "mesh",
        "compression", "precision", "large_batch", "parameter_server", "elastic",
    )
]  # fmt: skip
COSTS = [f"{place}.costs" for place in (COLLECTIVES, *TECHNIQUES)]
BELOW_LAB = [
    CONFIG,
    CONTRACT,
    REPORT,
    COLLECTIVES,
    TRANSPORT,
    MEASURE,
    WORKLOAD,
    CLUSTER,
    GRID,
    f"{D}.techniques.sharded",
    f"{D}.techniques.pipeline_parallel",
]
ALLOWED: dict[str, list[str]] = {
    CONFIG: [],
    REPORT: [CONFIG],
    MEASURE: [CONFIG],
    f"{TRANSPORT}.tcp": [],
    f"{TRANSPORT}.handshake": [],
    f"{TRANSPORT}.store_server": [f"{TRANSPORT}.handshake"],
    f"{TRANSPORT}.store": [f"{TRANSPORT}.handshake", f"{TRANSPORT}.store_server"],
    COLLECTIVES: [f"{TRANSPORT}.tcp", f"{TRANSPORT}.store"],
    TRANSPORT: [COLLECTIVES],
    CLUSTER: [
        CONFIG, MEASURE, *(f"{TRANSPORT}.{name}" for name in ("handshake", "store", "store_server")),
        *(f"{REPORT}.{name}" for name in ("reading", "records", "run_folder", "standard_streams", "terminal", "units")),
    ],
    WORKLOAD: [CONFIG, COLLECTIVES],
    GRID: [],
    f"{D}.techniques.data_parallel": COMMON,
    f"{D}.techniques.pipeline_parallel": COMMON,
    f"{D}.techniques.sharded": COMMON,
    f"{D}.techniques.tensor_parallel": [*COMMON, f"{D}.techniques.pipeline_parallel", f"{D}.techniques.sharded"],
    f"{D}.techniques.context_parallel": [*COMMON, *(f"{D}.techniques.{name}" for name in ("data_parallel", "pipeline_parallel", "tensor_parallel"))],
    f"{D}.techniques.expert_parallel": [*COMMON, f"{D}.techniques.data_parallel", f"{D}.techniques.sharded", f"{D}.techniques.tensor_parallel"],
    f"{D}.techniques.mesh": [*COMMON, *(f"{D}.techniques.{name}" for name in ("data_parallel", "pipeline_parallel", "precision", "sharded", "tensor_parallel"))],
    f"{D}.techniques.compression": COMMON,
    f"{D}.techniques.precision": COMMON,
    f"{D}.techniques.large_batch": COMMON,
    f"{D}.techniques.parameter_server": [*COMMON, f"{MEASURE}.tensors", f"{D}.techniques.data_parallel"],
    f"{D}.techniques.elastic": [*COMMON, TRANSPORT, f"{D}.techniques.data_parallel"],
    CONTRACT: [CONFIG, MEASURE, WORKLOAD],
    LAB: BELOW_LAB,
    CHECKPOINT: [*BELOW_LAB, LAB],
    VERIFY: [*BELOW_LAB, LAB, CHECKPOINT],
    RANK: [*BELOW_LAB, LAB, CHECKPOINT, VERIFY, f"{D}.techniques.data_parallel.strategy", f"{D}.techniques.tensor_parallel.costs"],
    f"{D}.tools.plan": [CONFIG, MEASURE, REPORT, WORKLOAD, *COSTS],
    f"{D}.tools.check": [],
    f"{D}.tools.check.watch": [MEASURE],
    f"{D}.tools.check.judge": [f"{D}.tools.check.watch", REPORT, f"{MEASURE}.traffic", CLUSTER],
    f"{D}.tools.check.dump": [f"{D}.tools.check.watch", f"{D}.tools.check.judge", REPORT, CLUSTER],
    f"{D}.tools.check.start": [
        f"{D}.tools.check.watch", f"{D}.tools.check.judge", CONFIG, REPORT, MEASURE, CLUSTER, *MESSAGES, RANK,
    ],
    f"{D}.tools.prove": [CONFIG, REPORT, MEASURE, CLUSTER, TRANSPORT, f"{COLLECTIVES}.plain_values", WORKLOAD, GRID, f"{D}.tools.check"],
    f"{D}.tools.drill": [CONFIG, REPORT, MEASURE, CLUSTER, CONTRACT, LAB, CHECKPOINT, VERIFY, RANK, f"{D}.tools.check", f"{D}.tools.prove"],
    f"{D}.tools.ranks": [CONFIG, f"{D}.tools.check", CLUSTER, TRANSPORT],
    f"{D}.tools.testing": [CONFIG, f"{D}.tools.check", f"{D}.tools.prove", f"{D}.tools.ranks"],
    f"{D}.tools.puzzle": [REPORT, MEASURE, f"{D}.tools.check", f"{D}.tools.ranks"],
    f"{D}.cli": [
        CONFIG, CONTRACT, REPORT, CLUSTER, MEASURE, WORKLOAD, RANK, CHECKPOINT, *COSTS,
        *(f"{D}.tools.{name}" for name in ("plan", "check", "prove", "drill", "puzzle", "testing")),
    ],
    f"{D}.experiments": [
        *COMMON, MEASURE, CONTRACT, LAB, VERIFY, TRANSPORT, *TECHNIQUES, f"{CHECKPOINT}.bugs",
        *(f"{CLUSTER}.{name}" for name in ("membership", "messages", "views")),  # elastic's members
    ],
    f"{D}.experiments.__main__": [CONFIG, RANK, f"{CHECKPOINT}.bugs"],
    D: [CONTRACT, f"{D}.cli", f"{D}.tools.testing", f"{D}.tools.puzzle"],
    "workers": [f"{D}.cli"],
    "benchmarks": [D, "tests"],
    f"{D}.engines": [CONFIG, f"{CLUSTER}.launch"],
}  # fmt: skip

# The modules that call importlib.import_module with a computed name, and what they import by it.
BY_NAME = {
    "distlab.lab.rank.mode_loader": "the mode of RUN_MODE; torch's compiler and checkpoints",
    "distlab.tools.testing.rank": "a user's tests",
    "distlab.cli.run": "the module of a command",
    "benchmarks.engines.__main__": "one of its siblings",
}
PLACES = ("distlab", "workers", "benchmarks")
LINKED = ("distlab/experiments", "distlab/engines")  # which `**` does not follow
FILES = sorted(path for place in (*PLACES, *LINKED) for path in TOP.glob(f"{place}/**/*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path.read_text() for path in FILES}


PACKAGES = {module_name(path) for path in FILES if path.name == "__init__.py"}


def imported(module: str, source: str) -> set[str]:
    """Return the project's modules and names that a module imports, at the top or inside a function."""
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
    """Return the full name of the module from which `module` imports, also for relative imports."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def is_import_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether the node calls import_module or __import__."""
    if not isinstance(node, ast.Call):
        return False
    return ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")


def layer_of(module: str) -> str | None:
    return max((layer for layer in ALLOWED if within(module, layer)), key=len, default=None)


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def upward_imports(module: str, source: str) -> list[str]:
    """Return the imports of `module` that its layer does not allow; for a non-empty module without a layer, itself."""
    place = layer_of(module)
    if place is None:
        return [module] if source.strip() else []
    own = ".".join(module.split(".")[:3]) if place == f"{D}.experiments" else place  # lessons never import each other
    allowed = [own, *ALLOWED[place]]
    return [name for name in sorted(imported(module, source)) if not any(within(name, layer) for layer in allowed)]


def graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that each file imports: for `from a.b import c` the file a.b.c if it exists, else a.b."""

    def file_of(name: str) -> str | None:
        return name if name in modules else (name.rpartition(".")[0] if name.rpartition(".")[0] in modules else None)

    return {
        module: {to for name in imported(module, text) if (to := file_of(name))} - {module}
        for module, text in modules.items()
    }


def cycles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return import cycles: the files that remain after files without remaining imports are removed repeatedly."""
    left = {name: set(others) for name, others in arrows.items()}
    while leaves := [name for name, others in left.items() if not others & set(left)]:
        for name in leaves:
            del left[name]
    inside = {name: {to for to in others if to in left} for name, others in left.items()}
    return [sorted(inside)] if inside else []


LEAST_LINES = 60
# The settings read a mode's options.py by its path, and Python the others.
BY_PATH = ("options", "__main__", "__init__")


def parts_of_another(modules: Mapping[str, str]) -> dict[str, str]:
    """Return short files that only one file imports, which could contain them; without files that are run directly."""
    importers: dict[str, list[str]] = {}
    for module, others in graph(modules).items():
        for other in others:
            importers.setdefault(other, []).append(module)
    return {
        module: found[0]
        for module, found in importers.items()
        if len(found) == 1
        and len(modules[module].splitlines()) < LEAST_LINES
        and module not in PACKAGES
        and not module.endswith(BY_PATH)
        and 'if __name__ == "__main__":' not in modules[module]
    }


def test_no_file_with_one_importer_is_short() -> None:
    assert parts_of_another({name: text for name, text in MODULES.items() if within(name, D)}) == {}


def test_a_short_file_with_one_importer_is_found() -> None:
    apart = {"a": "import distlab.b, distlab.c", "distlab.b": "import distlab.c", "distlab.c": "x = 1"}
    assert parts_of_another(apart) == {"distlab.b": "a"}
    assert parts_of_another(apart | {"distlab.b": apart["distlab.b"] + LEAST_LINES * "\n"}) == {}


@pytest.mark.parametrize("module", MODULES)
def test_no_import_goes_to_a_higher_layer(module: str) -> None:
    assert upward_imports(module, MODULES[module]) == []


def test_the_import_graph_of_files_has_no_cycle() -> None:
    assert cycles(graph(MODULES)) == []


def test_the_import_graph_of_layers_has_no_cycle() -> None:
    places = {place: {layer_of(to) or to for to in allowed} - {place} for place, allowed in ALLOWED.items()}
    assert cycles(places) == []


def test_techniques_import_the_workload_and_only_tools_import_tools() -> None:
    """From the lab a technique may import the settings, the workload, and the types of the meters."""
    known = (CONFIG, WORKLOAD, MEASURE, CONTRACT, f"{D}.techniques")
    for place, allowed in ALLOWED.items():
        if within(place, f"{D}.techniques"):
            assert all(any(within(to, layer) for layer in known) for to in allowed), place
        if within(place, f"{D}.lab") or within(place, f"{D}.techniques"):
            assert not any(within(to, f"{D}.tools") or within(to, f"{D}.cli") for to in allowed), place
        if within(place, f"{D}.tools"):
            assert not any(within(to, f"{D}.cli") or within(to, f"{D}.experiments") for to in allowed), place


def test_only_listed_modules_import_by_a_computed_name() -> None:
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
        ("distlab.techniques.data_parallel.buckets", "from distlab.lab.lab import Lab"),
        ("distlab.lab.report.verdict", "import distlab.lab.measure.traffic"),
        ("distlab.techniques.data_parallel.strategy", "from distlab.experiments.dp import mistakes"),
        ("distlab.lab.lab", "if TYPE_CHECKING:\n    from distlab.lab.checkpoint.save import Saver"),
        ("distlab.experiments.dp.checks", "from distlab.experiments.comm import ring"),
        ("distlab.lab.config", "def f():\n    import distlab.lab.lab"),
        ("distlab.experiments.dp.checks", "from ..comm import ring"),
        ("distlab.lab.config", "importlib.import_module('distlab.lab.lab')"),
        ("elsewhere.unknown", "from distlab.lab.config import Config"),
        ("elsewhere.unknown", "import json"),  # a file without a layer fails, whatever it imports
    ],
)
def test_an_import_to_a_higher_layer_is_found(module: str, source: str) -> None:
    assert upward_imports(module, source)


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
def test_a_cycle_is_found(modules: dict[str, str], found: list[str]) -> None:
    assert cycles(graph(modules)) == ([found] if found else [])


def test_workers_only_starts_the_command() -> None:
    files = [*(TOP / "workers").glob("*.py"), TOP / "workers" / "entrypoint.sh"]
    there = {path for path in (TOP / "workers").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert there == set(files)
    assert sum(path.read_text().count("\n") for path in files) <= 150


def test_a_technique_imports_only_torch_and_the_lab() -> None:
    lab = set(sys.stdlib_module_names) | {"torch", "distlab"}
    for folder in (COLLECTIVES, TRANSPORT, *TECHNIQUES):
        allowed = lab | {"msgspec"} if folder == TRANSPORT else lab  # converts messages to typed fields
        for path in (TOP / folder.replace(".", "/")).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                assert {name.split(".")[0] for name in names} <= allowed, path


def test_only_config_reads_the_environment() -> None:
    """launch.py may pass on an environment, join.py reads torchrun's variables, and __main__ sets variables before
    torch is imported."""
    readers = {
        module
        for module, source in MODULES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert "distlab.lab.config" in readers
    readers = {reader for reader in readers if not within(reader, "benchmarks")}
    assert readers <= {
        "distlab.cli.run", "distlab.lab.config", "distlab.lab.config.launchers", "distlab.lab.cluster.launch", "distlab.lab.cluster.join",
        "distlab.lab.rank.preflight",  # how many ranks a launcher put on this machine
        "distlab.lab.report.terminal",  # NO_COLOR and TERM
        "distlab.tools.ranks.preloaded", "distlab.tools.ranks.rank", "distlab.tools.testing.rank",  # what torch and pytest read
        "distlab.cli.drill", "distlab.tools.check.start.command",  # set what torch reads when it is imported
        "distlab.tools.drill.mode",  # sets what its ranks read
        "distlab.tools.check.start.rank_supervisor",  # what torchrun sets
        "distlab.tools.check.start.script",  # what torchrun sets, and the script's own
        "distlab.tools.check.start.fork_servers",  # whether all ranks have the same PYTHONHASHSEED
        "distlab.tools.check.watch.spawned_ranks",  # what a script that starts its own ranks sets again
        "distlab.tools.check.watch.cuda_stand_in",  # what frameworks read, and the ranks of this machine
        "distlab.engines.ray.job",  # starts ranks with their own environment
    }  # fmt: skip


@pytest.mark.parametrize("module", ["distlab.lab.report.verdict", "distlab.lab.report.log"])
def test_the_report_imports_neither_torch_nor_the_charts(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'pygal', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_rank_imports_no_optional_module() -> None:
    others = ["pygal", "jinja2", "torch.distributed.checkpoint"]
    program = (
        "import sys, distlab.lab.rank.main, distlab.lab.verify.timed, distlab.experiments.dp;"
        f" print([name for name in {others} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_are_read_without_torch() -> None:
    """A mode's own variables too, although its lesson imports torch."""
    program = (
        "import sys; from distlab.lab.config import Config; from distlab.lab.config.settings import modes\n"
        "print([Config.read({'RUN_MODE': mode}).run_mode for mode in modes()] and 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
