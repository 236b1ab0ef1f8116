"""`distlab drill SCRIPT`: check whether a script, or a mode of the lab, survives a kill and reads every sample once.

Exit codes: 0 every resume passed; 1 one failed; 2 refused; 130 stopped by Ctrl-C.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.lab.cluster.launch import check_open_file_limit, handle_stop_signals
from distlab.lab.config import Config, ConfigError, commands
from distlab.tools.check.start.command import (
    SHARED,
    CheckOptions,
    FileCommand,
    leading_options,
    own_variables,
    parse_words,
    quieten_torch,
    read_config,
)  # fmt: skip
from distlab.tools.drill import FAULTS

HELP = """usage: distlab drill [NAME=VALUE ...] [OPTION ...] SCRIPT [ARGS ...]
       distlab drill RUN_MODE=dp [NAME=VALUE ...] [OPTION ...]

Runs SCRIPT, or the module after -m, unchanged on WORLD_SIZE ranks to its end, twice. Then it runs the script with a
rank killed, and with a checkpoint interrupted by SIGKILL, by SIGTERM and by a full disk. After each fault it starts the
script again, and compares samples, weights, optimizer, learning rates and random states with those of the whole run.
Every run has a separate working folder, a copy of the script's. RUN_MODE tests one variant of a mode of the lab.

  --kill rank2@step7     the rank to kill, and the step of its optimizer, from 1; unset: the last rank, in the step
                         after a checkpoint near the middle of the run
  --resume 4,2           numbers of ranks to resume with after that kill; unset: WORLD_SIZE
  --faults kill,kill@save,term@save,disk@save
                         the faults to test; unset: all of these
  --resume-words "..."   arguments that a resumed script gets after its own, such as "--resume auto"
  --state DIR            a folder that the script writes to: each run gets a copy of it
  --json                 print the verdict as JSON

variables   WORLD_SIZE (4), {own};
            for a mode those of its runs
exit codes  0 every resume passed, 1 one failed, 2 refused, 130 stopped"""
VALUED = ("--kill", "--faults", "--resume", "--resume-words", "--state")


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if not words or words[0] in commands.HELP:
        print(HELP.format(own=", ".join(own_variables(CheckOptions))))
        return 0
    try:
        return run(words)
    except ConfigError as error:
        refused = [f"refused    {fault}" for fault in error.faults]
        text = json.dumps({"verdict": "refused", "why": error.faults}) if "--json" in words else "\n".join(refused)
        print(text, flush=True)
        return 2


def run(words: Sequence[str]) -> int:
    """Parse the arguments and test the script or mode; returns the exit code. Raises ConfigError."""
    found, settings, rest, faults = leading_options(words, VALUED, ("--json",))
    is_mode = any(each.startswith("RUN_MODE=") for each in settings)
    command = FileCommand("drill", HELP, "script", CheckOptions, SHARED)
    if is_mode:
        os.environ.update(commands.settings([*settings, *rest]))
        script, arguments, module = Path(), list[str](), ""
    else:
        environ, script, arguments, module = parse_words(command, [*settings, *rest])
        os.environ.update(environ)
    faults += ["RANK is set: drill starts its ranks itself, so unset it"] if "RANK" in os.environ else []
    typed = os.environ.get("WORLD_SIZE", "4")
    options, more = read_options(found, int(typed) if typed.isdecimal() else 8)
    faults += more
    config = Config.read(found_before=faults) if is_mode else read_config(command, os.environ, faults, script)
    check_open_file_limit(config.world_size)
    handle_stop_signals()
    quieten_torch()
    from distlab.tools.check.start.script import Job
    from distlab.tools.drill.drill import Options, drill
    from distlab.tools.drill.recording import watch

    if is_mode:
        from distlab.tools.drill.mode import job_of

        job = job_of(config, CheckOptions.model_fields["hang_after_s"].default)
    else:
        own: Any = config.own(CheckOptions)
        job = Job(script.resolve(), str(script), tuple(arguments), own.hang_after_s, "drill", own.every)
        job = job._replace(module=module, watch=watch)
    return drill(Options(**options), job, config.world_size, config.collective_timeout_s)


def read_options(found: dict[str, Any], size: int) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of Options, and a sentence per invalid option."""
    options: dict[str, Any] = {"as_json": "--json" in found}
    faults = []
    if "--kill" in found:
        rank, _, step = str(found["--kill"]).removeprefix("rank").partition("@step")
        if not (rank.isdecimal() and step.isdecimal() and int(rank) < size and int(step) >= 1):
            faults.append(
                f"--kill is {found['--kill']!r}: expected rank0 to rank{size - 1} and a step from 1: rank0@step7"
            )
        else:
            options["kill"] = int(rank), int(step)
    if "--resume" in found:
        sizes = str(found["--resume"]).split(",")
        if not all(each.isdecimal() and 1 <= int(each) <= 8 for each in sizes):
            faults.append(f"--resume is {found['--resume']!r}: expected numbers of ranks, 1 to 8, such as 4,2")
        else:
            options["resume"] = [int(each) for each in sizes]
    if "--faults" in found:
        options["faults"] = str(found["--faults"]).split(",")
        if not set(options["faults"]) <= set(FAULTS):
            faults.append(f"--faults is {found['--faults']!r}: expected any of {','.join(FAULTS)}")
    if "--resume-words" in found:
        try:
            options["resume_words"] = shlex.split(found["--resume-words"])
        except ValueError as error:
            faults.append(f"--resume-words is {found['--resume-words']!r}: {error}")
    if "--state" in found:
        state = Path(found["--state"])
        if state.exists() and not state.is_dir():
            faults.append(f"--state is {found['--state']!r}: expected a folder")
        options["state"] = state.resolve()
    return options, faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
