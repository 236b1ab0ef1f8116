"""A page a technique, made of what the code says of itself: its idea, its lesson on one page, what is predicted, a
figure of a run, its variants, its injected bugs, and the papers that it names."""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from distlab.contract import Mode
from distlab.lab.config import Config
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load, prediction_rows

TOP = Path(__file__).parents[2]
PLACE = r"(?:, (?:section|theorem|algorithm|equation|figure|table) [\w.]*\w)?"
PAPER = re.compile(rf"[A-Z][\w'-]+(?: et al\.| and [A-Z][\w'-]+)?,? (?:19|20)\d\d{PLACE}")


def technique_pages() -> Iterator[tuple[str, str]]:
    """The name and the text of each page, in the order of the modes."""
    for name in modes():
        yield name, "\n".join(page(name, load(name))) + "\n"


def page(name: str, mode: Mode) -> list[str]:
    """The lines of one page, in MyST Markdown."""
    title, _, rest = mode.idea.partition("\n\n")
    head, _, about = " ".join(title.split()).partition(": ")
    return [
        f"# {name}: {head[:1].lower()}{head[1:]}",
        "",
        *([f"{about[:1].upper()}{about[1:]}", ""] if about else []),
        *idea(rest),
        *try_it(name),
        *lesson(name),
        *predictions(name, mode),
        *figure(name),
        *variants(mode),
        *bugs(mode),
        *papers(name, mode),
        *reading(mode),
    ]


def idea(text: str) -> list[str]:
    """The docstring of the lesson: prose as it is, what is indented as a block."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        block = paragraph.startswith("  ")
        lines += ["```text", *dedent(paragraph).splitlines(), "```", ""] if block else [*paragraph.splitlines(), ""]
    return lines


def try_it(name: str) -> list[str]:
    """The command of the mode, and where its log is explained."""
    return [
        "```sh",
        f"RUN_MODE={name} make run",
        f"make explain RUN_MODE={name}",
        "```",
        "",
        f"[What each line of its log says](../docs/modes.md#{name})",
        "",
    ]


def lesson(name: str) -> list[str]:
    """The lesson on one page, whole, as it stands in its file."""
    place = f"experiments/{name}/lesson.py"
    return [
        "## The lesson on one page",
        "",
        f"`{place}`, in torch alone: copy it, and run it with torchrun; LAB_VARIANT=plain proves and measures it here.",
        "",
        f"```{{literalinclude}} ../code/{place}",
        ":language: python",
        "```",
        "",
    ]


def predictions(name: str, mode: Mode) -> list[str]:
    """What is predicted at the default settings, formula and number."""
    rows = prediction_rows(mode.predict(Config.read({"RUN_MODE": name})))
    if not rows:
        return []
    head = ["variant", "a rank and step", "formula", "value", "calls"]
    return ["## What is predicted", "", "At the default settings, four ranks:", "", *table(head, rows), ""]


def figure(name: str) -> list[str]:
    """A figure of a run, where one is kept."""
    place = TOP / "docs" / "figures" / f"{name}.svg"
    return ["## A run", "", f"![A figure of a run of {name}](../docs/figures/{name}.svg)", ""] if place.exists() else []


def variants(mode: Mode) -> list[str]:
    """Each variant with its sentence."""
    rows = [[f"`{each.name}`", each.told, "PyTorch's own" if each.by_torch else "by hand"] for each in mode.variants]
    return ["## Variants", "", *table(["variant", "what it does", ""], rows), ""] if rows else []


def bugs(mode: Mode) -> list[str]:
    """Each injected bug with what it breaks and the check that catches it."""
    rows = [[f"`{name}`", each.what, f"`{each.check}`"] for name, each in mode.mistakes.items()]
    head = ["LAB_BUG", "what breaks", "the check that catches it"]
    return ["## Injected bugs", "", *table(head, rows), ""] if rows else []


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
