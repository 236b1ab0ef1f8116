"""The planner's page: bars of all stages that add up to what the answer says, and nothing that is fetched."""

import re
from pathlib import Path

import pytest

from distlab.cli.plan import main, read_asked
from distlab.tools.plan.advice import plan
from distlab.tools.plan.costs import cost
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import memory_by_class, stage_memory
from distlab.tools.plan.page import MOST_ROWS, memory_bars, plan_page, stages, step_bars

LINE = "--model llama3-405b --gpus 1024 --gpu h100 --seq 8192 --global-batch 2048"
GIVEN = f"{LINE} --layout tp8,pp16,dp8 --zero 1 --interleave 7"


@pytest.mark.parametrize(
    "layout", [Layout(8, 16, 8, 1, chunks=7), Layout(8, 16, 8, 1), Layout(8, 1, 128, 3), Layout(1, 18, 1, 0)]
)
def test_the_fullest_stage_holds_what_the_answer_says(layout: Layout) -> None:
    """And none holds more but for a layer's share of an end of the model."""
    asked = read_asked(
        f"--model llama3-405b --gpus {layout.gpus} --gpu h100 --gpus-per-node 8 --seq 8192 --global-batch 2048".split()
        if layout.gpus % 8 == 0
        else [
            "--model",
            "llama3-405b",
            "--gpus",
            "18",
            "--gpu",
            "h100",
            "--gpus-per-node",
            "18",
            "--seq",
            "8192",
            "--global-batch",
            "2048",
        ]
    ).job
    held = [sum(stage_memory(asked, layout, stage).values()) for stage in range(layout.pipeline)]
    assert max(held) == pytest.approx(sum(memory_by_class(asked, layout).values()), rel=1e-6)
    assert layout.pipeline == 1 or held[0] > held[-2]


def test_bars_add_up() -> None:
    asked = read_asked(GIVEN.split())
    assert asked.layout is not None
    priced = cost(asked.job, asked.layout)
    for bar in step_bars(priced):
        assert sum(piece.width for piece in bar.pieces) == pytest.approx(100)
        ends = [piece.start + piece.width for piece in bar.pieces]
        assert [piece.start for piece in bar.pieces[1:]] == pytest.approx(ends[:-1])
    bars = list(memory_bars(asked.job, asked.layout))
    assert [bar.name for bar in bars][:2] == ["stage 0: ranks 0 to 63", "stage 1: ranks 64 to 127"]
    assert len(bars) == 16 and max(bar.pieces[-1].start + bar.pieces[-1].width for bar in bars) <= 100


def test_only_the_last_stage_computes_the_vocabulary() -> None:
    asked = read_asked(GIVEN.split())
    assert asked.layout is not None
    *others, last = step_bars(cost(asked.job, asked.layout))
    assert "vocabulary" in [piece.kind for piece in last.pieces]
    assert not any(piece.kind == "vocabulary" for bar in others for piece in bar.pieces)


def test_of_many_stages_the_first_and_the_last_are_drawn() -> None:
    drawn = stages(Layout(1, 64, 1, 0))
    assert (drawn[0], drawn[-1], len(drawn)) == (0, 63, MOST_ROWS)
    assert stages(Layout(1, 3, 1, 0)) == [0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [GIVEN, f"{LINE} --tokens 1T", "--params 7B --gpus 1 --gpu rtx4090", "--params 175B --gpus 16 --gpu-memory 80GB"],
)
def test_a_page_is_written_whole(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert main([*line.split(), "--page", str(path)]) == 0
    page = path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["plan.html"]
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert all(f"<h2>{title}</h2>" in page for title in ("Memory by rank", "The step", "Ranking", "What is assumed"))
    fitting = plan(read_asked(line.split()).job).fitting
    assert ('<span class="chip good">fits</span>' in page) == bool(fitting)
    assert not re.search(r"(?:src|href)=[\"']?https?:", page)
    assert "refused" not in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE.split(), "--page", str(tmp_path / "absent" / "plan.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().out


def test_what_is_told_is_escaped() -> None:
    asked = read_asked(LINE.split())
    page = plan_page(asked.job, ["<script>"], plan(asked.job), None, None)
    assert "<script>" not in page.replace("<script>", "", 0).split("</style>")[-1] and "&lt;script&gt;" in page
