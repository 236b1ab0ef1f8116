"""From the command line to the ranks: parse settings and file, then be a rank or start all of them.

`check` and `prove` share this code, each with its own variables besides those of a run. With RANK in the environment (a
container, torchrun, Slurm) this process is that rank; otherwise it starts WORLD_SIZE local ones.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from distlab.lab.cluster.launch import check_open_file_limit, handle_stop_signals, launch, named_run
from distlab.lab.config import Config, ConfigError, commands, launchers
from distlab.lab.config.settings import Field, ModeOptions, suggest
from distlab.tools.check.start.fork_servers import ForkServer, has_fixed_hash_seed

SHARED = {
    "rank", "world_size", "master_addr", "master_port", "key", "local_rank", "threads", "runs_dir", "run_id",
    "join_timeout_s", "lost_after_s", "collective_timeout_s", "cpus", "memory", "log",
}  # fmt: skip


class FileOptions(ModeOptions):
    """The options of both commands."""

    hang_after_s: float = Field(
        5, alias="LAB_HANG_AFTER_S", ge=0.5, le=10**6, allow_inf_nan=False,
        description="seconds without progress after which ranks that wait for each other count as hung",
    )  # fmt: skip


class CheckOptions(FileOptions):
    """The variables of `check` only."""

    every: int = Field(
        100, alias="LAB_CHECK_EVERY", ge=1, le=10**9,
        description="optimizer steps between two comparisons of the replicas' weights",
    )  # fmt: skip
    mesh: str | None = Field(
        None, alias="LAB_MESH", pattern=r"^\w+:\d+(,\w+:\d+)*$",
        description="axes of the ranks, the outermost first, such as dp:2,tp:2; unset: those of the script's mesh",
    )  # fmt: skip
    requirements: str | None = Field(
        None, alias="LAB_REQUIREMENTS",
        description="pip requirements file next to the script, such as requirements.txt (only in containers)",
    )  # fmt: skip


class ProofOptions(FileOptions):
    """The variables of a proof, and the sizes of the lab's own model and batch if a file leaves them out."""

    sizes = {"width": 32, "depth": 2, "heads": 4, "seq": 16, "microbatches": 2, "batch": 16}  # noqa: RUF012

    requirements: str | None = Field(
        None, alias="LAB_REQUIREMENTS",
        description="pip requirements file next to your file, such as requirements.txt (only in containers)",
    )  # fmt: skip


class FileCommand(NamedTuple):
    """A command that runs a user's file on all ranks."""

    name: str
    help: str
    file_kind: str  # "script" or "file"
    options: type[FileOptions]
    used: set[str]  # the fields of Config that it uses
    runner_for: Callable[[Config], Any] = lambda config: None  # noqa: ARG005  of the Job
    job_fields: Mapping[str, Any] = {}  # additional fields of the Job


def start(command: FileCommand, words: Sequence[str]) -> int:
    """Run the file; return the exit code."""
    started_at = time.time()
    if not words or words[0] in commands.HELP:
        print(command.help.format(own=", ".join(own_variables(command.options))))
        return 0
    try:
        environ, script, arguments, module = parse_words(command, words)
        os.environ.update(environ)
        engine = launchers.read_launcher(os.environ)
        os.environ.update(engine.variables)
        config = read_config(command, os.environ, engine.faults, script)
        if config.rank is None:
            check_open_file_limit(config.world_size)
            handle_stop_signals()
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", flush=True)
        return 2
    quieten_torch()
    servers = start_servers(config)
    from distlab.tools.check.start.script import Job

    shown = os.environ.get("DISTLAB_TYPED", str(script))
    own: FileOptions = config.own(command.options)
    runner = command.runner_for(config)
    job = Job(script.resolve(), shown, tuple(arguments), own.hang_after_s, command.name, runner=runner)
    if isinstance(own, CheckOptions):
        job = job._replace(every=own.every, mesh=parse_mesh(own.mesh), module=module, **command.job_fields)

    def run_rank() -> int:
        mine = Config.read(without_run_mode(), options=command.options).model_copy(update={"run_mode": command.name})
        from distlab.tools.check.start.rank_supervisor import RankSupervisor

        launcher = engine.line if config.rank is not None else ""
        return RankSupervisor(
            mine, job, started_at, launcher, keep_server(servers, mine.rank or 0, forked=config.rank is None)
        ).run()

    if config.rank is not None:
        return run_rank()
    import distlab.tools.check.start.rank_supervisor  # noqa: F401  (torch, once for all ranks)
    from distlab.lab.rank.finish import complete

    with named_run(config) as folder:
        code = launch(config, run_rank)
        complete(code, folder)
    return code


