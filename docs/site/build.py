"""The site, without a network: `make docs`, into build/site/html.

1. The pages of README and docs/, those of modes with what the code says of each, and pages of the interface are laid
   out in build/site/source as they lie in the repository, so that their links hold.
2. Sphinx runs the notebooks and makes HTML of all; a warning is an error.
3. Each link inside of the site has to lead to a file, and to an anchor in it.
"""

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from links import dead_links
from mode_pages import sections
from sphinx.cmd.build import main as sphinx_build

from distlab.lab.config.settings import modes

TOP = Path(__file__).parents[2]
BUILD = TOP / "build" / "site"
SOURCE, HTML = BUILD / "source", BUILD / "html"
API = {  # the title of a page, and its modules below distlab
    "distlab": ("In your own tests and notebooks", "testing testing.plugin"),
    "contract": ("A mode, as the lab sees it", "contract"),
    "check": ("`distlab check`: a script, watched", "check check.start check.matching check.deadlock"),
    "prove": ("`distlab prove`: N ranks against one process", "prove prove.proof prove.user_file prove.compare"),
    "notebook": ("Cells of a notebook on ranks", "notebook notebook.magics notebook.session"),
}
PAGES = (
    ("Learn", ("lessons", "class", "modes/README", "choosing", "glossary")),
    ("Use", ("running", "variables", "prove", "check", "ci", "engines")),
    ("How it does", ("performance", "reliability")),
    ("How it is built", ("architecture",)),
)


def main() -> int:
    """Lay out, build, follow the links; the exit code."""
    shutil.rmtree(BUILD, ignore_errors=True)
    lay_out()
    arguments = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(Path(__file__).parent), str(SOURCE), str(HTML)]
    if code := sphinx_build(arguments):
        return int(code)
    dead = dead_links(HTML)
    print("\n".join(dead) or f"the site is {HTML.relative_to(TOP)}/index.html", file=sys.stderr if dead else sys.stdout)
    return 1 if dead else 0


def lay_out() -> None:
    """Write all that Sphinx reads."""
    for name, (title, modules) in API.items():
        there = [f"distlab.{each}" for each in modules.split() if find_spec(f"distlab.{each.partition('.')[0]}")]
        if there:
            write(f"api/{name}.md", "\n".join(api_page(title, there)))
    notebooks = sorted((TOP / "notebooks").glob("*.ipynb"))
    for notebook in notebooks:
        copy(notebook)
    for page in (
        TOP / "CONTRIBUTING.md",
        TOP / "CHANGELOG.md",
        TOP / "mine" / "README.md",
        *sorted((TOP / "docs").rglob("*.md")),
    ):
        more = sections(page.stem) if page.parent.name == "modes" and page.stem in modes() else ""
        write(str(page.relative_to(TOP)), linked(page.read_text()) + more)
    for file in (TOP / "LICENSE", *(TOP / "docs").glob("*.svg"), *(TOP / "docs").glob("figures/*.svg")):
        copy(file)
    for folder in ("experiments", "distlab", "engines"):
        shutil.copytree(TOP / folder, SOURCE / "code" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("distlab", "engines", "experiments"):  # which the pages link to
        (SOURCE / folder).symlink_to(SOURCE / "code" / folder)
    index = linked((TOP / "README.md").read_text())
    write("index.md", f"{index}\n{contents([str(each.relative_to(TOP)) for each in notebooks])}")


def linked(text: str) -> str:
    """A page whose links to the README lead to the site's first page."""
    return re.sub(r"\]\(((?:\.\./)+)README\.md", r"](\1index.md", text)


def contents(notebooks: list[str]) -> str:
    """The tables of contents of the first page, which are the site's menu."""
    parts = [(caption, [f"docs/{name}" for name in names]) for caption, names in PAGES]
    known = {name for _, names in PAGES for name in names}
    parts[0][1].extend(f"docs/{page.stem}" for page in sorted((TOP / "docs").glob("*.md")) if page.stem not in known)
    parts.insert(1, ("Modes", [f"docs/modes/{name}" for name in modes()]))
    if notebooks:
        parts.insert(1, ("Notebooks", [name.removesuffix(".ipynb") for name in notebooks]))
    parts += [
        ("Interface", [f"api/{name}" for name in API if (SOURCE / "api" / f"{name}.md").exists()]),
        ("Project", ["CONTRIBUTING", "CHANGELOG", "mine/README"]),
    ]
    return "\n".join(
        f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"
        for caption, names in parts
    )


def api_page(title: str, modules: list[str]) -> list[str]:
    """A page of the interface: what the modules and their public names say of themselves."""
    lines = [f"# {title}", ""]
    for module in modules:
        lines += [
            f"## `{module}`", "", "```{eval-rst}", f".. automodule:: {module}", "   :members:",
            "   :undoc-members:", "   :show-inheritance:", "```", "",
        ]  # fmt: skip
    return lines


def write(place: str, text: str) -> None:
    path = SOURCE / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy(file: Path) -> None:
    target = SOURCE / file.relative_to(TOP)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


if __name__ == "__main__":
    sys.exit(main())
