"""`python -m workers.config`: all variables as the Markdown table of docs/variables.md."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from workers.config import Config
from workers.config.options import declared
from workers.config.values import lesson_file, modes

HEAD = ["| variable | default | what it is |", "|---|---|---|"]


def table() -> str:
    """A line a variable: those of all modes, then under each mode's name its own."""
    lines = [*HEAD, *_rows(Config)]
    for mode in modes():
        own = declared(lesson_file(mode))
        sizes = ", ".join(f"`{Config.model_fields[name].alias}` {value}" for name, value in own.sizes.items())
        rows = list(_rows(own))
        if sizes or rows:
            lines += ["", f"`RUN_MODE={mode}`" + (f" with defaults of its own: {sizes}" if sizes else ""), ""]
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


if __name__ == "__main__":
    print(table())
