"""The entry point of `distlab` and `python -m workers`: dispatch a command, by default `run`, a rank's whole path.

    arguments, environment -> Config -> rendezvous -> Lab -> distlab.experiments.<mode>.run(lab)
        -> runs/<run_id>/ -> report -> exit code

`run` with RANK in the environment is that rank; with neither RANK nor MASTER_ADDR it starts all ranks as local
processes. Any other command (`distlab report runs/latest`) is the module that distlab/lab/config/commands.py names.
Exit codes: 0 every check passed; 1 a check failed, an error was raised or the disk filled; 2 the settings were refused;
3 the cluster broke; 143 stopped by SIGTERM, 130 by Ctrl-C.
"""

import importlib
import os
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from distlab.lab.cluster.launch import LauncherPipe, check_open_file_limit, handle_stop_signals, launch, named_run
from distlab.lab.config import Config, ConfigError, Refusal, commands, launchers, user_code
from distlab.lab.config.settings import claim_run_id
from distlab.lab.report import standard_streams
from distlab.lab.report.progress import announcing
from distlab.lab.report.table import log_line

# torch's C++ code prints a backtrace with each warning, for example when a peer closes its connection: 7 to 11 lines
# per node under torchrun. Its profiler prints a greeting at level 5.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}

# On a GPU: a fixed order of sums (cuBLAS picks algorithms by its workspace), and float32 without TF32. By default NCCL
# ends a process with SIGABRT if a peer is lost or a collective takes too long: with these settings it aborts the call,
# the next call raises, and the watch names the lost rank.
ON_CUDA = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}  # fmt: skip


def main(words: Sequence[str] = ()) -> int:
    """Run the command that was typed, by default `run`; returns the exit code."""
    started_at = time.time()
    standard_streams.open_standard_streams()
    try:
        typed = commands.parse_words(words)
        os.environ.update(typed.settings)
        if typed.command in ("help", "version"):
            lines = commands.help_lines(*typed.words) if typed.command == "help" else [f"distlab {version()}"]
            return 1 if standard_streams.printed("\n".join(lines)) else 0
        if typed.command != "run":
            return be_module(commands.COMMANDS[typed.command].module, typed.words)
        return print_json(started_at) if typed.as_json else start(started_at)
    except Refusal as error:
        return refuse(error)
    except KeyboardInterrupt:
        return 130


def version() -> str:
    """Return the package's version, or an uninstalled checkout's own."""
    try:
        return metadata.version("distlab")
    except metadata.PackageNotFoundError:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        return str(tomllib.loads(text)["project"]["version"])


def refuse(error: Refusal) -> int:
    """Print the errors; returns the exit code."""
    for fault in error.faults:
        standard_streams.printed(log_line("refused", fault))
    return 2


def start(started_at: float) -> int:
    """Start a run with the environment's settings, or one rank of it; returns the exit code, raises ConfigError."""
    engine = launchers.read_launcher(os.environ)
    os.environ.update(engine.variables)
    os.environ[launchers.STARTED_BY] = launchers.starting_command(os.environ, sys.argv[0])
    return run(Config.read(found_before=engine.faults), started_at, engine.line)


def print_json(started_at: float) -> int:
    """Start a run that prints only run.json on standard output, and all else on standard error."""
    with standard_streams.output_as_errors():
        try:
            config = Config.read()
            if config.rank is not None or launchers.read_launcher(os.environ).variables:
                raise ConfigError(["--json prints a whole run, but an engine started this process as one rank of it"])
            os.environ["LAB_RUN_ID"] = config.run_id or claim_run_id(config.runs_dir, config.mode_name)
            verdict = config.runs_dir / os.environ["LAB_RUN_ID"] / "run.json"
            try:
                code = start(started_at)
            finally:
                with suppress(OSError):  # a run that was refused leaves no folder
                    verdict.parent.rmdir()
        except ConfigError as error:
            return refuse(error)
    written = verdict.is_file() and verdict.stat().st_mtime >= started_at  # not by an earlier run
    return 1 if written and standard_streams.printed(verdict.read_text().rstrip("\n")) else code


def run(config: Config, started_at: float, engine: str = "") -> int:
    """Start the ranks, or be one, as `engine` says; returns the exit code."""
    # torch.set_num_threads would limit only this thread, and gloo's thread, in which PyTorch's hooks compute, would use
    # all cores: there a QR of 32 columns has other bits, so replicas differed, depending on the thread of each hook.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (QUIET | (ON_CUDA if config.device == "cuda" else {})).items():
        os.environ.setdefault(name, value)
    if config.rank is None:
        return start_all(config)
    parent = LauncherPipe()  # reports a rank that dies while this one still imports torch
    with announcing("importing PyTorch", enabled=config.rank == 0 and config.log != "quiet"):
        from distlab.lab.rank.main import be_rank  # errors above are printed without waiting for it

    with user_code.exits_raised():
        return be_rank(config, started_at, parent, engine)


def start_all(config: Config) -> int:
    """Start all ranks as local processes, with their imports preloaded; raises ConfigError if they cannot
    be started."""
    check_open_file_limit(config.world_size)
    handle_stop_signals()
    with announcing("importing PyTorch", enabled=config.log != "quiet"):
        from distlab.lab.rank.finish import complete
        from distlab.lab.rank.main import import_for_ranks

    if sys.platform == "linux":  # there ranks are forked from this process
        with announcing("importing what the ranks need", enabled=config.log != "quiet"):
            import_for_ranks(config)
    with named_run(config) as folder:
        code = launch(config, main)
        complete(code, folder)
    return code


def be_module(module: str, words: Sequence[str]) -> int:
    """Run a command's module and return its exit code; a module may exit by itself.

    The exit code is 1 if its output cannot be written.
    """
    try:
        try:
            code: int = importlib.import_module(module).main(words)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not standard_streams.of_a_stream(error):
            raise
        print(log_line("broken", f"the output cannot be written: {standard_streams.silenced(error)}"), file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
