"""Pages from templates/: every value is escaped.

Style sheets and scripts are separate files there; a page includes them, so that it is one file.
"""

import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from distlab.lab.report.glossary import meaning
from distlab.lab.report.timeline_panels import HUES

TEMPLATES = resources.files("distlab.lab.report") / "templates"


def source(name: str) -> str:
    """Return the text of a file in templates/."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def asset(name: str) -> Markup:
    """Return a style sheet or a script for inclusion in a page."""
    return Markup(source(name))


def headings(body: str) -> list[tuple[str, Markup]]:
    """Return (id, title) of each section: the table of contents."""
    found = re.findall(r'<section id="([^"]+)">\s*<h2>(.*?)</h2>', str(body))
    return [(place, Markup(title)) for place, title in found]


ENVIRONMENT = Environment(
    loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.globals |= {"asset": asset, "hues": HUES, "meaning": meaning}
ENVIRONMENT.filters["headings"] = headings


def render(template: str, **values: Any) -> str:
    """Return the whole page."""
    return ENVIRONMENT.get_template(template).render(values)
