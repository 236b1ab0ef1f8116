"""`python -m workers.config`: all variables as the Markdown table of the README."""

from typing import Any

from workers.config import Config


def table() -> str:
    """A line a variable."""
    rows = ["| variable | default | what it is |", "|---|---|---|"]
    for field in Config.model_fields.values():
        default = "" if field.default in (None, ()) else field.default
        default = int(default) if isinstance(default, bool) else default
        rows.append(f"| `{field.alias}` | {default} | {field.description}{_allowed(field)} |")
    return "\n".join(rows)


def _allowed(field: Any) -> str:
    words = getattr(field.annotation, "__args__", ())
    return f" ({', '.join(words)})" if words and all(isinstance(word, str) for word in words) else ""


if __name__ == "__main__":
    print(table())
