"""Compression, the whole experiment: proven by its formulas, as many bytes as predicted, at odd sizes and settings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Size, Tensor

from experiments import compress
from experiments.compress.mistakes import PerRank
from experiments.compress.predictions import METHODS, PLAIN, bucket_shapes, predict, sent_bytes, smallest_side
from experiments.compress.shown import summary
from experiments.compress.subspace import Projection
from tests.labs import TINY, failed, run_experiment
from tests.ranks import Ranks
from workers.config import Config, ConfigError
from workers.parallel.lowrank import LowRank
from workers.rank.refusals import refuse
from workers.report import records
from workers.workload.model import outline

OURS = ("naive", "dense", *METHODS)
PROOF = {"formula", "limit", "replicas"}


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "compress", "WORLD_SIZE": str(world_size)} | settings)


MIXES: list[tuple[int, dict[str, str]]] = [
    (1, {"LAB_OPTIMIZER": "adamw"}),
    (3, {"LAB_MICROBATCHES": "2", "LAB_CLIP": "0.1", "LAB_TIE": "1", "LAB_BUCKET_MIB": "0.02", "LAB_RATIO": "0.3"}),
    (4, {"LAB_MODEL": "mlp", "LAB_ERROR_FEEDBACK": "0", "LAB_LOW_RANK": "7"}),
    (2, {"LAB_MODEL": "line", "LAB_RATIO": "1e-9"}),
    (2, {"LAB_DTYPE": "bfloat16", "LAB_OPTIMIZER": "adamw"}),
    # Few bytes of text in a step: matrices of less than rank 4, then of more, in factors of 4.
    (2, {"LAB_BATCH": "2", "LAB_SEQ": "4", "LAB_VARIANT": "powersgd,powersgd_plain,ddp_powersgd"}),
    (1, {"LAB_BATCH": "1", "LAB_SEQ": "4", "LAB_WIDTH": "64", "LAB_DEPTH": "1", "LAB_VARIANT": "powersgd"}),
]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    MIXES,
    ids=["alone", "buckets", "forgetting", "line", "bfloat16", "few bytes", "fewer"],
)
def test_a_run_holds(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "compress"} | settings))
    assert failed(run) == set()
    config = config_of(world_size, **settings)
    feedback = config.own(compress.Options).error_feedback
    skipped = {entry["variant"] for entry in run["skipped"]}
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    for name in set(settings.get("LAB_VARIANT", ",".join(OURS)).split(",")) & set(OURS) - skipped:
        wanted = {"wire bytes", "rest bytes", "calls"} | (
            PROOF if name != "dense" else {"gradients", "weights", "losses"}
        )
        wanted |= {"sent + residual"} if feedback and name in METHODS else set()
        wanted |= {"rank"} if name == "powersgd" else set()
        assert {(name, claim) for claim in wanted} <= names
    assert skipped == impossible(settings)
    charts = [record for record in by_rank[0] if isinstance(record, records.Chart)]
    assert [chart.title for chart in charts] == ["Loss by bytes sent", "Bytes sent over dense"]
    assert set(charts[0].series) == {variant["name"] for variant in run["variants"]}


def impossible(settings: dict[str, str]) -> set[str]:
    if settings.get("LAB_ERROR_FEEDBACK") == "0":
        return {f"{name}_plain" for name in PLAIN}
    if settings.get("LAB_MODEL") == "line":
        return {"powersgd", "powersgd_plain", "ddp_powersgd"}
    return {"bf16", "fp16", "ddp_fp16"} if settings.get("LAB_DTYPE") == "bfloat16" else set()


def test_feedback_ends_lower_than_none_and_the_residual_is_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"LAB_VARIANT": "dense,sign,sign_plain,topk,topk_plain", "LAB_STEPS": "40", "LAB_PROOF": "0"}
    run, by_rank = run_experiment(ranks, 2, tmp_path, RUN_MODE="compress", **settings)
    assert run["verdict"] == "pass"
    last = {record.variant: record.values[-1] for record in by_rank[0] if isinstance(record, records.Losses)}
    assert last["dense"] < last["topk"] < last["topk_plain"]
    assert last["dense"] < last["sign"] < last["sign_plain"]
    rest = {entry["variant"]: entry["predicted"] for entry in run["comparisons"] if entry["name"] == "rest bytes"}
    assert rest["topk"] == 1.5 * rest["dense"] == 1.5 * rest["topk_plain"]


def test_predictions_add_up_over_buckets() -> None:
    one, many = (config_of(4, LAB_BUCKET_MIB=mib) for mib in ("25", "0.005"))
    assert len(bucket_shapes(one, 4)) == 1 < len(bucket_shapes(many, 4))
    for method in ("naive", "dense", "bf16", "powersgd"):
        assert sent_bytes(one, method, 4) == pytest.approx(sent_bytes(many, method, 4), rel=1e-12)
    calls = {p.variant: p.calls for p in predict(many) if p.name == "wire bytes"}
    assert calls["naive"] == 2 * len(list(outline(many).parameters())) > calls["int8"]
    assert calls["int8"] == 2 * calls["dense"] == 2 * len(bucket_shapes(many, 4))
    assert calls["dense"] < calls["powersgd"] <= 2 * calls["dense"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_LOW_RANK": "9"}, "LAB_LOW_RANK=9 is above the smallest side of a weight matrix of this model, allowed: 1 to 8"),
        ({"LAB_MODEL": "line", "LAB_VARIANT": "powersgd"}, "LAB_LOW_RANK=4 is above the smallest side"),
        ({"LAB_DTYPE": "bfloat16", "LAB_VARIANT": "bf16"}, "gradients are of 16 bits already"),
        ({"LAB_ERROR_FEEDBACK": "0", "LAB_VARIANT": "topk_plain"}, "topk is without it already"),
        ({"LAB_CHECKPOINT_EVERY": "2"}, "without which a resumed run would lose what was not sent"),
        ({"LAB_RESUME": "auto", "LAB_RUN_ID": "before"}, "without which a resumed run would lose what was not sent"),
        ({"LAB_BUG": "no_error_feedback", "LAB_ERROR_FEEDBACK": "0"}, "there is none to forget"),
        ({"LAB_BUG": "no_error_feedback", "LAB_VARIANT": "dense,topk_plain"}, "these variants"),
        ({"LAB_BUG": "unshared_seed", "WORLD_SIZE": "1"}, "it takes 2 ranks"),
        ({"LAB_BUG": "unshared_seed", "LAB_RATIO": "1"}, "all places are drawn"),
        ({"LAB_BUG": "int8_overflow", "LAB_VARIANT": "topk"}, "it takes int8"),
        ({"LAB_BUG": "per_rank_powersgd", "LAB_PROOF": "0"}, "nothing is compared"),
        ({"LAB_BUG": "per_rank_powersgd", "LAB_MODEL": "mlp", "LAB_BATCH": "4"}, "gradients of 4 rows have no higher rank"),
        ({"LAB_BUG": "no_error_feedback", "LAB_RATIO": "1", "LAB_VARIANT": "dense,topk"}, "all numbers are sent"),
        ({"LAB_MODEL": "line", "LAB_LOW_RANK": "1", "LAB_VARIANT": "powersgd"}, "LAB_LOW_RANK=1 factors nothing"),
        ({"LAB_MODEL": "mlp", "LAB_LOW_RANK": "16"}, "LAB_LOW_RANK=16 factors nothing"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(config_of(4, **settings), compress.MODE)
    assert len(refused.value.faults) == 1
    assert words in refused.value.faults[0]


def test_only_what_can_run_is_announced() -> None:
    assert "fp16 0.500" in summary(config_of(2))
    assert "fp16" not in summary(config_of(2, LAB_DTYPE="bfloat16"))


# --- what PowerSGD's sum has to satisfy ---

MATRIX, GAIN = Size((12, 9)), Size((5,))


class Cold(LowRank):
    """Draws its factors anew at each step."""

    def __call__(self, bucket: Tensor) -> Any:
        if self.factors is not None:
            self.factors, self.seed = None, self.seed + 1
        return super().__call__(bucket)


class HalfOfIt(LowRank):
    """Takes half of what each rank has in the space."""

    def second_half(self, factors: Any, values: Tensor) -> None:
        super().second_half(factors, values)
        factors.right.mul_(0.5)


def judged(group: dist.ProcessGroup, kind: type[LowRank], ranks_of_steps: list[int]) -> list[float]:
    """How far each step's sum is off, for matrices of these ranks and one gain."""
    config = config_of(group.size(), LAB_LOW_RANK="3")
    compressor = kind(group, [MATRIX, GAIN], 3, config.seed, feedback=False)
    projection = Projection(config, [MATRIX, GAIN])
    found = []
    for step, rank in enumerate(ranks_of_steps):
        everyone = [flat(100 * step + member, rank) for member in range(group.size())]
        bucket = everyone[group.rank()].clone()
        compressor(bucket).wait()
        found.append(projection.judge(everyone, bucket)[0])
    return found


