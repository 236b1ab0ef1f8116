"""docs/modes: one short page per mode with one question; its figures and the limit of `make fit` equal the formulas."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from distlab.cli import fit
from distlab.experiments.cp.checks import busiest, predicted_share
from distlab.experiments.cp.predictions import BY_HAND, layer_cost
from distlab.experiments.fsdp.predictions import published
from distlab.lab.config import Config
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from distlab.lab.workload.model import outline
from distlab.techniques.pipeline_parallel.costs import idle_share
from tests.docs.pages import DOCS, README, TOP, page, page_id, prose
from tests.documents import spans, tables

MODES = TOP / "docs" / "modes"
PAGES = [path for path in DOCS if path.parent == MODES]
MOST_BYTES, MOST_BYTES_OF_ALL = 5_000, 50_000
TITLE = re.compile(r"\A# [^?\n]+\?\n\n[^#`|<!\n]")  # one question, and its answer begins below it


def page_faults(text: str) -> list[str]:
    """Return what is wrong with a page: its length, its title, another title, text that a reader has to open."""
    faults = [f"{size} bytes"] if (size := len(text.encode())) > MOST_BYTES else []
    faults += [] if TITLE.match(text) else ["its title is not one question with the answer below it"]
    faults += [] if len(re.findall(r"^# ", prose(text), re.MULTILINE)) == 1 else ["more than one title"]
    return faults + (["hidden text"] if "<details>" in text else [])


def test_every_mode_has_a_row_in_the_readme_and_a_page() -> None:
    rows = [row for heading, row in tables(README.read_text()) if heading == "Modes"]
    assert [spans(row[0])[0] for row in rows] == modes()
    assert sorted(path.stem for path in PAGES) == sorted(["README", *modes()])


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_a_page_is_short_and_answers_one_question(path: Path) -> None:
    assert page_faults(path.read_text()) == []


def test_all_pages_together_are_short() -> None:
    assert sum(path.stat().st_size for path in PAGES) <= MOST_BYTES_OF_ALL


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("# Why?\n\nBecause.\n", 0),
        ("# Why?\n\n" + "é" * 2_497 + "\n", 1),
        ("# Why\n\nBecause.\n", 1),
        ("# Why? How?\n\nSo.\n", 1),
        ("# Why?\n\n## Because\n", 1),
        ("# Why?\n\nSo.\n\n# How?\n", 1),
        ("# Why?\n\nSo.\n<details>\n", 1),
    ],
)
def test_the_faults_of_a_page_are_found(text: str, num_faults: int) -> None:
    assert len(page_faults(text)) == num_faults


def test_the_table_of_modes_has_the_pages_questions() -> None:
    rows = [row for heading, row in tables(page("modes/README")) if heading == "What does each mode show?"]
    titles = {f"[{name}]({name}.md)": page(f"modes/{name}").partition("\n")[0].removeprefix("# ") for name in modes()}
    assert dict(rows) == titles


@pytest.mark.parametrize("name", modes())
def test_a_page_names_each_bug_of_its_mode(name: str) -> None:
    text = " ".join((page(f"modes/{name}") + page("modes/README")).split())  # README has the bugs of checkpoints
    named = dict(re.findall(r"`(\w+)`:? [^`]*\(`([^`]+)`\)", text))
    assert {bug: each.check for bug, each in load(name).mistakes.items()}.items() <= named.items()


def test_bubbles_equal_the_formulas() -> None:
    shares = [idle_share(name, 4, 8, 2) for name in ("1f1b", "interleaved", "zb_h1", "zbv")]
    assert shares[-1] == idle_share("dualpipev", 4, 8, 2)
    assert [f"{share:.3f}" for share in shares if f"{share:.3f}" not in page("modes/pp")] == []


def test_bytes_of_zero_equal_the_papers() -> None:
    rows = {row[0].strip("`"): row[-1] for heading, row in tables(page("modes/fsdp")) if len(row) == 4}
    assert rows == {name: of_64 for name, of_64, _ in published()[2]}


def test_the_limit_of_make_fit_equals_the_formulas() -> None:
    sizes = {
        "LAB_WIDTH": "512",
        "LAB_DEPTH": "12",
        "LAB_SEQ": "16",
        "LAB_BATCH": "4",
        "WORLD_SIZE": "4",
    }  # compose/fit.sh
    config = Config.read(sizes)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers]
    activations, block = fit.activations(config), page("modes/fsdp").partition("<!-- of: make fit -->")[2]
    dp, zero3 = fit.dp_need(sum(layers), activations), fit.zero3_need(layers, 4, activations)
    (base,) = re.findall(r"^no model +(\d+) MB", block, re.MULTILINE)
    for name, need in (("dp", dp), ("zero3", zero3)):
        assert re.search(
            rf"^{name} +{base} MB \+ {fit.mb(need.nbytes)} = .*: {re.escape(need.formula)}$", block, re.MULTILINE
        )
    limit = float(base) + (dp.nbytes + zero3.nbytes) / 2e6
    assert re.search(rf"^limit +{limit:.0f} MB", block, re.MULTILINE)


def test_the_figures_of_ring_and_ulysses_equal_the_predictions() -> None:
    rows = {
        row[0]: row[1:] for heading, row in tables(page("modes/cp")) if heading == "When the ring, and when Ulysses"
    }
    for ranks in (2, 4, 8):
        config = Config.read({"RUN_MODE": "cp", "WORLD_SIZE": str(ranks)})
        everything = 2 * config.seq * config.width * 4
        costs = [layer_cost(name, config, 1, 0) for name in BY_HAND]
        sent = [fmean(layer_cost(name, config, 1, rank).nbytes for rank in range(ranks)) for name in BY_HAND]
        assert rows[f"sent, c = {ranks}"] == [f"{nbytes / everything:.2f}" for nbytes in sent]
    assert rows["calls of a rank, c = 8"] == [str(cost.calls) for cost in costs]
    for label, ranks in (("work of the busiest rank over the mean, c = 8", 8), ("the same, c = 3, 8 heads", 3)):
        config = Config.read({"RUN_MODE": "cp", "WORLD_SIZE": str(ranks)})
        shares = [busiest(tuple(predicted_share(name, config).pairs)) for name in BY_HAND]
        assert [cell.partition(",")[0] for cell in rows[label]] == [f"{share:.2f}" for share in shares]
