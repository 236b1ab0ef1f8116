"""The planner compared with published runs: each source predicted without its rows, a user's file, bands and fits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any

import msgspec
import pytest

from benchmarks import plan_fit
from distlab.cli.plan import main
from distlab.lab.config import ConfigError
from distlab.tools.plan import gpu
from distlab.tools.plan.costs import cost
from distlab.tools.plan.gpu import Shares, shares_of, tables
from distlab.tools.plan.model import named
from distlab.tools.plan.rows import Row, job_and_layout, published, read_rows
from distlab.tools.plan.score import MEMORY_NEAR, NEAR, Compared, bands, compared, groups, inside, known_errors

ROW = {
    "name": "8B on 8", "source": "NVIDIA/dgxc-benchmarking llama3.1/README_8b.md", "gpu": "H100", "parameters": 8.03e9,
    "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": 128256, "gated": True,
    "tied": False, "sequence": 8192, "gpus": 8, "gpus_per_node": 8, "tp": 1, "pp": 1, "cp": 2, "dp": 4, "ep": 1,
    "zero_stage": 1, "chunks_per_rank": 1, "sequence_parallel": True, "microbatch": 1, "global_batch": 128,
    "recompute": "none", "fp8": False, "overlap_tp": False, "flash": True, "measured_s": 12.78, "how": "read",
}  # fmt: skip


def steps() -> list[Compared]:
    return [each for each in known_errors() if each.what == "step"]


def test_step_errors_are_mostly_within_a_quarter() -> None:
    errors = [abs(each.error) for each in steps()]
    assert len(errors) >= 120 and median(errors) <= 0.16
    assert sum(error <= NEAR for error in errors) / len(errors) >= 0.68
    assert sum(map(inside, steps())) / len(errors) >= 0.8
    of_nvidia = [abs(each.error) for each in steps() if each.row.publication == "NVIDIA/dgxc-benchmarking"]
    assert len(of_nvidia) == 10 and median(of_nvidia) <= 0.08
    mixtures = [abs(each.error) for each in steps() if each.row.shape.experts]
    assert len(mixtures) == 15 and median(mixtures) <= 0.25


def test_memory_errors_are_within_ten_percent() -> None:
    known = [each for each in known_errors() if each.kind == "memory" and each.row.dtypes]
    missed = {each.row.name: round(each.error, 2) for each in known if abs(each.error) > MEMORY_NEAR + 0.005}
    assert len(known) >= 40 and all(name.startswith(("titan 405B", "distlab GPT 4x8192")) for name in missed), missed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"recompute": "full"}, {"recompute": "none"}),  # the repeated forward pass
        ({"chunks": 8}, {"chunks": 1}),  # Llama 3's interleaved stages
        ({"fp8": True}, {"fp8": False}),  # products in 8 bits
        ({"overlap_tp": True}, {"overlap_tp": False}),
        ({"ep": 64}, {"once_a_node": False}),  # tokens that are sent once per node
    ],
)
def test_each_modelled_feature_changes_the_step_time(old: dict[str, Any], new: dict[str, Any]) -> None:
    rows = [
        row for row in published() if all(getattr(row, name) == value for name, value in old.items()) and row.step_s
    ]
    assert rows
    for row in rows:
        job, layout = job_and_layout(row)
        fields = {name: value for name, value in new.items() if name != "chunks"}
        changed = cost(replace(job, **fields), replace(layout, chunks=new.get("chunks", layout.chunks))).step_s
        assert abs(changed / cost(job, layout).step_s - 1) > 0.005, row.name


def test_a_source_is_predicted_without_its_own_rows() -> None:
    """Its shares are fitted to other sources only, and to other chips only if no other source has this chip."""
    assert len({row.name for row in published()}) == len(published()), "every row has a name of its own"
    assert all(row.source and row.dp * row.tp * row.pp * row.cp == row.gpus for row in published())
    without = tables()["left_out"]
    for row in published():
        kind = f"{tables()['gpus'][row.gpu]['kind']} {row.software}".strip()
        of_source = [row for row in published() if row.step_s and not row.shape.experts]
        if kind in tables()["fitted"] and row in of_source:
            left = without[row.publication].get(kind, tables()["fitted"][kind])
            assert left is None or row.publication not in left["sources"] or left == tables()["fitted"][kind]
    assert (
        job_and_layout(published()[0], published()[0].publication)[0].gpu.shares
        != job_and_layout(published()[0])[0].gpu.shares
    )
    assert shares_of("H100", "mpt", "mosaicml/llm-foundry") == shares_of("H100", "", "mosaicml/llm-foundry")


def test_bands_equal_those_in_the_file() -> None:
    assert bands() == tables()["bands"]


def test_fitted_shares_equal_those_in_the_file() -> None:
    """Fit one kind without one of its sources."""
    rows = [row for row in published() if row.software == "megatron" and row.gpu == "b200" and row.step_s and not row.shape.experts]  # fmt: skip
    source = "MooreThreads/SimuMax"
    found = plan_fit.fitted_shares([row for row in rows if row.publication != source])
    assert replace(found, experts=0) == replace(shares_of("B200", "megatron", source), experts=0)


def test_a_fit_recovers_known_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid = {"matrix": [0.5, 0.6, 0.7], "attention": [0.2, 0.3], "memory": [0.5, 0.8], "fp8": [0.85], "experts": [0.6]}
    monkeypatch.setattr(plan_fit, "GRID", grid)
    monkeypatch.setattr(plan_fit, "PULL", 1e-6)
    made = []
    for row in [row for row in published() if row.software == "megatron" and row.gpu == "a100-80gb" and row.step_s]:
        job, layout = job_and_layout(row)
        job = replace(job, gpu=replace(job.gpu, shares=Shares(0.6, 0.2, 0.8, 0.85, 0.6)))
        made.append(msgspec.structs.replace(row, step_s=cost(job, layout).step_s))
    assert plan_fit.fitted_shares(made) == Shares(0.6, 0.2, 0.8, 0.85, 0.6)
    path = tmp_path / "gpus.json"
    copyfile(gpu.TABLE, path)
    monkeypatch.setattr(plan_fit, "published", lambda: made)
    lines = plan_fit.fit(path)
    assert lines == [f"{kind}: products 60%, attention 20% of the peak, memory 80% of its rate, by {len(made)} rows" for kind in ("A100", "A100 megatron")]  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["gpus.json"]


def test_the_score_is_printed_worst_first_and_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--score"]) == 0
    printed = capsys.readouterr().out
    table = printed.split("\n\n")[0].splitlines()
    errors = [float(re.search(r"([+-]\d+)%", line)[1]) for line in table if " step  " in line]  # type: ignore[index]
    assert len(errors) == len(steps()) and abs(errors[0]) > 40 > abs(errors[len(errors) // 2])
    for words in ("step, dense bf16", "step, experts fp8", "step, h100 megatron", "memory, types known"):
        assert words in printed
    assert main(["--params", "7B", "--gpus", "64", "--gpu", "h100", "--score"]) == 2
    assert "takes no other option than --json" in capsys.readouterr().err


# A user's file.


def scored(path: Path, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path.write_text(json.dumps(rows))
    assert main(["--score", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_users_rows_are_scored_without_their_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of a published source is predicted like that source; a row of another source by all rows."""
    own = next(each for each in steps() if each.row.name == "dgxc Llama3.1-8B 8 H100 bf16 cp2")
    other = ROW | {"name": "other", "source": "someone, Megatron-LM", "measured_mem_bytes": 6e10}
    found = scored(tmp_path / "rows.json", [ROW, other], capsys)
    step, unknown, peak = found["rows"]
    assert step["predicted"] == own.predicted and step["software"] == "megatron" and step["error"] == own.error
    assert unknown["predicted"] != own.predicted and peak["of"] == "peak" and found["asked"] == []
    assert set(found["kinds"]) == {"step", "step, dense bf16", "step, h100 megatron", "memory, types known"}
    assert found["kinds"]["step"] | {"median": 0, "signed": 0, "worst": 0} == {
        "rows": 2, "median": 0, "signed": 0, "near": NEAR, "within": 2, "inside": 2, "worst": 0,
    }  # fmt: skip
    assert main(["--score", str(tmp_path / "rows.json")]) == 0
    assert "step, dense bf16" in capsys.readouterr().out


