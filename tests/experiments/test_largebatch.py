"""Whole largebatch runs at uneven sizes, the samples of each k, the breakdown of a recipe, and refused settings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import distlab.techniques.large_batch as optimizers
from distlab.experiments.largebatch import MODE, SMALL, distance_of_k_steps, training
from distlab.experiments.largebatch.checks import K
from distlab.experiments.largebatch.sweep import break_down, multiples
from distlab.experiments.largebatch.training import Stream, Trainee, base_rate
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.mode_loader import load
from distlab.lab.rank.preflight import refuse
from distlab.lab.report import records
from distlab.lab.workload.model import build_model
from distlab.techniques.large_batch import Lamb, Lars, Layerwise
from tests.labs import TINY, failed, failed_with, run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int = 3, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "largebatch", "WORLD_SIZE": str(world_size)} | settings)


def refused(config: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        refuse(config, MODE)
    return error.value.faults


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (
            3,
            {
                "LAB_BATCH": "13",
                "LAB_MICROBATCHES": "3",
                "LAB_MODEL": "gpt",
                "LAB_DEPTH": "1",
                "LAB_VARIANT": "warmup,lars,lamb",
            },
        ),
        (1, {"LAB_MODEL": "mlp", "LAB_STEPS": "8", "LAB_DTYPE": "bfloat16"}),
    ],
    ids=["uneven", "alone"],
)
def test_a_run_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "largebatch"} | settings))
    assert failed(run) == set()
    steps = int(settings.get("LAB_STEPS", 4))
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    wanted = settings.get("LAB_VARIANT", ",".join(MODE.requested(()).names)).split(",")
    assert {(name, check) for name in wanted for check in ("gradients", "weights", "trained weights")} <= names
    assert {("", "effective batch"), ("warmup", "replicas"), (settings["LAB_MODEL"], "wire bytes")} <= names
    assert ("warmup", "learning rate") in names
    table = next(r for r in by_rank[0] if isinstance(r, records.Table) and "held-out" in r.title)
    assert [row[0] for row in table.rows] == wanted
    assert len(table.columns) == 2 + len([k for k in (1, 2, 4, 8, 16, 32) if steps % k == 0])
    sentences = [r.text for r in by_rank[0] if isinstance(r, records.Said) and r.heading == "batch"]
    assert len(sentences) == len(table.columns) - 2
    if world_size == 3:
        assert sentences[1].startswith("k = 2: 26 samples per step = 9 + 9 + 8")


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_k_sees_the_same_samples_once(model: str) -> None:
    config = config_of(LAB_STEPS="8", LAB_BATCH="7", LAB_MODEL=model)
    base = Stream(config, 1, config.steps, torch.device("cpu"), torch.float32, uneven=True)
    for k in multiples(config):
        stream = base.times(k)
        ids = [sample for step in range(8 // k) for rank in range(3) for sample in stream.sample_ids(step, rank, 3)]
        assert ids == base.trained.tolist() and len(ids) == len(set(ids)) == 8 * 7
        parts = [part for rank in range(3) for part in stream.microbatches(0, rank, 3)]
        inputs = torch.cat([base.full(step).inputs for step in range(k)])
        assert torch.equal(torch.cat([part.inputs for part in parts]), inputs)
        assert sum(part.targets.numel() * part.share for part in parts) == pytest.approx(1)


def test_a_text_is_evaluated_on_held_out_samples(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789")  # windows of 3 and the next: 0 to 3, 3 to 6, 6 to 9
    settings = {"LAB_MODEL": "gpt", "LAB_TEXT": str(tmp_path / "text"), "LAB_SEQ": "3"}
    stream = Stream(config_of(3, **settings), 1, 4, torch.device("cpu"), torch.float32)
    held_out = {bytes(row) for row in stream.held_out_samples().inputs.tolist()}
    assert len(held_out) == 1
    assert {bytes(row) for step in range(4) for row in stream.full(step).inputs.tolist()} == {
        b"012",
        b"345",
        b"678",
    } - held_out
    (sentence,) = refused(config_of(3, **(settings | {"LAB_SEQ": "5"})))
    assert "the text has one sample of LAB_SEQ=5 bytes" in sentence


def ratios(group: dist.ProcessGroup, model: str, depth: str) -> list[float]:
    """Return the distance of k steps to one large step over that at half the rate, by the linear and the square root
    rule."""
    config = config_of(group.size(), LAB_WIDTH="64", LAB_DEPTH=depth, LAB_BATCH="2", LAB_MODEL=model)
    dense = build_model(config, 1).double()
    stream = Stream(config, 1, K, torch.device("cpu"), torch.float64)
    found = []
    for rule in (optimizers.linear, optimizers.sqrt):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizers, "linear", rule)
            whole, half = (distance_of_k_steps(dense, stream, config, rate, group) for rate in (SMALL, SMALL / 2))
            found.append(whole / half)
    return found


@pytest.mark.parametrize(("model", "depth"), [("mlp", "2"), ("gpt", "8")])
def test_small_steps_add_up_and_wrong_rates_do_not(ranks: Ranks, model: str, depth: str) -> None:
    """A deep model bends its loss more: at a rate of 1e-3 the gpt's ratio is 3.82, and the proof failed correct
    code."""
    for linear, root in ranks(2, ratios, model, depth):
        assert linear == pytest.approx(4, abs=0.01)
        assert root == pytest.approx(2, abs=0.01)  # with the wrong rule they differ in first order


@pytest.mark.parametrize("rate", ["1", "20"])
def test_the_proof_passes_at_any_sweep_rate(ranks: Ranks, tmp_path: Path, rate: str) -> None:
    """A step that overshoots would amplify rounding errors of correct code: 1.1e-8 with a rate of 1."""
    settings = {"RUN_MODE": "largebatch", "LAB_MODEL": "mlp", "LAB_LR": rate}
    run, _ = run_experiment(ranks, 2, tmp_path, **settings)
    assert failed(run) == set()
    assert run["proven"]


@pytest.mark.parametrize("rate", ["0.001", "20"])
def test_an_unscaled_rate_fails_at_any_sweep_rate(ranks: Ranks, tmp_path: Path, rate: str) -> None:
    settings = {"LAB_MODEL": "mlp", "LAB_BUG": "lr_unscaled", "LAB_VARIANT": "linear", "LAB_LR": rate}
    run, _ = run_experiment(ranks, 2, tmp_path, **({"RUN_MODE": "largebatch"} | settings))
    assert failed(run) - {"trained weights"} == {"learning rate", "weights"}
    measured = {claim["max_abs_diff"] for claim in run["checks"] if claim["name"] == "learning rate"}
    assert max(measured) == pytest.approx(1 - 1 / K)


def test_breakdown_is_the_first_k_that_fails_to_learn() -> None:
    assert break_down({1: 1.0, 2: 1.9, 4: 2.1, 8: 1.0}, untrained=5.0) == "k = 4"
    assert break_down({1: 1.0, 2: 1.2}, untrained=5.0) == "none up to 2"
    assert break_down({1: 1.0, 2: math.nan}, untrained=5.0) == "k = 2"
    assert break_down({1: 4.0, 2: 5.1}, untrained=5.0) == "k = 2", "less than twice, and yet diverged"
    for diverged in (math.nan, math.inf, 6.0):
        assert break_down({1: diverged, 2: 1.0}, untrained=5.0) == "k = 1"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_MODEL": "line"}, "allowed: mlp, gpt"),
        ({"LAB_OPTIMIZER": "adamw"}, "has its own optimizer"),
        ({"LAB_CLIP": "1"}, "LAB_CLIP=1 cannot be set in largebatch"),
        ({"LAB_BUCKET_MIB": "25"}, "LAB_BUCKET_MIB=25 cannot be set in largebatch"),
        ({"LAB_LR": "0.1", "LAB_VARIANT": "lars,lamb"}, "LAB_LR=0.1 is the base rate of SGD"),
        ({"LAB_CHECKPOINT_EVERY": "2"}, "LAB_CHECKPOINT_EVERY=2"),
        ({"LAB_BATCH": "2"}, "smaller than WORLD_SIZE=3"),
        ({"LAB_BUG": "lr_unscaled", "LAB_PROOF": "0"}, "LAB_PROOF=0"),
        ({"LAB_BUG": "lr_unscaled", "LAB_VARIANT": "unscaled,lars"}, "linear or warmup"),
        ({"LAB_VARIANT": "sqrt"}, "is not a variant of largebatch any more: lamb scales by the root of k"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, str], words: str) -> None:
    (sentence,) = refused(config_of(3, **settings))
    assert words in sentence


def test_unknown_variants_cause_no_error_about_rates() -> None:
    """The unknown variant itself is reported elsewhere."""
    assert MODE.refuse(config_of(3, LAB_LR="0.1", LAB_VARIANT="liner")) == []
    assert MODE.refuse(config_of(3, LAB_LR="0.1", LAB_VARIANT="lars,linear")) == []


def test_the_lesson_states_its_base_rate() -> None:
    assert f"LAB_LR is SGD's base rate; unset: {base_rate(config_of()):g}." in load("largebatch").idea


# --- faults: each replaces a function that the ranks call, and the run must fail ---


def ignore_decay(rates_of: Any) -> Any:
    """Leave the weight decay out of LARS' norms."""
    return lambda self, weights, gradients, decay: rates_of(self, weights, gradients, 0.0)


