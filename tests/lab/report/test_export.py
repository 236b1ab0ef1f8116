"""Figures as files: each of the page, that can be read by itself, as SVG."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from distlab.cli.report import main
from distlab.lab.report.export import figures
from distlab.lab.report.records import Ranks as Records
from distlab.lab.report.timeline import NUMBERED, timelines
from distlab.lab.report.timeline_panels import PRIME
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import good_run, pipeline_run, start, written
from tests.labs import run_experiment
from tests.warm_ranks import Ranks

SVG = "{http://www.w3.org/2000/svg}"


def test_every_chart_of_the_page_and_the_picture_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", pipeline_run())
    assert main([str(run), "--figures", str(tmp_path / "figures")]) == 0
    names = sorted(path.stem for path in (tmp_path / "figures").glob("*.svg"))
    assert len(names) == len([*(tmp_path / "figures").iterdir()])
    assert {"picture", "losses-by-step", "time-of-a-step-by-variant", "memory-over-a-step-of-1f1b"} <= set(names)
    assert f"figures    {len(names)} in {tmp_path / 'figures'}, as SVG: picture, " in capsys.readouterr().out
    assert not (run / "report.html").exists()


def test_a_file_needs_no_style_sheet_of_a_page() -> None:
    for name, drawing in figures(judge(pipeline_run()), pipeline_run()):
        assert "var(" not in drawing and "href" not in drawing, name
        ElementTree.fromstring(drawing)  # it is XML by itself


def test_a_series_has_its_colour_and_its_name_beside_it() -> None:
    drawing = dict(figures(judge(good_run()), good_run()))["memory-by-class-at-rest-and-at-the-peak"]
    root = ElementTree.fromstring(drawing)
    series = {
        part.get("data-n"): part.get("data-hue") for part in root.iter(f"{SVG}g") if part.get("class") == "series"
    }
    assert list(series) == ["parameters", "gradients", "activations"]
    assert [text.text for text in root.findall(f"{SVG}text")] == list(series)
    assert [mark.get("fill") for mark in root.findall(f"{SVG}rect")[1:]] == list(series.values())
    assert all(f'[data-hue="{hue}"] .rect' in drawing for hue in series.values())


def test_a_run_without_a_figure_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", {0: [start(world_size=1)]})
    assert main([str(run), "--figures", str(tmp_path / "figures")]) == 2
    assert "has no figure: it recorded no step and drew no chart" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), "--figures", str(tmp_path / "figures")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


# The picture of a run: what it shows of a real run's records, and that the picture in docs/ is one of this code's.


TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def drawn(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Records, ElementTree.Element]:
    """A small run of the picture's own mode and variants: its verdict, its records and its picture."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"LAB_MODEL": "mlp", "LAB_DEPTH": "8", "LAB_SLEEP_MS": "2", "LAB_STEPS": "2", "LAB_PROOF": "0"}
    variants = "one_microbatch,gpipe,1f1b,interleaved,zb_h1"
    run, records = run_experiment(ranks, 4, folder, RUN_MODE="pp", LAB_VARIANT=variants, **settings)
    assert main([str(folder), "--figures", str(folder / "figures")]) == 0
    return run, records, ElementTree.parse(folder / "figures" / "picture.svg").getroot()


def texts(svg: ElementTree.Element, css_class: str) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text") if css_class in (text.get("class") or "").split()]


def form(svg: ElementTree.Element) -> set[tuple[str, str]]:
    """Which elements a picture is made of: tag, and the first word of its class; numbers are there if they have room."""
    made = {(element.tag, (element.get("class") or "").partition(" ")[0]) for element in svg.iter()}
    return made - {(f"{SVG}text", kind) for kind in NUMBERED}


def panels(svg: ElementTree.Element) -> list[ElementTree.Element]:
    """A variant's marks each."""
    return [part for part in svg.iter(f"{SVG}svg") if part.get("class") == "panel"]


def of_class(svg: ElementTree.Element, tag: str, css_class: str) -> list[ElementTree.Element]:
    return [mark for mark in svg.iter(f"{SVG}{tag}") if css_class in (mark.get("class") or "").split()]


