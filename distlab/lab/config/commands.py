"""The command line: `distlab COMMAND ...`, `./run COMMAND ...` and `python -m workers COMMAND ...` are equivalent.

COMMANDS lists each command once; `./run` reads these lines too. `run` and `explain` take settings as arguments, and a
mode by its name or path alone: `run dp WORLD_SIZE=3` is RUN_MODE=dp WORLD_SIZE=3 in the environment. All other commands
parse their own arguments.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import GONE, modes, suggest

HELP = ("-h", "--help", "help")
RUN_OPTIONS = ("--quiet", "--json")
EXIT_CODES = (
    "0 every check passed, 1 a check failed, 2 refused, 3 the cluster broke, 128+n killed by a signal, 143 stopped"
)
MORE_HELP = (
    "`distlab COMMAND --help` prints the options of a command, `distlab --version` the version. `./run COMMAND` runs it in"
    " containers if a Docker engine answers."
)
RUN_HELP = [
    "--quiet     print only the verdict, as LAB_LOG=quiet does",
    "--json      print run.json on the standard output, and the ranks' lines on the standard error",
]


class Command(NamedTuple):
    """The module of a command, one line of help, whether its arguments are settings, and whether help lists it."""

    module: str
    what: str
    takes_settings: bool = False
    for_users: bool = True


COMMANDS = {
    "run": Command("distlab.cli.run", "start WORLD_SIZE ranks of a mode, prove and measure its variants", takes_settings=True),
    "explain": Command("distlab.cli.explain", "print the description of a mode; with LAB_BUG what that bug breaks", takes_settings=True),
    "check": Command("distlab.cli.check", "run your own script on WORLD_SIZE ranks, and explain hangs and wrong results"),
    "prove": Command("distlab.cli.prove", "compare your own model or strategy on N ranks with one process"),
    "drill": Command("distlab.cli.drill", "test whether your training script survives a kill and reads each sample once"),
    "puzzle": Command("distlab.cli.puzzle", "write strategies yourself; each is judged on real ranks"),
    "plan": Command("distlab.cli.plan", "compare all strategies for a model on paper, and recommend one"),
    "report": Command("distlab.cli.report", "judge a finished run again, compare two, or remove old ones"),
    "checkpoint": Command("distlab.cli.checkpoint", "export a checkpoint as one file that torch.load opens"),
    "engine": Command("distlab.cli.engine", "print the manifest of an engine (Kubernetes) for a number of ranks"),
    "fit": Command("distlab.cli.fit", "the sizes of `make fit`, and its verdict", for_users=False),
}  # fmt: skip


class Typed(NamedTuple):
    """One command: its remaining arguments, and the variables from its settings."""

    command: str
    words: Sequence[str] = ()
    settings: Mapping[str, str] = MappingProxyType({})
    as_json: bool = False  # only run.json on the standard output


def parse_words(words: Sequence[str]) -> Typed:
    """Return the command in `words`: "help" or "version" if requested and "run" without any; raises ConfigError for an
    unknown argument."""
    if words and words[0] in HELP:
        return Typed("help")
    if list(words) == ["--version"]:
        return Typed("version")
    if words and words[0] in GONE:
        raise ConfigError([f"{words[0]}: {GONE[words[0]]}"])
    named = bool(words) and words[0] in COMMANDS
    command, rest = (words[0], words[1:]) if named else ("run", words)
    if not COMMANDS[command].takes_settings:
        return Typed(command, rest)
    if any(word in HELP for word in rest):
        return Typed("help", [command])
    options = [word for word in rest if word in RUN_OPTIONS and command == "run"]
    found = settings([word for word in rest if word not in options], [] if named else commands_for_users())
    quiet = {"LAB_LOG": "quiet"} if "--quiet" in options else {}
    return Typed(command, (), quiet | found, as_json="--json" in options)


def commands_for_users() -> list[str]:
    return [name for name, command in COMMANDS.items() if command.for_users]


def settings(words: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables in the arguments; raises ConfigError with a sentence for each that is neither a variable nor
    one of `commands`."""
    variables = [field.alias for field in Config.model_fields.values() if field.alias]
    found: dict[str, str] = {}
    faults = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (name in variables or name.startswith("LAB_")):
            found[name] = value
        elif equals:
            faults.append(f"{name} is not a variable of the lab{suggest(name, variables)}")
        elif "/" not in word and word not in modes():
            kinds, known = ("a command or a mode" if commands else "a mode"), [*commands, *modes()]
            allowed = f"allowed: {', '.join(known)}, the path of a mode, or NAME=VALUE"
            faults.append(f"{word!r} is not {kinds}{suggest(word, known)}, {allowed}")
        elif "RUN_MODE" in found:
            faults.append(f"{word!r} and RUN_MODE={found['RUN_MODE']!r} are two modes: a run has only one")
        else:
            found["RUN_MODE"] = word
    if faults:
        raise ConfigError(faults)
    return found


def help_lines(command: str | None = None) -> list[str]:
    """Return the help for all commands, or for one that takes settings."""
    if command is None:
        offered = (f"  {name:<12}{COMMANDS[name].what}" for name in commands_for_users())
        lines = ["usage: distlab COMMAND ...", "", *offered, "", MORE_HELP, ""]
    else:
        lines = [f"usage: distlab {command} [MODE] [NAME=VALUE ...]", "", f"  {COMMANDS[command].what}", ""]
        lines += RUN_HELP if command == "run" else []
    return [
        *lines,
        f"modes       {', '.join(modes())}, or the path of one such as mine/mode.py",
        (
            "settings    are variables, as arguments or in the environment: dp WORLD_SIZE=3 LAB_STEPS=5;"
            " docs/variables.md lists them"
        ),
        f"exit codes  {EXIT_CODES}",
    ]
