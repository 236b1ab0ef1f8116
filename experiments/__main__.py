"""What the pages show of the code: the table of modes in the README, and the injected bugs of one mode.

python -m distlab.experiments         a row per mode, each with the first line of its lesson
python -m distlab.experiments dp      a line per bug that is injected into this mode
"""

import sys
from textwrap import fill

from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load

PAGE_WIDTH = 120


def table() -> str:
    """Return a row per mode, which links to its page."""
    rows = ["| RUN_MODE | the lesson | variants |", "|---|---|---|"]
    for name in modes():
        lesson = load(name).requested(())
        idea = lesson.idea.partition("\n")[0].rstrip(".")
        variants = f"`{', '.join(lesson.names)}`" if lesson.names else ""
        rows.append(f"| [`{name}`](docs/modes/{name}.md) | {idea} | {variants} |")
    return "\n".join(rows)


def bugs(name: str) -> str:
    """Return a line per bug: what it does, without the consequence, and the check that fails; not of checkpoints."""
    own = {bug: each for bug, each in load(name).mistakes.items() if bug not in checkpoints.mistake}
    lines = [f"- `{bug}`: {each.what.partition(': ')[0]} (`{each.check}`)" for bug, each in own.items()]
    return "\n".join(fill(line, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


if __name__ == "__main__":
    print(bugs(sys.argv[1]) if sys.argv[1:] else table())
