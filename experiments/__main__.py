"""`python -m experiments`: all modes as the Markdown table of the README, each with the first line of its lesson."""

import importlib
import inspect

from workers.config.values import modes


def table() -> str:
    """A line a mode, which leads to its part of docs/modes.md."""
    rows = ["| RUN_MODE | the lesson | variants |", "|---|---|---|"]
    for name in modes():
        lesson = importlib.import_module(f"experiments.{name}")
        idea = inspect.cleandoc(lesson.__doc__ or "").partition("\n")[0].rstrip(".")
        variants = f"`{', '.join(lesson.VARIANTS)}`" if lesson.VARIANTS else ""
        rows.append(f"| [`{name}`](docs/modes.md#{name}) | {idea} | {variants} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
