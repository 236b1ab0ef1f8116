"""Whole compress runs at uneven sizes: the formulas are proven, and as many bytes are sent as predicted."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Size, Tensor

from distlab.experiments import compress
from distlab.experiments.compress.bugs import PerRank
from distlab.experiments.compress.options import Options
from distlab.experiments.compress.predictions import (
    METHODS,
    bucket_shapes,
    predict,
    sent_bytes,
    smallest_side,
    summary,
)
from distlab.experiments.compress.reference import Projection
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.preflight import refuse
from distlab.lab.report import records
from distlab.techniques.compression import compressors
from distlab.techniques.compression.compressors import Compressor, TopK
from distlab.techniques.compression.powersgd import LowRank
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from tests.labs import TINY, failed, failed_with, run_experiment
from tests.warm_ranks import Ranks

OURS = ("dense", *METHODS)
PROOF = {"gradients", "formula", "weights", "replicas"}


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "compress", "WORLD_SIZE": str(world_size)} | settings)


MIXES: list[tuple[int, dict[str, str]]] = [
    (1, {"LAB_OPTIMIZER": "adamw", "LAB_DEPTH": "1"}),
    (
        3,
        {
            "LAB_MICROBATCHES": "2",
            "LAB_CLIP": "0.1",
            "LAB_TIE": "1",
            "LAB_BUCKET_MIB": "0.02",
            "LAB_RATIO": "0.3",
            "LAB_DEPTH": "1",
        },
    ),
    (3, {"LAB_MODEL": "mlp", "LAB_ERROR_FEEDBACK": "0", "LAB_LOW_RANK": "7", "LAB_DEPTH": "1"}),
    (2, {"LAB_MODEL": "line", "LAB_RATIO": "1e-9"}),
    (2, {"LAB_MODEL": "mlp", "LAB_DTYPE": "bfloat16", "LAB_OPTIMIZER": "adamw", "LAB_DEPTH": "1"}),
    # A step has few bytes of text, so gradients have a rank below 4, and in the next case above it.
    (2, {"LAB_BATCH": "2", "LAB_SEQ": "4", "LAB_VARIANT": "powersgd,ddp_powersgd"}),
    (1, {"LAB_BATCH": "1", "LAB_SEQ": "4", "LAB_WIDTH": "64", "LAB_DEPTH": "1", "LAB_VARIANT": "powersgd"}),
]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    MIXES,
    ids=["alone", "buckets", "forgetting", "line", "bfloat16", "few bytes", "fewer"],
)
def test_a_run_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(
        ranks, world_size, tmp_path, **({"RUN_MODE": "compress", "LAB_STEPS": "2"} | settings)
    )
    assert failed(run) == set()
    config = config_of(world_size, **settings)
    feedback = config.own(Options).error_feedback
    skipped = {entry["variant"] for entry in run["skipped"]}
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    for name in set(settings.get("LAB_VARIANT", ",".join(OURS)).split(",")) & set(OURS) - skipped:
        wanted = {"wire bytes", "rest bytes", "calls"} | (
            PROOF if name != "dense" else {"gradients", "weights", "losses"}
        )
        wanted |= {"sent + residual", "residuals"} if feedback and name in METHODS else set()
        wanted |= {"rank"} if name == "powersgd" else set()
        assert {(name, claim) for claim in wanted} <= names
    assert skipped == impossible(settings)
    charts = [record for record in by_rank[0] if isinstance(record, records.Chart)]
    assert [chart.title for chart in charts] == ["Loss by bytes sent", "Bytes sent over dense"]
    assert set(charts[0].series) == {variant["name"] for variant in run["variants"]}


def impossible(settings: dict[str, str]) -> set[str]:
    if settings.get("LAB_MODEL") == "line":
        return {"powersgd", "ddp_powersgd"}
    return {"fp16", "ddp_fp16"} if settings.get("LAB_DTYPE") == "bfloat16" else set()


def test_error_feedback_lowers_the_loss_and_stores_residuals(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"LAB_VARIANT": "dense,topk", "LAB_STEPS": "40", "LAB_PROOF": "0", "LAB_DEPTH": "1"}
    last: dict[tuple[str, str], float] = {}
    stored: dict[tuple[str, str], float] = {}
    for feedback in ("1", "0"):
        folder = tmp_path / feedback
        run, by_rank = run_experiment(ranks, 2, folder, RUN_MODE="compress", LAB_ERROR_FEEDBACK=feedback, **settings)
        assert run["verdict"] == "pass"
        last |= {(each.variant, feedback): each.numbers[-1] for each in by_rank[0] if isinstance(each, records.Losses)}
        comparisons = [entry for entry in run["comparisons"] if entry["name"] == "rest bytes"]
        stored |= {(entry["variant"], feedback): entry["predicted"] for entry in comparisons}
    assert last["dense", "1"] < last["topk", "1"] < last["topk", "0"]
    assert stored["topk", "1"] == 1.5 * stored["dense", "1"] == 1.5 * stored["topk", "0"]


def test_predictions_add_up_over_buckets() -> None:
    one, many = (config_of(4, LAB_BUCKET_MIB=mib) for mib in ("25", "0.005"))
    assert len(bucket_shapes(one, 4)) == 1 < len(bucket_shapes(many, 4))
    for method in ("dense", "fp16", "powersgd"):
        assert sent_bytes(one, method, 4) == pytest.approx(sent_bytes(many, method, 4), rel=1e-12)
    calls = {p.variant: p.calls for p in predict(many) if p.name == "wire bytes"}
    assert calls["int8"] == 2 * calls["dense"] == 2 * len(bucket_shapes(many, 4))
    assert calls["dense"] < calls["powersgd"] <= 2 * calls["dense"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_LOW_RANK": "9"}, "LAB_LOW_RANK=9 is above the smallest side of a weight matrix of this model, allowed: 1 to 8"),
        ({"LAB_MODEL": "line", "LAB_VARIANT": "powersgd"}, "LAB_LOW_RANK=4 is above the smallest side"),
        ({"LAB_DTYPE": "bfloat16", "LAB_VARIANT": "fp16"}, "gradients have 16 bits already"),
        ({"LAB_VARIANT": "topk_plain"}, "any more: LAB_VARIANT=topk LAB_ERROR_FEEDBACK=0"),
        ({"LAB_CHECKPOINT_EVERY": "2"}, "without which a resumed run would lose the unsent part"),
        ({"LAB_RESUME": "auto", "LAB_RUN_ID": "before"}, "without which a resumed run would lose the unsent part"),
        ({"LAB_BUG": "no_error_feedback", "LAB_ERROR_FEEDBACK": "0"}, "there is no residual to lose"),
        ({"LAB_BUG": "no_error_feedback", "LAB_VARIANT": "dense,ddp_fp16"}, "these variants"),
        ({"LAB_BUG": "unshared_seed", "WORLD_SIZE": "1"}, "it takes 2 ranks"),
        ({"LAB_BUG": "unshared_seed", "LAB_RATIO": "1"}, "all positions are drawn"),
        ({"LAB_BUG": "int8_overflow", "LAB_VARIANT": "topk"}, "it takes int8"),
        ({"LAB_BUG": "per_rank_powersgd", "LAB_PROOF": "0"}, "nothing is compared"),
        ({"LAB_BUG": "per_rank_powersgd", "LAB_MODEL": "mlp", "LAB_BATCH": "4"}, "gradients of 4 rows have no higher rank"),
        ({"LAB_BUG": "no_error_feedback", "LAB_RATIO": "1", "LAB_VARIANT": "dense,topk"}, "all numbers are sent"),
        ({"LAB_MODEL": "line", "LAB_LOW_RANK": "1", "LAB_VARIANT": "powersgd"}, "LAB_LOW_RANK=1 saves nothing"),
        ({"LAB_MODEL": "mlp", "LAB_LOW_RANK": "16"}, "LAB_LOW_RANK=16 saves nothing"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_in_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(config_of(4, **settings), compress.MODE)
    assert len(refused.value.faults) == 1
    assert words in refused.value.faults[0]


def test_the_summary_lists_only_possible_variants() -> None:
    assert "fp16 0.500" in summary(config_of(2))
    assert "fp16" not in summary(config_of(2, LAB_DTYPE="bfloat16"))


# --- the sums of PowerSGD ---

MATRIX, GAIN = Size((12, 9)), Size((5,))


class RedrawnFactors(LowRank):
    """A wrong PowerSGD: draws new factors at each step."""

    def __call__(self, bucket: Tensor) -> Any:
        if self.factors is not None:
            self.factors, self.seed = None, self.seed + 1
        return super().__call__(bucket)


class HalvedFactors(LowRank):
    """A wrong PowerSGD: halves each rank's second factor."""

    def second_half(self, factors: Any, values: Tensor) -> None:
        super().second_half(factors, values)
        factors.second_message.mul_(0.5)