def test_each_span_of_each_rank_is_a_bar(drawn: tuple[dict[str, Any], Records, ElementTree.Element]) -> None:
    run, records, svg = drawn
    for panel, of_ranks in zip(panels(svg), timelines(records, run["world_size"]).values(), strict=True):
        spans = Counter(span.kind for of_rank in of_ranks for span in of_rank)
        bars = [rect for rect in panel.iter(f"{SVG}rect") if (rect.get("class") or "").split()[:1] != ["idle"]]
        assert Counter((bar.get("class") or "").split()[0] for bar in bars) == spans
        assert all(at(bar, "x") >= 0 and at(bar, "x") + at(bar, "width") <= 100.001 for bar in bars)
    assert [len(of_class(panel, "rect", "forward")) for panel in panels(svg)] == [
        4,
        16,
        16,
        32,
        16,
    ]  # one_microbatch: in one piece


def at(mark: ElementTree.Element, name: str) -> float:
    """A place in per cent."""
    return float(mark.get(name, "").removesuffix("%"))


def test_a_microbatch_has_one_colour_on_all_ranks(
    drawn: tuple[dict[str, Any], Records, ElementTree.Element],
) -> None:
    _, _, svg = drawn
    hues = {
        (bar.get("data-l"), (bar.get("class") or "").split()[1])
        for panel in panels(svg)[1:]
        for kind in NUMBERED
        for bar in of_class(panel, "rect", kind)
    }
    ways = [("0", "blue"), ("1", "orange"), ("2", "lime"), ("3", "crimson")]
    assert hues == {*ways, *((f"{number}{PRIME}", hue) for number, hue in ways)}  # a prime: of the second chunk


def test_each_message_is_an_arrow_that_arrives_after_it_left(
    drawn: tuple[dict[str, Any], Records, ElementTree.Element],
) -> None:
    _, _, svg = drawn
    for panel, microbatches in zip(panels(svg)[:3], (1, 4, 4), strict=True):
        arrows = of_class(panel, "line", "message")
        pairs = Counter(arrow.get("data-r") for arrow in arrows)
        assert pairs == dict.fromkeys(["0,1", "1,2", "2,3", "1,0", "2,1", "3,2"], microbatches)
        assert all(at(arrow, "x1") <= at(arrow, "x2") for arrow in arrows)
        assert len({arrow.get("data-b") for arrow in arrows}) == 1


def test_variants_share_one_axis_and_idle_shares_are_those_of_the_run(
    drawn: tuple[dict[str, Any], Records, ElementTree.Element],
) -> None:
    run, _, svg = drawn
    bubbles = {claim["variant"]: claim for claim in run["comparisons"] if claim["name"] == "bubble"}
    assert texts(svg, "name") == list(bubbles) == ["one_microbatch", "gpipe", "1f1b", "interleaved", "zb_h1"]
    for caption, claim in zip(texts(svg, "caption"), bubbles.values(), strict=True):
        assert caption.endswith(f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula']}")
    lengths = [float(caption.partition(" ms")[0]) for caption in texts(svg, "caption")]
    for panel, length in zip(panels(svg), lengths, strict=True):
        for track in of_class(panel, "rect", "idle"):
            assert at(track, "width") / 100 == pytest.approx(length / max(lengths), rel=0.01)


def test_the_picture_in_docs_is_of_this_form(drawn: tuple[dict[str, Any], Records, ElementTree.Element]) -> None:
    kept = ElementTree.parse(TOP / "docs" / "picture.svg").getroot()
    _, _, made = drawn
    assert form(kept) == form(made)
    assert kept.findtext(f"{SVG}style") == made.findtext(f"{SVG}style")
    assert kept.findtext(f"{SVG}title") == made.findtext(f"{SVG}title")
    assert texts(kept, "name") == texts(made, "name")
    by_formula = [caption.partition(", ")[2] for caption in texts(kept, "caption")]
    assert by_formula == [
        "75% by (p-1)/p", "27% by (p-1)/(m+p-1)", "27% by (p-1)/(m+p-1)",
        "16% by (p-1)/(vm+p-1)", "11% by (p-1)/(3m+p-1)",
    ]  # fmt: skip


def test_it_needs_no_torch() -> None:
    program = "import sys, distlab.lab.report.export; print([name for name in ('torch',) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
