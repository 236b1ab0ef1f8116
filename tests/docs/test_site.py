"""The site: the contents of its pages, and, after `./install docs`, its build without a warning."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from tests.docs.pages import TOP

SITE = TOP / "docs" / "site"
PYTHON = TOP / ".venv-docs" / "bin" / "python"


def module(name: str) -> ModuleType:
    """Import a file of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", modes())
def test_the_page_of_a_mode_lists_its_variants_and_formulas(name: str) -> None:
    mode, page = load(name), module("mode_pages").sections(name)
    assert mode.idea.partition("\n")[0] in page
    assert [each.name for each in mode.variants if f"| `{each.name}` |" not in page] == []
    config = {each.formula for each in mode.predict(module("mode_pages").Config.read({"RUN_MODE": name}))}
    assert [formula for formula in config if formula.replace("|", r"\|") not in page] == []
    assert f"```{{literalinclude}} ../../code/experiments/{name}/lesson.py\n" in page


def test_papers_are_found_and_years_alone_are_not() -> None:
    assert "| Patarasuk and Yuan 2009, theorem 1 |" in module("mode_pages").sections("dp")
    paper = module("mode_pages").PAPER
    assert paper.findall("as Goyal et al. 2017, section 2 has it, and (You et al. 2017)") == [
        "Goyal et al. 2017, section 2",
        "You et al. 2017",
    ]
    assert paper.findall("in 2017, of 4 ranks, 2048 samples") == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h1 id="a">A</h1><script src="https://elsewhere.test/x.js"></script>')
    links = ["there.html", "there.html#a", "https://elsewhere.test/", "absent.html", "there.html#b", "#own"]
    (tmp_path / "index.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    found = module("links").dead_links(tmp_path)
    assert found == [
        "index.html links to absent.html, which is not there",
        "index.html links to there.html#b, which is not there",
        "index.html links to #own, which is not there",
        "there.html loads https://elsewhere.test/x.js, which needs a network",
    ]


@pytest.mark.timeout(900)  # 3 minutes on two busy cores: six notebooks run on ranks
@pytest.mark.skipif(not PYTHON.exists(), reason="./install docs was not run")
def test_the_site_is_built_without_warnings_or_dead_links() -> None:
    done = subprocess.run(
        [PYTHON, SITE / "build.py"], cwd=TOP, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    html = TOP / "build" / "site" / "html"
    assert all((html / "docs" / "modes" / f"{name}.html").is_file() for name in modes())
    assert (html / "searchindex.js").is_file()
    assert "all 4 ranks | the same on all" in (html / "notebooks" / "1_talk.html").read_text(), "outputs are shown"