def use_constant(value: float) -> Any:
    """Use one rate for all layers instead of a ratio per layer."""
    return lambda right: lambda self, weights, *rest: [torch.tensor(value)] * len(weights)


def use_local_norms(norms: Any) -> Any:
    """Compute norms of this rank's shard only."""

    def wrong(self: Layerwise, *lists: list[Tensor]) -> list[Tensor]:
        group, self.sharded_over = self.sharded_over, None
        found: list[Tensor] = norms(self, *lists)
        self.sharded_over = group
        return found

    return wrong


def skip_bias_correction(adam: Any) -> Any:
    """Leave out the bias correction of the moments."""

    def wrong(self: Lamb, parameter: Tensor) -> Tensor:
        adam(self, parameter)
        state = self.state[parameter]
        found: Tensor = state["m"] / (state["v"].sqrt() + self.eps)
        return found

    return wrong


def with_settings(**others: Any) -> Any:
    """Make the optimizer with other settings."""
    return lambda made: lambda *args, **keywords: made(*args, **(keywords | others))


def without_decay(made: Any) -> Any:
    return lambda parameters, weight_decay: made(parameters, 0.0)


def repeat_first_samples(sample_ids: Any) -> Any:
    return lambda self, step, *rest: sample_ids(self, 0, *rest)


