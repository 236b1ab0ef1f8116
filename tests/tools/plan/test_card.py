"""A measured GPU card: other sizes are interpolated, and invalid files are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.plan import main, read_question
from distlab.lab.config import ConfigError
from distlab.lab.report.reading import BrokenRecord
from distlab.tools.plan.card import Attention, Card, Product, read_card
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.step_time import compute_parts

NUMBERS = {"norm": 4e-12, "gelu": 3e-12, "add": 2e-12, "copy": 1e-12, "loss": 8e-12, "update": 1e-11}
CARD = Card(
    "a card", 1e15,
    [Product(m, k, n, min(m, k, n) * 5e10) for m in (1024, 8192) for k in (1024, 8192) for n in (1024, 8192)],
    [Attention(1024, 2e14, 1e14), Attention(8192, 4e14, 3e14)], NUMBERS, 3e12,
)  # fmt: skip


def test_matrix_product_times_are_interpolated() -> None:
    assert CARD.product_s(8192, 1024, 8192) == 2 * 8192 * 1024 * 8192 / (1024 * 5e10)
    flops = 2 * 4096**3 / CARD.product_s(4096, 4096, 4096)
    assert 1024 * 5e10 < flops < 8192 * 5e10


def test_a_step_is_the_sum_of_its_parts() -> None:
    parts = dict(CARD.parts(3, 1024, 1024, 2, 8192))
    assert CARD.step_s(3, 1024, 1024, 2, 8192) == pytest.approx(sum(parts.values()))
    stream = 2 * 1024 * 1024
    assert parts["memory"] == pytest.approx(3 * stream * (2 * 4e-12 + 4 * 3e-12 + 4 * 2e-12 + 9.5 * 1e-12))
    assert parts["loss"] == pytest.approx(2 * 1024 * 8192 * 8e-12)
    assert parts["update"] == pytest.approx((12 * 3 * 1024**2 + (2 * 8192 + 1024) * 1024) * 1e-11)
    flops = 2 * 2 * 1024 * 1024 * 1024
    assert parts["attention"] == pytest.approx(3 * (flops / 2e14 + 2.5 * flops / 1e14))
    twice = dict(CARD.parts(6, 1024, 1024, 2, 8192))
    assert twice["products"] == pytest.approx(2 * parts["products"])
    assert twice["scores"] == parts["scores"]


def test_a_written_card_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"card": CARD._asdict()}))
    assert read_card(path) == CARD
    job, sources, *_ = read_question(f"--params 125M --gpus 1 --gpu-memory 80GB --batch 8 --calibrate {path}".split())
    step_s = CARD.step_s(job.shape.layers, job.shape.width, job.seq, 8, job.shape.vocabulary)
    of_shape = replace(job, num_parameters=job.shape.body + job.shape.ends)
    computed_s = sum(compute_parts(of_shape, Layout(1, 1, 1, 0)).values())
    assert computed_s == pytest.approx(job.global_samples / 8 * step_s)
    assert "(a card)" in sources[0]
    assert main(f"--params 125M --gpus 1 --gpu-memory 80GB --json --calibrate {path}".split()) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["job"]["gpu"]["memory_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"products": []}, "it has no product or no attention"),
        ({"memory": 0}, "ValueError: 0 where a measured number belongs"),
        ({"number_s": {}}, "KeyError"),
        ({"products": [[1, 2]]}, "ValueError"),
        (None, "KeyError: 'card'"),
    ],
)
def test_an_invalid_card_is_refused(tmp_path: Path, change: dict[str, Any] | None, words: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({} if change is None else {"card": CARD._asdict() | change}))
    with pytest.raises(BrokenRecord, match=words):
        read_card(path)
    with pytest.raises(ConfigError, match=r"is no card that benchmarks\.gpu has measured"):
        read_question(f"--params 7B --gpus 8 --gpu-memory 80GB --calibrate {path}".split())
