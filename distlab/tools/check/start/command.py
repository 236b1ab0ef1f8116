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

from distlab.lab.cluster.launch import heed_stops, launch, named_run, refuse_too_few
from distlab.lab.config import Config, ConfigError, commands, launchers
from distlab.lab.config.settings import Field, ModeOptions, suggest
from distlab.tools.check.start.fork_servers import ForkServer, is_one_for_all

SHARED = {
    "rank", "world_size", "master_addr", "master_port", "key", "local_rank", "threads", "runs_dir", "run_id",
    "join_timeout_s", "lost_after_s", "collective_timeout_s", "cpus", "memory", "log",
}  # fmt: skip


class FileOptions(ModeOptions):
    """The options of both commands."""

    hang_after_s: float = Field(
        5, alias="LAB_HANG_AFTER_S", ge=0.5, le=10**6, allow_inf_nan=False,
        description="seconds without progress after which ranks that wait for each other are called hung",
    )  # fmt: skip


class CheckOptions(FileOptions):
    """The variables of `check` only."""

    every: int = Field(
        100, alias="LAB_CHECK_EVERY", ge=1, le=10**9,
        description="optimizer steps from one comparison of the replicas' weights to the next",
    )  # fmt: skip
    mesh: str | None = Field(
        None, alias="LAB_MESH", pattern=r"^\w+:\d+(,\w+:\d+)*$",
        description="axes of the ranks, the outermost first, such as dp:2,tp:2; unset: those of the script's mesh",
    )  # fmt: skip
    requirements: str | None = Field(
        None, alias="LAB_REQUIREMENTS",
        description="pip's list of what the script needs, beside it, such as requirements.txt (containers alone)",
    )  # fmt: skip


class ProofOptions(FileOptions):
    """The variables of a proof, and the sizes of the lab's own model and batch if a file leaves them out."""

    sizes = {"width": 32, "depth": 2, "heads": 4, "seq": 16, "microbatches": 2, "batch": 16}  # noqa: RUF012

    requirements: str | None = Field(
        None, alias="LAB_REQUIREMENTS",
        description="pip's list of what the file needs, beside it, such as requirements.txt (containers alone)",
    )  # fmt: skip


class Errand(NamedTuple):
    """A command that runs a user's file on all ranks."""

    command: str
    help: str
    what: str  # the file, in words
    options: type[FileOptions]
    used: set[str]  # the fields of Config that it uses
    play: Callable[[Config], Any]  # makes the function that a rank's process runs from the settings
    job: Mapping[str, Any] = {}  # additional fields of the Job


def start(errand: Errand, words: Sequence[str]) -> int:
    """Run the file; return the exit code."""
    started_at = time.time()
    if not words or words[0] in commands.HELP:
        print(errand.help.format(own=", ".join(own_variables(errand.options))))
        return 0
    try:
        environ, script, arguments, module = understood(errand, words)
        os.environ.update(environ)
        engine = launchers.read_launcher(os.environ)
        os.environ.update(engine.variables)
        config = configured(errand, os.environ, engine.faults, script)
        if config.rank is None:
            refuse_too_few(config.world_size)
            heed_stops()
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", flush=True)
        return 2
    quieten_torch()
    servers = start_servers(config)
    from distlab.tools.check.start.script import Job

    shown = os.environ.get("DISTLAB_TYPED", str(script))
    own: FileOptions = config.own(errand.options)
    job = Job(script.resolve(), shown, tuple(arguments), own.hang_after_s, errand.command, play=errand.play(config))
    if isinstance(own, CheckOptions):
        job = job._replace(every=own.every, mesh=axes_of(own.mesh), module=module, **errand.job)

    def be_rank() -> int:
        mine = Config.read(usable(os.environ), options=errand.options).model_copy(update={"run_mode": errand.command})
        from distlab.tools.check.start.rank_supervisor import Rank

        told = engine.line if config.rank is not None else ""
        return Rank(
            mine, job, started_at, told, keep_server(servers, mine.rank or 0, forked=config.rank is None)
        ).live()

    if config.rank is not None:
        return be_rank()
    import distlab.tools.check.start.rank_supervisor  # noqa: F401  (torch, once for all ranks)
    from distlab.lab.rank.finish import complete

    with named_run(config) as folder:
        code = launch(config, be_rank)
        complete(code, folder)
    return code


