"""Find names in docs/ that do not exist: files, tests, modes, variants, bugs and settings."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from distlab.lab.config import Config
from distlab.lab.config.settings import aliases, modes
from distlab.lab.rank.mode_loader import load

TOP = Path(__file__).parent.parent
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?(?:::\w+)?")
SUFFIXES = (".py", ".md", ".yaml", ".sh", ".toml")


def tables(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each row of each table with the heading above it, without headers and rules."""
    heading, before = "", ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|") and not before.startswith("|"):
            header = True
        elif line.startswith("|---"):
            header = False
        elif line.startswith("|") and not header:
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]
        before = line


def coverage_rows() -> list[tuple[str, list[str]]]:
    """Return the rows of tests/coverage.toml: topics and errors of the lessons, and the code for each."""
    taught = tomllib.loads((TOP / "tests" / "coverage.toml").read_text())
    return [(heading, row) for heading, rows in taught.items() for row in rows]


def spans(text: str) -> list[str]:
    """Return the texts between backticks."""
    return re.findall(r"`([^`]+)`", text)


def faults(span: str) -> list[str]:
    """Return what a span names and the repository does not have; empty for a span that names nothing."""
    if "RUN_MODE=" in span:
        return settings_faults(span)
    if not FILE.fullmatch(span) or not (span.partition("::")[0].endswith((*SUFFIXES, "/"))):
        return []
    path, _, name = span.partition("::")
    if not (TOP / path).exists():
        return [f"{path} does not exist"]
    defined = rf"^\s*(?:def |class )?{name}\b(?:\(|:| =)"
    if name and not re.search(defined, (TOP / path).read_text(), re.MULTILINE):
        return [f"{path} has no {name}"]
    return []


def settings_faults(span: str) -> list[str]:
    """Return a missing mode, variant, bug or setting of a span such as `RUN_MODE=dp LAB_VARIANT=flat,ddp make run`."""
    settings = dict(word.split("=", 1) for word in shlex.split(span) if re.match(r"[A-Z_]+=", word))
    if settings["RUN_MODE"] not in modes():
        return [f"there is no mode {settings['RUN_MODE']}"]
    mode = load(settings["RUN_MODE"])
    known = aliases(Config) | aliases(mode.options)
    wrong = [f"there is no variable {name}" for name in settings if name not in known]
    named = settings.get("LAB_VARIANT", "")
    wrong += [
        f"{settings['RUN_MODE']} has no variant {name}" for name in named.split(",") if name and name not in mode.names
    ]
    bug = settings.get("LAB_BUG", next(iter(mode.mistakes)))
    if bug not in mode.mistakes:
        wrong.append(f"{settings['RUN_MODE']} has no LAB_BUG={settings['LAB_BUG']}")
    return wrong


def names_a_file(span: str) -> bool:
    """Return whether a span is a file with code or configuration, not a page."""
    return bool(FILE.fullmatch(span)) and span.partition("::")[0].endswith((".py", ".yaml", ".sh"))


def points_somewhere(span: str) -> bool:
    """Return whether `faults` checks this kind of span."""
    path = span.partition("::")[0]
    return "RUN_MODE=" in span or bool(FILE.fullmatch(span) and path.endswith((*SUFFIXES, "/")))
