"""A stopped and resumed run has the weights of an uninterrupted one, to the bit, in every mode and on other numbers of
ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields

from distlab.cli import checkpoint
from distlab.lab.checkpoint import manifest, storage
from distlab.lab.rank.mode_loader import load
from distlab.lab.report import records
from tests.labs import failed, run_experiment
from tests.warm_ranks import Ranks

SMALL = {
    "LAB_STEPS": "6", "LAB_CHECKPOINT_EVERY": "2", "LAB_OPTIMIZER": "adamw", "LAB_CLIP": "0.5",
    "LAB_DTYPE": "float64", "LAB_BATCH": "11", "LAB_PROOF": "0", "LAB_DEPTH": "1",
}  # fmt: skip
# Modes that split layers need one with heads, others run any layer; a stage may have one layer more than another.
MODELS = {key: {"LAB_MODEL": "mlp", "LAB_DEPTH": depth} for key, depth in (("dp", "2"), ("fsdp", "2"), ("pp", "4"))}
VARIANTS = {"dp": "bucketed,ring,ddp", "fsdp": "zero1,zero3,fsdp2", "tp": "gathered,megatron", "pp": "1f1b"}
Records = dict[int, list[records.Record]]


def digests(run: dict[str, Any]) -> dict[str, str]:
    return {variant["name"]: variant["weights_sha256"] for variant in run["variants"]}


def curves(by_rank: Records) -> dict[str, list[float]]:
    return {record.variant: record.numbers for _, record in records.select(by_rank, records.Losses)}


def largest_gap(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    assert set(one) == set(other)
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


@pytest.mark.parametrize("mode", VARIANTS)
def test_a_resumed_run_ends_in_the_same_weights_to_the_bit(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    settings = SMALL | MODELS.get(mode, {}) | {"RUN_MODE": mode, "LAB_VARIANT": VARIANTS[mode]}
    whole, of_whole = run_experiment(ranks, 3, tmp_path / "a", **settings)
    source = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    resumed, of_resumed = run_experiment(ranks, 3, tmp_path / "b", **settings, LAB_RESUME=source)
    assert failed(whole) == failed(resumed) == set()
    assert (resumed["resumed"]["step"], resumed["resumed"]["path"]) == (4, source)
    assert any(check["name"] == "resumed samples" for check in resumed["checks"])
    ours = [name for name in digests(whole) if name not in load(mode).by_torch]
    assert ours and all(digests(whole)[name] == digests(resumed)[name] for name in ours)
    assert largest_gap(curves(of_whole), curves(of_resumed)) <= 1e-12  # PyTorch's own too; one curve, from step 0 on
    assert sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir()) == ["step-00000006"]


@pytest.mark.parametrize(
    ("mode", "variant", "sizes"),
    [
        ("fsdp", "zero1,zero3", (3, 1, 5)), ("fsdp", "zero3_blocking,zero2", (4, 3)), ("fsdp", "fsdp2", (1, 4)),
        ("tp", "gathered,megatron", (4, 3)), ("pp", "1f1b", (2, 3)), ("dp", "bucketed,ddp", (3, 2)),
    ],
)  # fmt: skip
def test_another_world_size_continues_the_losses(
    ranks: Ranks, tmp_path: Path, mode: str, variant: str, sizes: tuple[int, ...]
) -> None:
    settings = SMALL | MODELS.get(mode, {}) | {"RUN_MODE": mode, "LAB_VARIANT": variant, "LAB_STEPS": "4"}
    _, of_whole = run_experiment(ranks, sizes[0], tmp_path / "a", **settings)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000004")
    settings |= {"LAB_RESUME": str(tmp_path / "a"), "LAB_CHECKPOINT_EVERY": ""}
    for size in sizes[1:]:
        resumed, of_resumed = run_experiment(ranks, size, tmp_path / f"on-{size}", **settings)
        assert failed(resumed) == set() and resumed["resumed"]["step"] == 2
        assert largest_gap(curves(of_whole), curves(of_resumed)) <= 1e-12


def test_an_exported_file_has_the_dense_weights(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = tmp_path / "out.pt", str(tmp_path / "a")
    settings = SMALL | {"RUN_MODE": "fsdp", "LAB_VARIANT": "zero3", "LAB_STEPS": "2"}
    run, _ = run_experiment(ranks, 3, tmp_path / "a", **settings)
    assert checkpoint.main(["export", source, str(out)]) == 0
    content = torch.load(out)
    run_experiment(ranks, 1, tmp_path / "dense", **settings | {"RUN_MODE": "dp", "LAB_VARIANT": "flat"})
    assert checkpoint.main(["export", str(tmp_path / "dense"), str(tmp_path / "dense.pt"), "--variant", "flat"]) == 0
    wanted = torch.load(tmp_path / "dense.pt")
    assert (content["variant"], content["step"], content["settings"]["LAB_WIDTH"]) == ("zero3", 2, 16)
    for kind in ("weights", "optimizer"):
        assert content[kind].keys() == wanted[kind].keys()
        assert all((tensor - wanted[kind][name]).abs().max() < 1e-12 for name, tensor in content[kind].items())
    assert checkpoint.main(["export", source, str(out), "--variant", "zero9"]) == 2
    assert checkpoint.main(["export", str(tmp_path / "absent"), str(out)]) == 2
    assert checkpoint.main(["export", source, str(tmp_path / "no" / "out.pt")]) == 2
    assert "has zero3, and not zero9" in (errors := capsys.readouterr().err)
    assert "absent has no checkpoint" in errors and "cannot be written: No such file or directory" in errors
    assert run["checkpoints"][0]["bytes"] > 0


def test_a_resumed_run_without_steps_left_has_a_verdict(ranks: Ranks, tmp_path: Path) -> None:
    settings = SMALL | {"LAB_VARIANT": "flat", "LAB_STEPS": "2"}
    whole, _ = run_experiment(ranks, 2, tmp_path / "a", **settings)
    settings |= {"LAB_STEPS": "1", "LAB_RESUME": str(tmp_path / "a")}
    again, of_again = run_experiment(ranks, 2, tmp_path / "b", **settings)
    assert again["verdict"] == "pass" and digests(again) == digests(whole)
    assert any("there is no step left to train" in line.text for _, line in records.select(of_again, records.Said))


def test_variants_missing_in_the_checkpoint_are_skipped(ranks: Ranks, tmp_path: Path) -> None:
    run_experiment(ranks, 2, tmp_path / "a", **SMALL | {"LAB_VARIANT": "flat", "LAB_STEPS": "2"})
    run, _ = run_experiment(ranks, 2, tmp_path / "b", **SMALL | {"LAB_RESUME": str(tmp_path / "a")})
    assert set(digests(run)) == {"flat"}
    assert {skip["variant"] for skip in run["skipped"]} == {"per_parameter", "bucketed", "ring", "ddp"}


def saved_under(name: str, source: Path, path: Path) -> None:
    """Write the checkpoint of one variant under another `name` of the variant."""
    made = manifest.read(source)
    (variant,) = made.steps
    dense = storage.load_dense(source, f"{variant}/")
    path.mkdir(parents=True)
    files = storage.save_state({f"{name}/{label}": tensor for label, tensor in dense.items()}, path, None)
    steps, losses = {name: made.step}, {name: made.losses[variant]}
    manifest.write(path, replace_fields(made, steps=steps, losses=losses, files=storage.file_entries(files, path)))


def test_a_checkpoint_with_a_former_variant_name_is_resumed(ranks: Ranks, tmp_path: Path) -> None:
    settings = SMALL | {"LAB_VARIANT": "per_parameter", "LAB_STEPS": "4"}
    whole, of_whole = run_experiment(ranks, 2, tmp_path / "a", **settings)
    old = tmp_path / "old" / "checkpoints" / "step-00000002"
    saved_under("naive", tmp_path / "a" / "checkpoints" / old.name, old)
    resumed, of_resumed = run_experiment(ranks, 2, tmp_path / "b", **settings, LAB_RESUME=str(old.parent.parent))
    assert failed(resumed) == set() and resumed["resumed"]["step"] == 2
    assert digests(resumed) == digests(whole)
    assert largest_gap(curves(of_whole), curves(of_resumed)) <= 1e-12