def quieten_torch() -> None:
    """Set what torch reads at import, unless the user has set it."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCH_CPP_LOG_LEVEL", "ERROR"), ("KINETO_LOG_LEVEL", "6")):
        os.environ.setdefault(name, value)


def start_servers(config: Config) -> dict[int, ForkServer]:
    """Start one server per rank that this process starts or is, which import torch; none if all ranks share a hash
    seed."""
    if is_one_for_all():
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


def words_before(
    words: Sequence[str], valued: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    """Before a file: its options by name, and the settings; the file with all behind it; and what is wrong."""
    found: dict[str, str] = {}
    settings, rest, faults = list[str](), list(words), list[str]()
    while rest:
        name, equals, value = rest[0].partition("=")
        if name in valued:
            rest.pop(0)
            faults += [f"{name} has no value behind it"] if not (equals or rest) else []
            found[name] = value if equals or not rest else rest.pop(0)
        elif rest[0] in flags:
            found[rest.pop(0)] = ""
        elif equals and not name.startswith("-") and not Path(rest[0]).exists():
            settings.append(rest.pop(0))
        elif name.startswith("--") and name != "--help":
            allowed = ", ".join([*valued, *flags])
            faults.append(f"{rest.pop(0)} is no option of this command: allowed before the file are {allowed}")
        else:
            break
    return found, settings, rest, faults


def understood(errand: Errand, words: Sequence[str]) -> tuple[dict[str, str], Path, list[str], str]:
    """Return settings, file, its arguments, and its name if given by -m; raises ConfigError."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and "=" in rest[0] and not Path(rest[0]).exists():
        given |= commands.settings([rest.pop(0)])
    if not rest:
        usage = errand.help.partition("\n")[0].removeprefix("usage: ")
        raise ConfigError([f"no {errand.what} is named: {usage}"])
    if rest[0] == "-m" and errand.options is CheckOptions:
        name = rest[1] if len(rest) > 1 else ""
        return given, file_of(name), rest[2:], name
    return given, Path(rest[0]), rest[1:], ""


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
        raise ConfigError(
            [f"-m {module!r} is not there: expected the name of a module, as `python -m` takes it from here"]
        )
    return found[0]


def axes_of(mesh: str | None) -> list[tuple[str, int]]:
    parts = [each.partition(":") for each in (mesh or "").split(",") if each]
    return [(name, int(size)) for name, _, size in parts]


def usable(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the environment without variables of the lab's own runs."""
    return {name: value for name, value in environ.items() if name != "RUN_MODE"}


def configured(errand: Errand, environ: os._Environ[str], faults: Sequence[str], script: Path) -> Config:
    """Return the settings; raises ConfigError with all faults at once."""
    found = list(faults) + list(why_not(errand, script))
    config = Config.read(usable(environ), found, options=errand.options)
    strange = sorted(
        str(Config.model_fields[name].alias) for name in config.model_fields_set - errand.used - {"options"}
    )
    own: Any = config.own(errand.options)
    command = errand.command
    if own.requirements and "DISTLAB_TYPED" not in environ:
        where = f"./run {command}, or pip install it here"
        raise ConfigError([f"LAB_REQUIREMENTS is installed in containers alone: {where}"])
    if strange:
        raise ConfigError([f"{name} is of the lab's own runs: {command} runs your {errand.what}" for name in strange])
    return config.model_copy(update={"run_mode": errand.command})


def why_not(errand: Errand, script: Path) -> list[str]:
    if sys.platform != "linux":
        command = errand.command
        return [f"{command} needs Linux: `./run {command} {errand.what.upper()}` takes it into containers"]
    if not script.is_file():
        near = [each.name for each in script.parent.glob("*.py")] if script.parent.is_dir() else []
        return [f"{str(script)!r} is not there{suggest(script.name, near)}: expected the file of a Python script"]
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return [f"{str(script)!r} cannot be run{where}: {reason}"]
    return []
