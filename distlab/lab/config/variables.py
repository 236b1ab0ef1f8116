"""Print all variables as the Markdown table of docs/variables.md, and generate other text from them.

python -m distlab.lab.config.variables              the table
python -m distlab.lab.config.variables --check      check the variables that are set, for `./run`
python -m distlab.lab.config.variables --write      update the lines of docker-compose.yaml that pass them to a rank
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import aliases, declared, modes

HEAD = ["| variable | default | what it is |", "|---|---|---|"]
WIDEST = 120  # columns of a line outside of tables

COMPOSE_FILE = Path(__file__).parents[3] / "docker-compose.yaml"
BEGIN = (
    "  # Written by `python -m distlab.lab.config.variables --write`; a variable without a value is passed on if,"
    " and only if, the shell has it."
)
END = "  # End of the generated part."
# A service sets these itself, LOCAL_RANK is torchrun's, the folder in LAB_RUNS_DIR is mounted at runs/, and
# LAB_KEY_FILE as a secret.
NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "LAB_RUNS_DIR", "LAB_KEY_FILE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, check or write as requested; returns the exit code."""
    made = argparse.ArgumentParser(
        prog="python -m distlab.lab.config.variables", description="All variables, with defaults, as a Markdown table."
    )
    one = made.add_mutually_exclusive_group()
    one.add_argument(
        "--check", action="store_true", help="print the faults of the variables that are set; exit code 2 if any"
    )
    one.add_argument("--write", action="store_true", help="update docker-compose.yaml")
    options = made.parse_args(arguments)
    if options.check:
        return check()
    if options.write:
        COMPOSE_FILE.write_text(written(COMPOSE_FILE.read_text()))
    else:
        print(table())
    return 0


def table() -> str:
    """Return one line per variable: those of all modes, then each mode's own under its name."""
    lines = [*HEAD, *_rows(Config)]
    for mode in modes():
        own = declared(mode)
        sizes = ", ".join(f"`{Config.model_fields[name].alias}` {value}" for name, value in own.sizes.items())
        rows = list(_rows(own))
        if sizes or rows:
            heading = f"`RUN_MODE={mode}`" + (f" with defaults of its own: {sizes}" if sizes else "")
            lines += ["", *textwrap.wrap(heading, WIDEST), ""]
            lines += [*HEAD, *rows] if rows else []
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _rows(kind: type[BaseModel]) -> Iterator[str]:
    for field in kind.model_fields.values():
        if field.alias is None:
            continue
        default = "" if field.default in (None, ()) else field.default
        default = int(default) if isinstance(default, bool) else default
        yield f"| `{field.alias}` | {default} | {field.description}{_allowed(field)} |"


def _allowed(field: Any) -> str:
    words = getattr(field.annotation, "__args__", ())
    return f" ({', '.join(words)})" if words and all(isinstance(word, str) for word in words) else ""


def names() -> list[str]:
    """Return every variable, those of all modes too, in the order of the table; shared ones once."""
    own = (name for mode in modes() for name in aliases(declared(mode)))
    return list(dict.fromkeys([*aliases(Config), *own]))


def compose_lines() -> str:
    """Return the block of a Compose file, between its two comments."""
    return "\n".join([BEGIN, *(f"  {name}:" for name in names() if name not in NOT_PASSED_ON), END])


def written(text: str) -> str:
    """Return the Compose file with a new block; raises ValueError if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"has no line {(END if begin else BEGIN).strip()!r}")
    return before + compose_lines() + after


def check() -> int:
    """Print the faults in the environment; returns the exit code."""
    try:
        Config.read()
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