def errors_by_step(group: dist.ProcessGroup, kind: type[LowRank], ranks_of_steps: list[int]) -> list[float]:
    """Return the error of each step's sum, for a matrix of the given rank per step and one vector."""
    config = config_of(group.size(), LAB_LOW_RANK="3")
    compressor = kind(group, [MATRIX, GAIN], 3, config.seed, feedback=False)
    projection = Projection(config, [MATRIX, GAIN], feedback=False)
    errors = []
    for step, rank in enumerate(ranks_of_steps):
        gradients = [random_gradient(100 * step + member, rank) for member in range(group.size())]
        bucket = gradients[group.rank()].clone()
        compressor(bucket).wait()
        errors.append(projection.judge(gradients, bucket)[0])
    return errors


def random_gradient(seed: int, rank: int) -> Tensor:
    """Return the gradient of a matrix of which only `rank` rows are not zero, and of a vector."""
    gradient = torch.randn(MATRIX.numel() + 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient[: MATRIX.numel()].view(MATRIX)[rank:] = 0
    return gradient


def test_powersgd_sums_are_exact_for_every_matrix_rank(ranks: Ranks) -> None:
    """With rank 2 a column of Q contains only rounding errors; with rank 0 the matrix is zero."""
    for errors in ranks(3, errors_by_step, LowRank, [2, 12, 0, 12, 1, 5]):
        assert max(errors) < 1e-14


@pytest.mark.parametrize("kind", [RedrawnFactors, HalvedFactors, PerRank])
def test_a_wrong_powersgd_sum_is_detected(ranks: Ranks, kind: type[LowRank]) -> None:
    for errors in ranks(3, errors_by_step, kind, [12, 12]):
        assert min(errors[kind is RedrawnFactors :]) > 1e-3  # new factors are correct in the first step


def test_a_nan_sum_is_detected() -> None:
    values = [random_gradient(member, 12) for member in range(2)]
    projection = Projection(config_of(2), [MATRIX, GAIN], feedback=False)
    assert projection.judge(values, torch.full_like(values[0], torch.nan))[0] == math.inf


def test_default_settings_are_never_refused() -> None:
    for world_size in range(1, 9):
        for model in ("gpt", "mlp", "line"):
            environ = {"RUN_MODE": "compress", "WORLD_SIZE": str(world_size), "LAB_MODEL": model}
            refuse(Config.read(environ), compress.MODE)
    assert smallest_side(Config.read({"LAB_MODEL": "line"})) == 1


@pytest.mark.parametrize("bug", ["unshared_seed", "int8_overflow", "per_rank_powersgd", "no_error_feedback"])
def test_a_bug_fails_only_its_own_variant(ranks: Ranks, tmp_path: Path, bug: str) -> None:
    settings = {"LAB_BUG": bug, "LAB_VARIANT": "int8,randomk,powersgd", "LAB_STEPS": "1", "LAB_DEPTH": "1"}
    run, _ = run_experiment(ranks, 2, tmp_path, RUN_MODE="compress", **settings)
    wrong = {claim["variant"] for claim in run["checks"] if not claim["passed"]}
    makers = {"unshared_seed": {"randomk"}, "int8_overflow": {"int8"}, "per_rank_powersgd": {"powersgd"}}
    assert wrong == makers.get(bug, {"int8", "randomk", "powersgd"})
    if bug == "no_error_feedback":
        assert failed(run) - {"rest bytes"} == {"sent + residual", "formula"}


# --- faults: each replaces a function that the ranks call, and the run must fail ---


def halve_residual(with_residual: Any) -> Any:
    """Halve the residual before it is added."""

    def wrong(self: Compressor, bucket: Tensor) -> Tensor:
        if self.residual is not None:
            self.residual.mul_(0.5)
        values: Tensor = with_residual(self, bucket)
        return values

    return wrong


def clear_residuals(zero: Any) -> Any:
    """Clear the residuals together with the gradients."""

    def wrong(self: GradientBuckets) -> None:
        zero(self)
        for bucket in self.buckets:
            residual = getattr(getattr(bucket.all_reduce, "watched", None), "residual", None)
            if residual is not None:
                residual.zero_()

    return wrong


def skip_subtraction(subtract_sent: Any) -> Any:  # noqa: ARG001
    return lambda self, message, values: None


def pick_smallest(largest: Any) -> Any:  # noqa: ARG001
    return lambda values, k: values.abs().argsort()[:k]


def redraw_factors(call: Any) -> Any:
    """Draw new factors at each step."""

    def wrong(self: LowRank, bucket: Tensor) -> Any:
        if self.factors is not None:
            self.factors, self.seed = None, self.seed + 1
        return call(self, bucket)

    return wrong


def halve_rank_1(backward: Any) -> Any:
    def wrong(self: Replica, parts: list[Any]) -> Any:
        if dist.get_rank() == 1:
            parts = [part._replace(share=part.share / 2) for part in parts]
        return backward(self, parts)

    return wrong


def update_twice(update: Any) -> Any:
    def wrong(self: Replica) -> None:
        update(self)
        update(self)

    return wrong


def double_torchs_loss(backward: Any) -> Any:
    """Double the loss of PyTorch's variants."""

    def wrong(self: Replica, microbatches: Any) -> Any:
        return backward(self, microbatches) * (1 if self.forward is self.model else 2)

    return wrong


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "half a residual": (Compressor, "with_residual", halve_residual),
    "residuals cleared": (GradientBuckets, "zero", clear_residuals),
    "sent and kept": (TopK, "subtract_sent", skip_subtraction),
    "smallest sent": (compressors, "largest", pick_smallest),
    "new factors": (LowRank, "__call__", redraw_factors),
    "half of rank 1": (Replica, "backward", halve_rank_1),
    "two updates": (Replica, "update", update_twice),
    "double loss": (Replica, "backward", double_torchs_loss),
}


