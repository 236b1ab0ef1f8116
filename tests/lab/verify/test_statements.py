"""Statements of what ranks and one process share: each wrong line of the shared code fails by the statement's name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load_for
from distlab.lab.workload import data, experts, model
from distlab.lab.workload.model import Dropouts
from distlab.lab.workload.optimizer import PlainSGD
from distlab.lab.workload.user_model import SummedLoss
from tests.lab.verify import model_statements
from tests.lab.verify.statements import check_shared_parts
from tests.labs import TINY

Found = dict[str, tuple[float, float]]  # the worst of each check, and its tolerance
MESH = {"RUN_MODE": "mesh", "LAB_MESH": "dp2", "LAB_DROPOUT": "0.1"}
LINE, MLP, MOE = {"LAB_MODEL": "line"}, {"LAB_MODEL": "mlp"}, {"RUN_MODE": "moe"}
AGAIN = {"LAB_RECOMPUTE": "1"}


def stated(**settings: str) -> Found:
    """What the statements say of a run of two ranks with these settings."""
    config = Config.read(TINY | {"RUN_MODE": "dp", "WORLD_SIZE": "2"} | settings)
    mode, found = load_for(config), dict[str, tuple[float, float]]()

    def check(name: str, off: float, tolerance: float, **_: Any) -> None:
        found[name] = max(found.get(name, (0.0, tolerance)), (float(off), tolerance))

    lab: Any = SimpleNamespace(
        config=config, mode=mode, rank=0, device=torch.device("cpu"), check=check, at=lambda *_: None,
        mesh=SimpleNamespace(size=lambda axis: mode.axes(config).get(axis, 1)),
        model=lambda dtype: mode.model(config, config.seed).to(dtype),
        batches=lambda dtype, proof=False: mode.batches(config, proof=proof, device=torch.device("cpu"), dtype=dtype),
    )  # fmt: skip
    check_shared_parts(lab)
    return found


def failed(found: Found) -> set[str]:
    """The names of the statements that are not true."""
    return {name for name, (off, tolerance) in found.items() if not off <= tolerance}


@pytest.mark.parametrize(
    "settings",
    [
        {}, LINE, MLP, AGAIN, MLP | AGAIN, MOE, MESH, MOE | MLP | {"LAB_TOP_K": "1"},
        MOE | {"LAB_CAPACITY": "0.5"}, {"LAB_TIE": "1", "LAB_OPTIMIZER": "adamw", "LAB_DTYPE": "bfloat16"},
        {"LAB_MICROBATCHES": "3"}, {"WORLD_SIZE": "1"}, {"LAB_BATCH": "2"}, {"LAB_SEQ": "1", "LAB_DEPTH": "1"},
        {"LAB_WIDTH": "1", "LAB_HEADS": "1"}, {"RUN_MODE": "pp", "LAB_MICROBATCHES": "4"}, MESH | {"LAB_DROPOUT": "0.9"},
        *({"LAB_SEED": str(seed)} | more for seed in range(2, 5) for more in ({}, MLP, LINE, MESH)),
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()) or "gpt",
)  # fmt: skip
def test_right_code_passes(settings: dict[str, str]) -> None:
    assert failed(stated(**settings)) == set()


def test_all_are_made_of_a_text() -> None:
    assert set(stated(**AGAIN)) == {
        "shares", "shards", "epochs", "targets", "optimizer", "first weights", "model", "causal", "positions", "loss",
        "recomputation",
    }  # fmt: skip
    assert "dropout" in stated(**MESH)


def test_without_the_proof_or_in_a_mode_that_trains_nothing_none_is_made() -> None:
    assert stated(LAB_PROOF="0") == stated(RUN_MODE="train") == stated(RUN_MODE="comm") == {}


# --- wrong lines ---


def without_position(self: Any, tokens: Tensor) -> Tensor:
    scores: Tensor = self.token(tokens)
    return scores


def without_residual(self: Any, hidden: Tensor) -> Tensor:
    hidden = self.attention(self.attention_norm(hidden))
    out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
    return out


def ten_times(right: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Any, seed: int) -> None:
        right(self, seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(10 if parameter.dim() > 1 else 1)

    return initialise


def one_seed(right: Callable[..., None]) -> Callable[..., None]:
    return lambda self, seed: right(self, 1)


def doubled(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: 2 * right(self, *args)


def rounded(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, scores, targets: right(self, scores, targets).bfloat16()


def noisy(right: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Any, ids: Tensor) -> Any:
        x, y = right(self, ids)
        return x, y + 0.2 * torch.randn(y.shape, dtype=y.dtype)

    return take


def of_any_seed(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda seed, epoch, num_samples: right(1, epoch, num_samples)


def even(right: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda batch, num_shards, uneven=False: right(batch, num_shards)


def to_the_first(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, step, shard, num_shards: right(self, step, 0 * shard, num_shards)


def unscaled(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, part, sample: right(self, part, sample) * (1 - self.share)


def of_one_sample(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, part, sample: right(self, part, 0 * sample)


def of_one_part(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, part, sample: right(self, part[-1:] * 0, sample)


def kept_all(right: Callable[..., int]) -> Callable[..., int]:
    def save(self: Any, tensor: Tensor) -> int:
        self.all = [*getattr(self, "all", []), tensor]
        return right(self, tensor)

    return save


def kept_again(right: Callable[..., Any]) -> Callable[..., Any]:
    last: list[Any] = []

    def compute(self: Any) -> Any:
        last[:] = [*last[-2:], right(self)]
        return last[-1]

    return compute


def instead(wrong: Any) -> Callable[[Any], Any]:
    return lambda _: wrong


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], dict[str, str], str]] = {
    "no position": (model.Embedding, "forward", instead(without_position), {}, "positions"),
    "no position, by definition": (model.Embedding, "forward", instead(without_position), {}, "model"),
    "no residual": (model.Block, "forward", instead(without_residual), {}, "model"),
    "not causal": (model, "causal", instead(F.scaled_dot_product_attention), {}, "causal"),
    "another gelu": (F, "gelu", lambda right: lambda x: right(x, approximate="tanh"), MLP, "model"),
    "router": (experts.Router, "forward", doubled, MOE, "model"),
    "deviation": (model.Model, "initialise", ten_times, {}, "first weights"),
    "one seed": (model.Model, "initialise", one_seed, {"LAB_SEED": "2"}, "first weights"),
    "loss": (SummedLoss, "forward", doubled, {}, "loss"),
    "loss in 16 bits": (SummedLoss, "forward", rounded, {"LAB_DTYPE": "bfloat16"}, "loss"),
    "squares": (SummedLoss, "forward", doubled, LINE, "loss"),
    "share": (data.Batches, "share", doubled, {}, "shares"),
    "not shifted": (data.Text, "take", lambda right: lambda *args: (right(*args)[0],) * 2, {}, "targets"),
    "overlapping": (data.Text, "take", lambda right: lambda self, ids: right(self, ids // 2), {}, "targets"),
    "noise": (data.Points, "take", noisy, MLP, "targets"),
    "one order": (data, "permutation", lambda right: lambda seed, epoch, number: right(seed, 0, number), {}, "epochs"),
    "one order for all seeds": (data, "permutation", of_any_seed, {}, "epochs"),
    "no permutation": (data, "permutation", lambda right: lambda *args: right(*args) // 2 * 2, {}, "epochs"),
    "even shards": (data, "shard_sizes", even, {}, "shards"),
    "even shards of microbatches": (data, "shard_sizes", even, MOE, "shards"),
    "the first shard for all": (data.Batches, "microbatches", to_the_first, {}, "shards"),
    "optimizer": (PlainSGD, "step", lambda right: lambda self: (right(self), right(self)), {}, "optimizer"),
    "dropout unscaled": (Dropouts, "mask", unscaled, MESH, "dropout"),
    "one mask for all samples": (Dropouts, "mask", of_one_sample, MESH, "dropout"),
    "one mask for all parts": (Dropouts, "mask", of_one_part, MESH, "dropout"),
    "all kept": (model._Pass, "save", kept_all, AGAIN, "recomputation"),
    "what is computed again kept": (model._Pass, "_compute", kept_again, AGAIN, "recomputation"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_both_sides_share_is_seen_by_name(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, wrong, settings, meant = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    assert meant in failed(stated(**settings))


def test_a_weight_that_is_not_there_is_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_statements, "computed", lambda weights, *_: weights("layers.9.gone"))
    assert "model" in failed(stated())
