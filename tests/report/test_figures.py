"""Figures as files: each of the page, that can be read by itself, as SVG and as pixels."""

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distlab.cli.report import main
from distlab.report.export import figures, png
from distlab.report.verdict import judge
from tests.report.made_up import good_run, pipeline_run, start, written

pytestmark = pytest.mark.timeout(60)
SVG = "{http://www.w3.org/2000/svg}"


def test_every_chart_of_the_page_and_the_picture_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", pipeline_run())
    assert main([str(run), "--figures", str(tmp_path / "figures")]) == 0
    names = sorted(path.stem for path in (tmp_path / "figures").glob("*.svg"))
    assert names == sorted(path.stem for path in (tmp_path / "figures").glob("*.png"))
    assert {"picture", "losses-by-step", "time-of-a-step-by-variant", "memory-over-a-step-of-1f1b"} <= set(names)
    assert f"figures    {len(names)} in {tmp_path / 'figures'}, as SVG and PNG: picture, " in capsys.readouterr().out
    assert not (run / "report.html").exists()
    for path in (tmp_path / "figures").glob("*.png"):
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:24])
        assert head.startswith(b"\x89PNG") and width >= 900 and height >= 200


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


def test_pixels_are_those_of_the_drawing_with_a_font_of_its_own() -> None:
    blank = png('<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"/>')
    told = png('<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><text y="14">abc</text></svg>')
    assert told != blank  # text is drawn where a machine has no font


def test_a_run_without_a_figure_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", {0: [start(world_size=1)]})
    assert main([str(run), "--figures", str(tmp_path / "figures")]) == 2
    assert "has no figure: it ended before anything was measured" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), "--figures", str(tmp_path / "figures")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