def failed_checks(ranks: Ranks, folder: Path, fault: str, variant: str) -> set[str]:
    """Return the failed checks of a run of two ranks with this fault."""
    return failed_with(
        ranks, folder, __name__, fault, RUN_MODE="compress", LAB_VARIANT=variant, LAB_STEPS="1", LAB_RATIO="0.1"
    )


@pytest.mark.parametrize("variant", ["fp16", "int8", "topk", "randomk", "powersgd"])
def test_wrong_residuals_fail_the_run(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    assert {"sent + residual", "formula"} <= failed_checks(ranks, tmp_path, "half a residual", variant)
    assert {"residuals", "formula"} <= failed_checks(ranks, tmp_path, "residuals cleared", variant)


@pytest.mark.parametrize(
    ("fault", "variant", "check"),
    [
        ("sent and kept", "topk", "sent + residual"),
        ("smallest sent", "topk", "formula"),
        ("new factors", "powersgd", "formula"),
    ],
)
def test_a_wrong_formula_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str, variant: str, check: str) -> None:
    assert check in failed_checks(ranks, tmp_path, fault, variant)


def test_errors_before_compression_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "gradients" in failed_checks(ranks, tmp_path, "half of rank 1", "topk")
    assert "weights" in failed_checks(ranks, tmp_path, "two updates", "topk")


def test_differences_to_pytorchs_hooks_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "gradients beside ours" in failed_checks(ranks, tmp_path, "new factors", "ddp_powersgd")
    assert {"losses beside ours"} == failed_checks(ranks, tmp_path, "double loss", "ddp_fp16")