def flat(seed: int, rank: int) -> Tensor:
    """A gradient of a matrix of so many rows that are not zero, and a gain's."""
    gradient = torch.randn(MATRIX.numel() + 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient[: MATRIX.numel()].view(MATRIX)[rank:] = 0
    return gradient


def test_the_sum_is_right_whatever_the_ranks_of_the_matrices(ranks: Ranks) -> None:
    """Of rank 2, whose Q has a column of rounding, then 12, 0, where all is zero, and 12 again."""
    for found in ranks(3, judged, LowRank, [2, 12, 0, 12, 1, 5]):
        assert max(found) < 1e-14


@pytest.mark.parametrize("kind", [Cold, HalfOfIt, PerRank])
def test_another_sum_is_told(ranks: Ranks, kind: type[LowRank]) -> None:
    for found in ranks(3, judged, kind, [12, 12]):
        assert min(found[kind is Cold :]) > 1e-3  # what draws anew at each step is right in the first one


def test_a_sum_that_is_no_number_is_told() -> None:
    values = [flat(member, 12) for member in range(2)]
    assert Projection(config_of(2), [MATRIX, GAIN]).judge(values, torch.full_like(values[0], torch.nan))[0] == math.inf


def test_defaults_are_refused_nowhere() -> None:
    for world_size in range(1, 9):
        for model in ("gpt", "mlp", "line"):
            environ = {"RUN_MODE": "compress", "WORLD_SIZE": str(world_size), "LAB_MODEL": model}
            refuse(Config.read(environ), compress.MODE)
    assert smallest_side(Config.read({"LAB_MODEL": "line"})) == 1


@pytest.mark.parametrize("bug", ["unshared_seed", "int8_overflow", "per_rank_powersgd", "no_error_feedback"])
def test_a_mistake_is_seen_only_where_it_is_made(ranks: Ranks, tmp_path: Path, bug: str) -> None:
    settings = {"LAB_BUG": bug, "LAB_VARIANT": "int8,randomk,powersgd", "LAB_STEPS": "1"}
    run, _ = run_experiment(ranks, 2, tmp_path, RUN_MODE="compress", **settings)
    wrong = {claim["variant"] for claim in run["checks"] if not claim["passed"]}
    makers = {"unshared_seed": {"randomk"}, "int8_overflow": {"int8"}, "per_rank_powersgd": {"powersgd"}}
    assert wrong == makers.get(bug, {"int8", "randomk", "powersgd"})
    if bug == "no_error_feedback":
        assert failed(run) - {"rest bytes"} == {"sent + residual"}
