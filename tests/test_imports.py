"""Who may import whom: five floors, no circle, no arrow that runs up."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent

# A place, and the places that it may import beside itself. `__main__` reaches an experiment by name alone.
FLOORS = {
    "workers.config": [],
    "workers.report": ["workers.config"],
    "workers.measure": ["workers.config"],
    "workers.workload": ["workers.config"],
    "workers.parallel": [],
    "workers.cluster": ["workers.config", "workers.measure.cgroup", "workers.report.records"],
    "workers.strategies": [
        "workers.config", "workers.parallel", "workers.workload",
        "experiments.fsdp.faults", "experiments.pp.faults", "experiments.pp.pretend",  # until mistakes are substitutions
    ],
    "workers.lab": [
        "workers.config", "workers.cluster.exchange", "workers.report", "workers.measure", "workers.workload",
        "workers.passes", "workers.checkpoint",
    ],
    "workers.checkpoint": ["workers.config", "workers.lab", "workers.workload", "workers.report", "workers.parallel.piece"],
    "workers.passes": [
        "workers.config", "workers.lab", "workers.measure", "workers.workload", "workers.report", "workers.parallel.phases",
        "workers.checkpoint",
    ],
    "workers.plan": [
        "workers.config", "workers.measure", "workers.report", "workers.workload",
    ],
    "workers.rank": [
        "workers.config", "workers.lab", "workers.cluster", "workers.measure", "workers.report", "workers.checkpoint",
    ],
    "experiments": [
        "workers.config", "workers.lab", "workers.parallel", "workers.measure.formulas", "workers.workload",
        "workers.strategies", "workers.passes", "workers.rank.fast_lane",
    ],
}  # fmt: skip

FILES = sorted([*TOP.glob("workers/**/*.py"), *TOP.glob("experiments/**/*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> set[str]:
    """The modules of the lab that a source imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("workers", "experiments")}


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def climbing(module: str, source: str) -> list[str]:
    """What `module` imports from a floor that it may not reach."""
    place = max((floor for floor in FLOORS if within(module, floor)), key=len, default=None)
    if place is None:
        return []
    own = ".".join(module.split(".")[:2]) if place == "experiments" else place  # experiments never import each other
    return [
        name for name in sorted(imported(source)) if not any(within(name, floor) for floor in [own, *FLOORS[place]])
    ]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_import_runs_up(path: Path) -> None:
    assert climbing(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("workers.parallel.buckets", "from workers.lab import Lab"),
        ("workers.report.judge", "import workers.measure.ledger"),
        ("experiments.dp.line", "from experiments.comm import ring"),
        ("workers.config", "def f():\n    import workers.lab"),
    ],
)
def test_an_import_that_runs_up_is_seen(module: str, source: str) -> None:
    assert climbing(module, source)


def test_parallel_imports_torch_and_its_siblings_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "workers"}
    for path in TOP.glob("workers/parallel/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_only_config_reads_the_environment() -> None:
    """launch.py may pass an environment on, rendezvous reads what torchrun sets, and __main__ sets what torch reads as it comes in."""
    readers = {
        module_name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert "workers.config" in readers
    assert readers <= {"workers.__main__", "workers.config", "workers.cluster.launch", "workers.cluster.rendezvous"}


@pytest.mark.parametrize("module", ["workers.report.judge", "workers.report.log"])
def test_the_report_imports_neither_torch_nor_plotly(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'plotly') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["plotly", "torch.distributed.checkpoint"])
def test_a_rank_imports_nothing_that_it_may_not_need(module: str) -> None:
    program = f"import sys, workers.rank.start, workers.passes.timed, experiments.dp; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