def quieten_torch() -> None:
    """Set what torch reads at import, unless the user has set it."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCH_CPP_LOG_LEVEL", "ERROR"), ("KINETO_LOG_LEVEL", "6")):
        os.environ.setdefault(name, value)


def start_servers(config: Config) -> dict[int, ForkServer]:
    """Start one server per rank that this process starts or is, which import torch; none if all ranks share a hash
    seed."""
    if has_fixed_hash_seed():
        return {}
    ranks = range(config.world_size) if config.rank is None else [config.rank]
    servers = {rank: ForkServer(["distlab.tools.check.start.script"]) for rank in ranks}
    for server in servers.values():
        server.start()
    return servers


def keep_server(servers: Mapping[int, ForkServer], rank: int, *, forked: bool) -> ForkServer | None:
    """Return this rank's server, in a process that the launcher has `forked` or an engine has started."""
    for other, server in servers.items():
        if other != rank:
            server.close()
        elif forked:
            server.adopt()
    return servers.get(rank)


def own_variables(options: type[FileOptions]) -> list[str]:
    return [str(field.alias) for field in options.model_fields.values()]


def leading_options(
    words: Sequence[str], valued: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    """Return the options before a file by name, the settings, the file and all words after it, and the faults."""
    options: dict[str, str] = {}
    settings, rest, faults = list[str](), list(words), list[str]()
    while rest:
        name, equals, value = rest[0].partition("=")
        if name in valued:
            rest.pop(0)
            faults += [f"{name} needs a value after it"] if not (equals or rest) else []
            options[name] = value if equals or not rest else rest.pop(0)
        elif rest[0] in flags:
            options[rest.pop(0)] = ""
        elif equals and not name.startswith("-") and not Path(rest[0]).exists():
            settings.append(rest.pop(0))
        elif name.startswith("--") and name != "--help":
            allowed = ", ".join([*valued, *flags])
            faults.append(f"{rest.pop(0)} is not an option of this command; allowed before the file: {allowed}")
        else:
            break
    return options, settings, rest, faults


def parse_words(command: FileCommand, words: Sequence[str]) -> tuple[dict[str, str], Path, list[str], str]:
    """Return settings, file, its arguments, and its name if named by -m; raises ConfigError."""
    settings: dict[str, str] = {}
    rest = list(words)
    while rest and "=" in rest[0] and not Path(rest[0]).exists():
        settings |= commands.settings([rest.pop(0)])
    if not rest:
        usage = command.help.partition("\n")[0].removeprefix("usage: ")
        raise ConfigError([f"no {command.file_kind} given; usage: {usage}"])
    if rest[0] == "-m" and command.options is CheckOptions:
        name = rest[1] if len(rest) > 1 else ""
        return settings, file_of(name), rest[2:], name
    return settings, Path(rest[0]), rest[1:], ""


def file_of(module: str) -> Path:
    """Return the file that `python -m MODULE` would run here, without importing packages; raises ConfigError."""
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path]) if first else None
    inside = [Path(each, *rest) for each in (spec and spec.submodule_search_locations) or ()]
    files = [each for place in inside for each in (place.with_suffix(".py"), place / "__main__.py")]
    if spec is not None and spec.origin and not rest and not inside:
        files = [Path(spec.origin)]
    found = [each for each in files if each.suffix == ".py" and each.is_file()]
    if not found:
        raise ConfigError([f"-m {module!r} does not exist: expected a module that `python -m` finds here"])
    return found[0]


def parse_mesh(mesh: str | None) -> list[tuple[str, int]]:
    parts = [each.partition(":") for each in (mesh or "").split(",") if each]
    return [(name, int(size)) for name, _, size in parts]


def without_run_mode() -> dict[str, str]:
    """Return the environment without RUN_MODE, which is a variable of the lab's own runs."""
    return {name: value for name, value in os.environ.items() if name != "RUN_MODE"}


def read_config(command: FileCommand, environ: os._Environ[str], faults: Sequence[str], script: Path) -> Config:
    """Return the settings; raises ConfigError with all faults at once."""
    found = list(faults) + list(script_faults(command, script))
    config = Config.read(without_run_mode(), found, options=command.options)
    strange = sorted(
        str(Config.model_fields[name].alias) for name in config.model_fields_set - command.used - {"options"}
    )
    own: Any = config.own(command.options)
    if own.requirements and "DISTLAB_TYPED" not in environ:
        instead = f"use ./run {command.name}, or pip install the requirements here"
        raise ConfigError([f"LAB_REQUIREMENTS works only in containers: {instead}"])
    if strange:
        where = f"{command.name} runs your {command.file_kind} and does not use it"
        raise ConfigError([f"{name} is a setting of the lab's own runs: {where}" for name in strange])
    return config.model_copy(update={"run_mode": command.name})


def script_faults(command: FileCommand, script: Path) -> list[str]:
    if sys.platform != "linux":
        return [f"{command.name} needs Linux; in containers: `./run {command.name} {command.file_kind.upper()}`"]
    if not script.is_file():
        near = [each.name for each in script.parent.glob("*.py")] if script.parent.is_dir() else []
        return [f"{str(script)!r} does not exist{suggest(script.name, near)}: expected a Python script"]
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return [f"{str(script)!r} cannot be run{where}: {reason}"]
    return []
