"""`ranklab check SCRIPT [ARGS]`: why a distributed script hangs, or sums garbage.

With RANK in the environment (a container, torchrun, Slurm) this process is that rank; else it starts WORLD_SIZE local
ones. Exit codes: 0 the script ended well and nothing was found; 1 a finding, or the script's own failure; 2 refused; 3
a rank was lost.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from workers.check import settings
from workers.config import Config, ConfigError, commands, engines

USED = {
    "rank", "world_size", "master_addr", "master_port", "key", "local_rank", "threads", "runs_dir", "run_id",
    "join_timeout_s", "lost_after_s", "collective_timeout_s", "cpus", "memory",
}  # fmt: skip
HELP = """usage: ranklab check [NAME=VALUE ...] SCRIPT [ARGS ...]

Runs SCRIPT unchanged on WORLD_SIZE ranks, as torchrun would, and says who waits for whom at which line, which calls do
not match, and who sent how many bytes to whom. In containers: ./run check SCRIPT; on ranks that torchrun starts:
torchrun --nproc-per-node 4 -m workers.check SCRIPT.

variables   WORLD_SIZE (4), {own}
            and those of a run that say where: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 it ended well and nothing was found, 1 a finding or the script's own failure, 2 refused, 3 a rank lost"""


def main(words: Sequence[str]) -> int:
    """Check the script; returns the exit code."""
    started_at = time.time()
    if not words or words[0] in commands.HELP:
        print(HELP.format(own=", ".join(own_variables())))
        return 0
    try:
        environ, script, arguments = understood(words)
        os.environ.update(environ)
        engine = engines.taken(os.environ)
        os.environ.update(engine.variables)
        config = configured(os.environ, engine.faults, script)
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", flush=True)
        return 2
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    for name, value in (("TORCH_CPP_LOG_LEVEL", "ERROR"), ("KINETO_LOG_LEVEL", "6")):
        os.environ.setdefault(name, value)
    from workers.check.script import Job
    from workers.cluster.launch import launch

    job = Job(
        script.resolve(),
        os.environ.get("RANKLAB_TYPED", str(script)),
        tuple(arguments),
        config.own(settings.Options).every,
    )

    def be_rank() -> int:
        own = Config.read(usable(os.environ), options=SETTINGS).model_copy(update={"run_mode": "check"})
        from workers.check.rank import Rank

        return Rank(own, job, started_at, engine.told if config.rank is not None else "").live()

    if config.rank is not None:
        return be_rank()
    import workers.check.rank  # noqa: F401  (torch, once for all ranks)

    return launch(config, be_rank)


SETTINGS = Path(settings.__file__)


def own_variables() -> list[str]:
    """The variables that check alone knows."""
    return [str(field.alias) for field in settings.Options.model_fields.values()]


def understood(words: Sequence[str]) -> tuple[dict[str, str], Path, list[str]]:
    """Settings, script and its words; raises ConfigError."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and "=" in rest[0] and not Path(rest[0]).exists():
        given |= commands.settings([rest.pop(0)])
    if not rest:
        raise ConfigError(["no script is named: ranklab check [NAME=VALUE ...] SCRIPT [ARGS ...]"])
    return given, Path(rest[0]), rest[1:]


def usable(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The environment without what only a run of the lab's own takes."""
    return {name: value for name, value in environ.items() if name != "RUN_MODE"}


def configured(environ: os._Environ[str], faults: Sequence[str], script: Path) -> Config:
    """The settings; raises ConfigError with all faults at once."""
    found = list(faults) + list(why_not(script))
    config = Config.read(usable(environ), found, options=SETTINGS)
    strange = sorted(str(Config.model_fields[name].alias) for name in config.model_fields_set - USED - {"options"})
    if config.own(settings.Options).requirements and "RANKLAB_TYPED" not in environ:
        raise ConfigError(["LAB_REQUIREMENTS is installed in containers alone: ./run check, or pip install it here"])
    if strange:
        raise ConfigError([f"{name} is of the lab's own runs: check runs your script" for name in strange])
    return config.model_copy(update={"run_mode": "check"})


def why_not(script: Path) -> list[str]:
    """Why this file cannot be run."""
    if sys.platform != "linux":
        return ["check needs Linux: `./run check SCRIPT` takes it into containers"]
    if not script.is_file():
        near = [each.name for each in script.parent.glob("*.py")] if script.parent.is_dir() else []
        from workers.config.values import suggest

        return [f"{str(script)!r} is not there{suggest(script.name, near)}: allowed is the file of a Python script"]
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return [f"{str(script)!r} cannot be run{where}: {reason}"]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
