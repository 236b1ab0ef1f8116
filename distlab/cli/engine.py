"""Print the manifest of an engine for a number of ranks: `distlab engine kubernetes --ranks 16 fsdp LAB_STEPS=100`.

A manifest is a complete file in engines/<engine>/, for 4 ranks. Marks at the ends of lines say what depends on the run:
the number before `# ranks`, three times that number before `# restarts`, the name before `# image`. The line
`# settings` is replaced by variables. So a new engine is only a new file, and all that is printed can be read there.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlab.cli import prints_refusals
from distlab.lab.config import MAX_WORLD_SIZE, Config, Refusal, commands

NUMBERS = {"ranks": 1, "restarts": 3}  # marks after a number, and its multiple of the ranks
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LAB_RUNS_DIR")  # variables that a manifest sets itself
ENGINES = Path(__file__).parents[1] / "engines"


@prints_refusals
def main(words: Sequence[str]) -> int:
    """Print the manifest; returns the exit code."""
    typed = parser().parse_intermixed_args(words)
    settings = checked(typed.ranks, typed.settings)
    name = typed.kind or next(iter(kinds(typed.engine)))
    if name not in kinds(typed.engine):
        raise Refusal(f"--as {name!r} is none of {', '.join(kinds(typed.engine))}")
    print(manifest((ENGINES / typed.engine / f"{name}.yaml").read_text(), typed.ranks, typed.image, settings), end="")
    return 0


def kinds(engine: str) -> list[str]:
    """Return an engine's manifests by name; the first in the alphabet is the plain one."""
    return sorted(path.stem for path in (ENGINES / engine).glob("*.yaml"))


def checked(ranks: int, words: Sequence[str]) -> dict[str, str]:
    """Return the arguments as variables, checked as a rank would; raises ConfigError with all faults."""
    settings = commands.settings(words)
    faults = [
        f"{name}={settings[name]} is set by the manifest: --ranks gives the number of ranks, a volume has their runs"
        for name in OWN
        if name in settings
    ]
    if not 1 <= ranks <= MAX_WORLD_SIZE:
        faults.append(f"--ranks {ranks} is out of range: expected 1 to {MAX_WORLD_SIZE}")
    place = {"RANK": "0", "WORLD_SIZE": str(min(max(ranks, 1), MAX_WORLD_SIZE)), "MASTER_ADDR": "rank0"}
    Config.read(settings | place, found_before=faults)
    return settings


def manifest(text: str, ranks: int, image: str, settings: Mapping[str, str]) -> str:
    """Return the manifest `text` for these ranks and this image, with these variables in place of its own."""
    lines: list[str] = []
    for line in text.splitlines():
        mark = re.search(r"# (ranks|restarts|image|settings)$", line)
        kind = mark[1] if mark else ""
        listed = re.match(r"\s*- \{name: (\w+), value: ", line)
        if kind in NUMBERS:
            lines.append(re.sub(r'\b\d+(?="?\}? # \w+$)', str(ranks * NUMBERS[kind]), line))
        elif kind == "image":
            lines.append(re.sub(r"\S+(?= # image$)", image, line))
        elif kind == "settings":
            indent = line[: line.index("#")]
            lines += [f"{indent}- {{name: {name}, value: {json.dumps(value)}}}" for name, value in settings.items()]
        elif not (listed and listed[1] in settings):
            lines.append(line)
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    engines = sorted(path.name for path in ENGINES.iterdir() if kinds(path.name)) if ENGINES.is_dir() else []
    made = argparse.ArgumentParser(
        prog="distlab engine", allow_abbrev=False, description=(__doc__ or "").split("\n\n")[0]
    )
    made.add_argument("engine", choices=engines, help="the engine that starts the ranks")
    made.add_argument("--ranks", type=int, default=4, help=f"number of ranks, 1 to {MAX_WORLD_SIZE} (default 4)")
    several = "; ".join(f"for {engine} {', '.join(kinds(engine))}" for engine in engines if len(kinds(engine)) > 1)
    made.add_argument("--as", dest="kind", metavar="KIND", help=f"kind of manifest: {several} (default: the first)")
    made.add_argument(
        "--image", default="distlab:latest", help="the image of a rank, as the engine finds it (default distlab:latest)"
    )
    made.add_argument("settings", nargs="*", metavar="MODE|NAME=VALUE", help="the mode, and its settings")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
