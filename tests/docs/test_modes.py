"""docs/modes.md: a part for each mode of the table, and the limit of `make fit` by the formulas."""

import re
from statistics import fmean

from distlab.cli import fit
from distlab.experiments.cp.checks import busiest, predicted_share
from distlab.experiments.cp.predictions import BY_HAND, layer_cost
from distlab.lab.config import Config
from distlab.lab.config.settings import modes
from distlab.lab.workload.model import outline
from tests.docs.pages import README, anchors, page
from tests.documents import spans, tables


def test_every_mode_has_a_row_in_the_readme_and_a_part_of_the_page() -> None:
    rows = [row for heading, row in tables(README.read_text()) if heading == "Modes"]
    assert [spans(row[0])[0] for row in rows] == modes()
    assert set(modes()) <= anchors(page("modes"))


def test_the_limit_of_make_fit_is_what_the_formulas_give() -> None:
    sizes = {
        "LAB_WIDTH": "512",
        "LAB_DEPTH": "12",
        "LAB_SEQ": "16",
        "LAB_BATCH": "4",
        "WORLD_SIZE": "4",
    }  # compose/fit.sh
    config = Config.read(sizes)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers]
    held, block = fit.activations(config), page("modes").partition("<!-- of: make fit -->")[2]
    dp, zero3 = fit.dp_need(sum(layers), held), fit.zero3_need(layers, 4, held)
    (base,) = re.findall(r"^no model +(\d+) MB", block, re.MULTILINE)
    for name, need in (("dp", dp), ("zero3", zero3)):
        assert re.search(
            rf"^{name} +{base} MB \+ {fit.mb(need.nbytes)} = .*: {re.escape(need.formula)}$", block, re.MULTILINE
        )
    limit = float(base) + (dp.nbytes + zero3.nbytes) / 2e6
    assert re.search(rf"^limit +{limit:.0f} MB", block, re.MULTILINE)


def test_the_figures_of_when_the_ring_and_when_ulysses_are_those_of_a_run() -> None:
    rows = {row[0]: row[1:] for heading, row in tables(page("modes")) if heading == "When the ring, and when Ulysses"}
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
