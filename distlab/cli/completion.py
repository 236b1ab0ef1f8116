"""`distlab completion bash|zsh`: what the Tab key completes, as a script for a shell's own start file.

    eval "$(distlab completion bash)"      in ~/.bashrc; zsh in ~/.zshrc

Commands, modes, variables and options are those of this version, written into the script: nothing is started while
somebody types. A library would read one parser of argparse; here each command has its own, and settings are words.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from distlab.config import Config
from distlab.config.commands import COMMANDS, RUN_OPTIONS, offered
from distlab.config.settings import aliases, declared, modes

SHELLS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
SCRIPT = """_distlab() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words files
    local settings="{settings}"
    case ${{COMP_WORDS[1]}} in
{cases}
    *) words=$settings ;;
    esac
    files=$(compgen -f -- "$word")
    if [ "$COMP_CWORD" = 1 ]; then words="{commands} $settings" files=""; fi
    COMPREPLY=($(compgen -W "$words" -- "$word") $files)
    case ${{COMPREPLY[0]-}} in *=) if type compopt >/dev/null 2>&1; then compopt -o nospace; fi ;; esac
}}
complete -F _distlab distlab ./run"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script; returns 0."""
    made = argparse.ArgumentParser(
        prog="distlab completion",
        description='A script that completes commands, modes, variables and options: eval "$(distlab completion bash)"',
    )
    made.add_argument("shell", choices=list(SHELLS))
    print(script(made.parse_args(arguments).shell))
    return 0


def script(shell: str) -> str:
    """What the shell is to read."""
    own = (name for mode in modes() for name in aliases(declared(mode)))
    settings = [*modes(), *(f"{name}=" for name in dict.fromkeys([*aliases(Config), *own]))]
    words = {name: " ".join(options(name)) for name in offered()}
    words |= {"run": f"{' '.join(RUN_OPTIONS)} $settings", "completion": " ".join(SHELLS)}
    cases = "\n".join(f'    {name}) words="{listed}" ;;' for name, listed in words.items() if listed)
    commands = " ".join([*offered(), "--help", "--version"])
    return SHELLS[shell] + SCRIPT.format(settings=" ".join(settings), cases=cases, commands=commands)


def options(command: str) -> list[str]:
    """The options of a command, by its help; of one that takes settings there are none."""
    if COMMANDS[command].takes_settings:
        return []
    parser = getattr(importlib.import_module(COMMANDS[command].module), "parser", None)
    return sorted(set(re.findall(r"--[a-z][a-z-]+", parser().format_help()))) if parser else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
