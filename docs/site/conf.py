"""The settings of the site: Sphinx reads this file beside the pages that build.py has laid out."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

project = "distlab"
copyright = "the contributors, MIT license"  # noqa: A001  Sphinx's own name
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "distlab"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

nb_execution_mode = "force"  # notebooks are kept without outputs: the site shows those of the code that it is made of
nb_execution_timeout = 150  # s a cell
nb_execution_raise_on_error = True  # but of cells that are tagged as raising
nb_execution_show_tb = True
nb_merge_streams = True
myst_enable_extensions = ["html_image"]  # and no dollarmath: in a shell's lines $OUT is no formula
myst_heading_anchors = 4  # the links to headings that GitHub makes, too

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_hints = True
toc_object_entries_show_parents = "hide"

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def as_restructured(_app: Any, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """A docstring is plain text: one backtick is code, an indented block is shown as it stands."""
    found: list[str] = []
    in_block = False
    for line in lines:
        indented = line.startswith("    ") or (line.startswith("  ") and not in_arguments(found))
        if indented and not in_block and not in_arguments(found):
            found += ["", "::", ""]
            in_block = True
        elif line and not line.startswith(" "):
            in_block = False
        found.append(f"  {line}" if in_block and line else escaped(line) if not in_block else line)
    lines[:] = found


def in_arguments(before: list[str]) -> bool:
    """Whether the lines so far end in a section of arguments, which napoleon reads."""
    heads = [line for line in before if line and not line.startswith(" ")]
    return bool(heads) and heads[-1].rstrip() in ("Args:", "Returns:", "Raises:", "Yields:")


def escaped(line: str) -> str:
    """A line of text with code in two backticks, and without what would be markup outside of it."""
    parts = CODE.split(line)
    plain = [re.sub(r"([*|\\])|(?<=\w)(_)(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(text + (code[number] if number < len(code) else "") for number, text in enumerate(plain))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured, priority=100)  # before napoleon