def test_missing_fields_of_a_row_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lean = {name: value for name, value in ROW.items() if name not in ("tied", "dp")}
    bad = {name: value for name, value in ROW.items() if name not in ("layers", "measured_s")} | {"name": "bad"}
    asks = scored(tmp_path / "rows.json", [lean, bad, ROW | {"name": "odd", "tp": 3}, ROW | {"parameters": 2e10}], capsys)["asked"]  # fmt: skip
    assert asks[0] == "bad: leaves out layers, measured_s or measured_mem_bytes: needed; not scored"
    assert asks[1] == "odd: tp3 x pp1 x cp2 x dp4 are not its 8 GPUs; not scored"
    assert asks[2] == "8B on 8: leaves out tied (taken: False)"
    assert asks[3].startswith(
        "8B on 8: its shape has 40% of its parameters; which of these does it leave out: head_dim"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON file"),
        ("[]", "is not a list of rows"),
        (json.dumps([{"name": "x"}]), "x: leaves out gpu, gpus, layers"),
        (json.dumps([ROW | {"gpu": "h1000"}]), "did you mean 'h100'"),
        (json.dumps([ROW | {"recompute": "some"}]), "Invalid enum value 'some'"),
        (json.dumps([ROW | {"layers": "many"}]), "Expected `int`, got `str`"),
    ],
)
def test_an_invalid_file_of_rows_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_mixtures_are_recognized_by_their_widths(tmp_path: Path) -> None:
    """A row has DeepSeek-V3's widths but not its latent attention; these identify the model, even with 4 layers."""
    shape, parameters, _ = named("deepseek-v3")
    row = ROW | {name: getattr(shape, name) for name in ("width", "heads", "kv_heads", "mlp_width", "experts", "experts_a_token", "vocabulary")}  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row | {"layers": 61, "moe_layers": 58, "parameters": parameters}, row | {"layers": 4, "moe_layers": 1, "parameters": 14e9}]))  # fmt: skip
    (whole, part), asks = read_rows(path)
    assert whole.shape == shape and part.shape == replace(shape, layers=4, moe_layers=1) and asks == []


def test_groups_contain_every_row_once() -> None:
    found = groups(known_errors())
    by_kind = [each for name, rows in found.items() if name.startswith(("step, dense", "step, experts")) for each in rows]  # fmt: skip
    assert len(by_kind) == len(steps()) == len(found["step"])
    assert isinstance(found["step"][0].row, Row) and compared([]) == []