def warm_up_early(warmup: Any) -> Any:
    return lambda target, step, warmup_steps: warmup(target, step + 1, warmup_steps)


def keep_base_share(microbatches: Any) -> Any:
    """Weigh the loss terms as those of the base batch, whatever k is."""
    return lambda self, *rest: [
        p._replace(share=p.share * self.batch / self.config.batch) for p in microbatches(self, *rest)
    ]


def repeat_first_batch(backward: Any) -> Any:
    """Train on the first batch only, and only in the sweep's dtype: the proof would notice it."""

    def wrong(self: Trainee, step: int) -> None:
        backward(self, step if self.stream.dtype == torch.float64 else 0)

    return wrong


def in_sweep_only(fault: Any) -> Any:
    """Call `fault(trainee, step)` before an update, only in the sweep's dtype."""

    def around(update: Any) -> Any:
        def wrong(self: Trainee, step: int) -> None:
            if self.stream.dtype != torch.float64:
                fault(self, step)
            update(self, step)

        return wrong

    return around


def clear_state(trainee: Trainee, step: int) -> None:  # noqa: ARG001
    trainee.optimizer.state.clear()


def step_twice(trainee: Trainee, step: int) -> None:  # noqa: ARG001
    for parameter in trainee.model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.05)


def change_rank_1(trainee: Trainee, step: int) -> None:  # noqa: ARG001
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(trainee.model.parameters()).add_(1e-3)


