"""`python -m benchmarks.gpu` without a card: parts have time limits, results are written immediately, and the tables
are those of benchmarks/RESULTS.md."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import llama_steps, measured_card, parts
from benchmarks.gpu.parts import Ended, Part, Row
from distlab.tools.plan import rows
from distlab.tools.plan.costs import cost

ABOUT = {"card": "a card", "date": "2026-11-27", "torch": "2.11.0", "command": "python3 -m benchmarks.gpu"}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def report(tmp_path: Path) -> gpu.Report:
    return gpu.Report(tmp_path / "out", dict(ABOUT))


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    found = parts.ended(["-c", child], {}, tmp_path, 3)
    assert found.code is None
    assert time.monotonic() - began < 30
    row = parts.judged("it", found, 0)
    assert (row.held, row.told) == (False, "ended at its bound: ")


def test_a_verdict_needs_the_code_and_the_sentence() -> None:
    output = "rank 0 | rank 2 was killed by SIGKILL\n"
    assert parts.judged("it", Ended(3, output), 3, "rank 2 .*killed").held
    assert not parts.judged("it", Ended(3, output), 3, "rank 1 .*killed").held
    assert not parts.judged("it", Ended(0, output), 3, "rank 2 .*killed").held


def test_results_are_written_after_each_part(report: gpu.Report, tmp_path: Path) -> None:
    def broken(folder: Path, bound_s: float) -> Iterator[Row]:  # noqa: ARG001
        raise ValueError("no such thing")
        yield

    def works(folder: Path, bound_s: float) -> Iterator[Row]:
        (folder / "output").write_text("some output\n")
        yield Row("a sum", True, f"within {bound_s:g} s")

    until = time.monotonic() + 60
    gpu.run(Part("broken", 10, broken), report, until, tmp_path)
    gpu.run(Part("works", 10, works), report, until, tmp_path)
    gpu.run(Part("late", 10, works), report, time.monotonic(), tmp_path)
    found = json.loads((report.folder / "gpu.json").read_text())
    assert [(row["part"], row["held"]) for row in found["rows"]] == [
        ("broken", False),
        ("works", True),
        ("late", False),
    ]
    assert "ValueError: no such thing" in found["rows"][0]["told"]
    assert "some output" in (report.folder / "gpu.log").read_text()
    table = (report.folder / "gpu.md").read_text()
    assert table.startswith("a card, 2026-11-27, torch 2.11.0")
    assert "| a sum | 0 | yes | within 10 s |" in table


def test_the_card_and_the_steps_have_a_table_each() -> None:
    card = {
        "peak": 1e15, "products": [[1024, 1024, 1024, 5e14], [1024, 1024, 4096, 1e14]], "memory": 3e12,
        "attention": [[2048, 4e14, 3e14]], "number_s": {"norm": 2e-12},
    }  # fmt: skip
    step = {
        "layers": 24, "width": 1024, "positions": 2048, "samples": 8, "parameters": 4e8, "step_s": 0.1,
        "predicted_s": 0.095, "off": -0.05, "mfu": 0.4, "peak_bytes": 3e10,
    }  # fmt: skip
    lines = list(gpu.markdown(ABOUT, {"card": card, "steps": [step]}, []))
    assert "| 1024 | 500.0 | 50.0% |" in lines
    assert "| 24, 1024, 2048, 8 | 0.40B | 100.0 | 95.0 | -5.0% | 40.0% | 30.00 |" in lines


def test_each_part_has_a_limit_and_its_own_name(report: gpu.Report) -> None:
    found = gpu.all_parts(report)
    assert len({part.name for part in found}) == len(found)
    assert {part.name for part in found} >= {"card", "killed rank", "paused rank", "hang", "peaks fsdp"}
    assert max(part.limit_s for part in found) <= 150


@pytest.mark.parametrize("shape", measured_card.TINY[:2])
def test_a_step_is_shown_next_to_the_sum_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int]
) -> None:
    monkeypatch.setattr(measured_card, "ON_CARD", False)
    monkeypatch.setattr(measured_card, "DEVICE", "cpu")
    for name, value in {
        "TOKENS": 32,
        "WIDTH": 16,
        "VOCABULARY": 64,
        "SIZES": (16,),
        "SCORES": [],
        "POSITIONS": (64,),
    }.items():
        monkeypatch.setattr(measured_card, name, value)
    monkeypatch.setattr(measured_card, "MOST_CALLS", 1)
    monkeypatch.setattr(measured_card, "LEAST_S", 0)
    card = measured_card.measure_card()
    found = measured_card.time_step(card, shape)
    assert found["predicted_s"] == pytest.approx(card.step_s(shape[0], shape[1], shape[3], shape[4], 64))
    assert found["off"] == pytest.approx(found["predicted_s"] / found["step_s"] - 1)
    assert found["mfu"] > 0


def test_missing_packages_are_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert gpu.missing().startswith("not installed: no_such_package; ")
    monkeypatch.setattr(gpu, "NEEDED", ("torch",))
    monkeypatch.setattr(gpu, "ON_CARD", True)
    assert gpu.missing().startswith("torch sees no GPU here")


def test_a_run_that_fails_on_a_card_is_checked_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--only", "too large"]
    done = subprocess.run(
        command, cwd=parts.TOP, env={**os.environ, "LAB_DEVICE": "cpu"}, capture_output=True, text=True,
        check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert "failed at step 3 in too large a tensor" in row["told"]


@pytest.mark.parametrize("case", llama_steps.TINY)
def test_the_planner_can_price_the_steps_of_llama(case: llama_steps.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the code for a GPU on the CPU; the parameters are those of the shape and the norms."""
    for name, value in (("ON_CARD", False), ("DEVICE", "cpu"), ("VOCABULARY", 64), ("STEPS", 1)):
        monkeypatch.setattr(llama_steps, name, value)
    monkeypatch.setattr(measured_card, "ON_CARD", False)
    monkeypatch.setattr(llama_steps, "card_name", lambda: "NVIDIA H200")
    row = msgspec.convert(llama_steps.row_of(case), rows.Row)
    job, layout = rows.job_and_layout(row)
    assert row.gpu == "h200" and row.step_s is not None and cost(job, layout).step_s > 0
    assert row.parameters == job.shape.body + job.shape.ends + (2 * case.layers + 1) * case.width
