"""Pages from templates/: every value is escaped, and all that a page needs is put into it.

The style sheets and scripts lie there as files of their own; a page holds them, so that it stays one file.
"""

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = resources.files("distlab.report") / "templates"


def source(name: str) -> str:
    """The text of a file in templates/."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def asset(name: str) -> Markup:
    """A style sheet or a script, as a page holds it."""
    return Markup(source(name))


ENVIRONMENT = Environment(
    loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.globals["asset"] = asset


def render(template: str, **values: Any) -> str:
    """The whole page."""
    return ENVIRONMENT.get_template(template).render(values)
