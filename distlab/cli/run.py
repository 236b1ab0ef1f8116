"""What `distlab` and `python -m workers` do: dispatch a command, by default `run`, the whole path of a rank.

    words, environment -> Config -> rendezvous -> Lab -> distlab.experiments.<mode>.run(lab)
        -> runs/<run_id>/ -> report -> exit code

`run` with RANK in the environment is that rank; with neither RANK nor MASTER_ADDR it starts all ranks as local
processes. Any other command (`distlab report runs/latest`) is the module that distlab/config/commands.py names. Exit
codes: 0 every check passed; 1 a check failed, an error was raised or the disk filled; 2 the settings were refused; 3
the cluster broke; 143 stopped by SIGTERM, 130 by Ctrl-C.
"""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from distlab.cluster.launch import LauncherPipe, refuse_too_few
from distlab.config import Config, ConfigError, commands, launchers
from distlab.report import standard_streams

# torch's C++ parts print a backtrace with each warning, as when a peer closes its end, 7 to 11 lines a node under
# torchrun; its profiler greets at level 5.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}


def main(words: Sequence[str] = ()) -> int:
    """Run the command that was typed, by default `run`; returns the exit code."""
    started_at = time.time()
    standard_streams.open_standard_streams()
    try:
        typed = commands.parse_words(words)
        os.environ.update(typed.settings)
        if typed.command == "help":
            return 1 if standard_streams.printed("\n".join(commands.help_lines(*typed.words))) else 0
        if typed.command != "run":
            return be_module(commands.COMMANDS[typed.command].module, typed.words)
        engine = launchers.read_launcher(os.environ)
        os.environ.update(engine.variables)
        return run(Config.read(found_before=engine.faults), started_at, engine.told)
    except ConfigError as error:
        for fault in error.faults:
            standard_streams.printed(f"refused    {fault}")
        return 2
    except KeyboardInterrupt:
        return 130


def run(config: Config, started_at: float, engine: str = "") -> int:
    """Start the ranks, or be one, as `engine` says; returns the exit code."""
    # torch.set_num_threads would bind this thread alone, and gloo's, in which PyTorch's hooks compute, would take all
    # cores: a QR of 32 columns has other bits there, so replicas differed with the thread that each rank's hook ran in.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if config.rank is None:
        return start_all(config)
    parent = LauncherPipe()  # hears of a rank that dies while this one still imports torch
    from distlab.rank.main import be_rank  # torch comes in here: faults above are said without waiting for it

    return be_rank(config, started_at, parent, engine)


def start_all(config: Config) -> int:
    """All ranks as local processes, with what each of them imports already there; raises ConfigError where they cannot
    be started."""
    refuse_too_few(config.world_size)
    from distlab.cluster.launch import launch
    from distlab.rank.finish import draw_missing
    from distlab.rank.main import import_for_ranks

    page: AbstractContextManager[None] = nullcontext()
    if config.live:
        from distlab.cli.live import served

        page = served(config)
    with page:
        if sys.platform == "linux":  # where ranks are forked from this process
            import_for_ranks(config)
        code = launch(config, main)
    draw_missing(code, config.runs_dir)
    return code


def be_module(module: str, words: Sequence[str]) -> int:
    """What `python -m MODULE WORDS` does; where it exits by itself, this does not return.

    What it prints is what it is called for: 1 where that cannot be written.
    """
    sys.argv = [module, *words]
    try:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not standard_streams.of_a_stream(error):
            raise
        print(f"broken     the output cannot be written: {standard_streams.silenced(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