def evaluate_on_trained(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        samples, trained, held_out = right(*args)
        return samples, trained, trained[: len(held_out)]

    return wrong


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "held out and trained on": (training, "draw", evaluate_on_trained),
    "decay left out of LARS' norms": (Lars, "rates", ignore_decay),
    "no trust ratio": (Lars, "rates", use_constant(0.02)),
    "no momentum": (training, "Lars", with_settings(momentum=0.0)),
    "no decay": (training, "split_by_decay", without_decay),
    "no bias correction": (Lamb, "adam", skip_bias_correction),
    "no ratio": (Lamb, "ratios", use_constant(1.0)),
    "no bound": (training, "Lamb", with_settings(bounds=(0.0, math.inf))),
    "zero moves at no rate": (Lars, "rates", use_constant(1.0)),
    "local norms": (Layerwise, "norms", use_local_norms),
    "warm-up a step early": (optimizers, "warmup", warm_up_early),
    "always the first samples": (Stream, "sample_ids", repeat_first_samples),
    "sum instead of mean": (Stream, "microbatches", keep_base_share),
    "always the first batch": (Trainee, "backward", repeat_first_batch),
    "moments forgotten": (Trainee, "update", in_sweep_only(clear_state)),
    "twice the step": (Trainee, "update", in_sweep_only(step_twice)),
    "replicas differ": (Trainee, "update", in_sweep_only(change_rank_1)),
}


def failed_checks(ranks: Ranks, folder: Path, fault: str, variant: str, model: str = "mlp") -> set[str]:
    """Return the failed checks of a run of two ranks with this fault."""
    settings = {"RUN_MODE": "largebatch", "LAB_VARIANT": variant, "LAB_MODEL": model}
    return failed_with(ranks, folder, __name__, fault, **settings)


@pytest.mark.parametrize(
    ("fault", "variant"),
    [
        ("decay left out of LARS' norms", "lars"),
        ("no trust ratio", "lars"),
        ("no momentum", "lars"),
        ("no decay", "lars"),
        ("no decay", "lamb"),
        ("no bias correction", "lamb"),
        ("no ratio", "lamb"),
        ("warm-up a step early", "lars"),
    ],
)
def test_a_missing_term_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str, variant: str) -> None:
    assert "weights" in failed_checks(ranks, tmp_path, fault, variant)


@pytest.mark.parametrize(("fault", "variant"), [("no bound", "lamb"), ("zero moves at no rate", "lars")])
def test_a_wrong_edge_case_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str, variant: str) -> None:
    assert "layers" in failed_checks(ranks, tmp_path, fault, variant)


@pytest.mark.parametrize("variant", ["lars", "lamb"])
def test_local_norms_fail_the_run(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    assert failed_checks(ranks, tmp_path, "local norms", variant) == {"global norms"}


def test_samples_of_another_step_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "gradients" in failed_checks(ranks, tmp_path, "always the first samples", "linear")


def test_summed_gradients_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert {"gradients", "k steps of η against one of kη"} <= failed_checks(
        ranks, tmp_path, "sum instead of mean", "linear"
    )


def test_a_sweep_on_one_batch_fails_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert failed_checks(ranks, tmp_path, "always the first batch", "linear") == {"trained gradients"}


@pytest.mark.parametrize(("fault", "variant"), [("moments forgotten", "lars,lamb"), ("twice the step", "linear")])
def test_a_sweep_with_wrong_updates_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str, variant: str) -> None:
    assert failed_checks(ranks, tmp_path, fault, variant) == {"trained weights"}


def test_a_sweep_with_differing_replicas_fails_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "replicas" in failed_checks(ranks, tmp_path, "replicas differ", "linear")


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_sweep_evaluated_on_training_samples_fails_the_run(ranks: Ranks, tmp_path: Path, model: str) -> None:
    assert "held out" in failed_checks(ranks, tmp_path, "held out and trained on", "linear", model)
