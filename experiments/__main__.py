"""`python -m distlab.experiments`: the table of modes in the README, each with the first line of its lesson."""

from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load


def table() -> str:
    """A line a mode, which leads to its part of docs/modes.md."""
    rows = ["| RUN_MODE | the lesson | variants |", "|---|---|---|"]
    for name in modes():
        lesson = load(name).asked(())
        idea = lesson.idea.partition("\n")[0].rstrip(".")
        variants = f"`{', '.join(lesson.names)}`" if lesson.names else ""
        rows.append(f"| [`{name}`](docs/modes.md#{name}) | {idea} | {variants} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
