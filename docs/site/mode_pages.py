"""What the site adds to the page of a mode, from the code: its idea, its lesson, predictions, variants and papers."""

import re
from pathlib import Path
from textwrap import dedent

from distlab.contract import Mode
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load, prediction_rows

TOP = Path(__file__).parents[2]
PLACE = r"(?:, (?:section|theorem|algorithm|equation|figure|table) [\w.]*\w)?"
PAPER = re.compile(rf"[A-Z][\w'-]+(?: et al\.| and [A-Z][\w'-]+)?,? (?:19|20)\d\d{PLACE}")


def sections(name: str) -> str:
    """Return the sections that follow the page of a mode."""
    mode = load(name)
    lines = [*idea(mode), *lesson(name), *predictions(name, mode), *variants(mode), *papers(name, mode), *reading(mode)]
    return "\n".join(lines)


def idea(mode: Mode) -> list[str]:
    """The docstring of the lesson: prose as it is, what is indented as a block."""
    lines = ["", "## The idea", ""]
    for paragraph in mode.idea.split("\n\n"):
        block = paragraph.startswith("  ")
        lines += ["```text", *dedent(paragraph).splitlines(), "```", ""] if block else [*paragraph.splitlines(), ""]
    return lines


def lesson(name: str) -> list[str]:
    """The lesson on one page, whole, as it stands in its file."""
    place = f"experiments/{name}/lesson.py"
    return [
        "## The lesson on one page",
        "",
        f"`{place}`, in torch alone: copy it, and run it with torchrun; LAB_VARIANT=plain proves and measures it here.",
        "",
        f"```{{literalinclude}} ../../code/{place}",
        ":language: python",
        "```",
        "",
    ]


def predictions(name: str, mode: Mode) -> list[str]:
    """What is predicted at the default settings, formula and number."""
    rows = prediction_rows(mode.predict(Config.read({"RUN_MODE": name})))
    if not rows:
        return []
    head = ["variant", "per rank and step", "formula", "value", "calls"]
    return ["## What is predicted", "", "At the default settings, four ranks:", "", *table(head, rows), ""]


def variants(mode: Mode) -> list[str]:
    """Each variant with its sentence."""
    rows = [
        [f"`{each.name}`", each.description, "PyTorch's own" if each.by_torch else "by hand"] for each in mode.variants
    ]
    return ["## Variants", "", *table(["variant", "what it does", ""], rows), ""] if rows else []


def papers(name: str, mode: Mode) -> list[str]:
    """The papers that the lesson and the files that it is read in name."""
    own = sorted((TOP / "experiments" / name).glob("*.py"))
    files = [file for place in mode.reading if (file := TOP / place.partition(":")[0]).is_file()] + own
    found: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        text = " ".join(re.sub(r"^\s*#", "", file.read_text(), flags=re.MULTILINE).split())
        for paper in PAPER.findall(text):
            found.setdefault(paper, []).append(str(file.relative_to(TOP)))
    rows = [[paper, ", ".join(f"`{place}`" for place in dict.fromkeys(places))] for paper, places in found.items()]
    return ["## Papers", "", *table(["paper", "named in"], rows), ""] if rows else []


def reading(mode: Mode) -> list[str]:
    """The files of the lesson in the order in which they are read."""
    places = [place.partition(":") for place in mode.reading]
    lines = [f"{number}. `{file}`{colon}{what}" for number, (file, colon, what) in enumerate(places, 1)]
    return ["## Read it in this order", "", *lines, ""] if lines else []


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    rules = ["---"] * len(head)
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in [head, rules, *rows]]
