"""Training in 16 bits: whole runs, checks that must fail, and refused settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.experiments import precision
from distlab.experiments.precision import MODE, MixedPrecision
from distlab.experiments.precision.checks import EXACT, MOST_HALVINGS, backward, epsilons, summed_gradient
from distlab.experiments.precision.predictions import SCALED, at_rest
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.preflight import refuse
from distlab.lab.report import records
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model, outline
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.precision import LossScale, Masters
from tests.labs import TINY, built, failed, failed_with, run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int = 3, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "precision", "WORLD_SIZE": str(world_size)} | settings)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"LAB_MODEL": "mlp", "LAB_CLIP": "0.05", "LAB_STEPS": "3"}),
        (3, {"LAB_OPTIMIZER": "adamw", "LAB_BATCH": "13", "LAB_MICROBATCHES": "2", "LAB_DEPTH": "1", "LAB_VARIANT": "fp16,fp16_scaled,bf16_master,bf16,plain"}),
    ],
    ids=["alone", "adamw"],
)  # fmt: skip
def test_a_run_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "precision"} | settings))
    assert failed(run) == set()
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    chosen = settings.get("LAB_VARIANT", ",".join(MODE.requested(()).names)).split(",")
    for name in chosen:
        assert {(name, "wire bytes"), (name, "rest bytes"), (name, "gradients"), (name, "replicas")} <= names
        assert name in ("fp32", "autocast") or (name, "update") in names
        assert ((name, "unscaled") in names) == (name in SCALED)
        assert ((name, "float64 gradients") in names) == (name not in ("fp32", "fp16", "autocast"))
        assert ((name, "clipped gradients") in names) == ("LAB_CLIP" in settings or name in SCALED)
        assert ((name, "loss scale") in names) == ((name, "skipped") in names) == (name in SCALED)
        assert ((name, "copied back") in names) == (name in ("bf16_master", "plain"))
    table = next(r for r in by_rank[0] if isinstance(r, records.Table) and "steps lost" in r.title)
    assert {row[0] for row in table.rows} == set(chosen)
    if world_size == 1:
        without_effect = {
            row[0]: float(row[table.columns.index("updates without effect")].split()[0]) for row in table.rows
        }
        assert (
            without_effect["bf16"]
            > without_effect["fp16"]
            > 5
            > without_effect["bf16_master"]
            >= without_effect["fp32"] - 1
        )


@pytest.mark.parametrize(("model", "sizes"), [("line", "line"), ("mlp", "width 16, depth 2")])
def test_a_run_prints_the_sizes_of_its_model(ranks: Ranks, tmp_path: Path, model: str, sizes: str) -> None:
    """The model `line` has neither a width nor a depth, whatever is set."""
    settings = {"LAB_MODEL": model, "LAB_VARIANT": "bf16", "LAB_PROOF": "0", "LAB_STEPS": "1"}
    _, by_rank = run_experiment(ranks, 1, tmp_path, **({"RUN_MODE": "precision"} | settings))
    (message,) = [r.text for r in by_rank[0] if isinstance(r, records.Said) and r.heading == "predict"]
    assert message.startswith(f"{sizes}: 2 + 2 bytes")


def test_stored_bytes_per_parameter() -> None:
    sizes, adam = outline(config_of()).sizes, config_of(LAB_OPTIMIZER="adamw")
    wanted = {"fp32": 8, "bf16": 4, "fp16": 4, "fp16_scaled": 4, "bf16_master": 8, "autocast": 8, "plain": 8}
    assert {name: at_rest(config_of(), name).value[0] / sum(sizes) for name in MODE.names} == wanted
    wanted = {"fp32": 16, "bf16": 8, "fp16": 8, "fp16_scaled": 12, "bf16_master": 16, "autocast": 16, "plain": 16}
    counters = 4 * len(sizes)
    assert {name: (at_rest(adam, name).value[0] - counters) / sum(sizes) for name in MODE.names} == wanted


# --- single strategies ---


def strategy_and_parts(group: dist.ProcessGroup, name: str, **settings: str) -> tuple[Replica, list[Any]]:
    config = config_of(group.size(), **settings)
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float32)
    strategy = built(MODE, name, build_model(config, config.seed), group, config)
    assert isinstance(strategy, Replica)
    return strategy, batches.microbatches(0, group.rank(), group.size())


def step_with_overflow(group: dist.ProcessGroup) -> list[Any]:
    """Let only rank 1 overflow; returns whether the weights stayed, the new scale, and the count of good steps."""
    strategy, parts = strategy_and_parts(group, "fp16_scaled")
    assert isinstance(strategy, MixedPrecision)
    assert strategy.loss_scale is not None
    before = [parameter.detach().clone() for parameter in strategy.model.parameters()]
    if group.rank() == 1:
        parts = [part._replace(share=part.share * 2**40) for part in parts]
    strategy.backward(parts)
    strategy.update()
    unmoved = all(torch.equal(a, b) for a, b in zip(before, strategy.model.parameters(), strict=True))
    return [unmoved, strategy.scale, strategy.loss_scale.good_steps]


def test_all_ranks_skip_if_one_overflows(ranks: Ranks) -> None:
    assert ranks(3, step_with_overflow) == [[True, 32768.0, 0]] * 3


def errors_without_a_sample(group: dist.ProcessGroup) -> list[float]:
    """Return the error of the gradient in epsilons, with all samples and without one of rank 1's."""
    gradients = []
    for forgets in (False, True):
        strategy, parts = strategy_and_parts(group, "bf16_master")
        if forgets and group.rank() == 1:
            parts = [part._replace(inputs=part.inputs[1:], targets=part.targets[1:]) for part in parts]
        backward(strategy, parts)
        gradients.append(summed_gradient(strategy))
    exact, _ = strategy_and_parts(group, "fp32")
    exact.backward(strategy_and_parts(group, "fp32")[1])
    wanted = torch.cat([p.grad.double().flatten() for p in exact.model.parameters() if p.grad is not None])
    return [epsilons(each, wanted, torch.bfloat16) for each in gradients]


def test_a_missing_sample_exceeds_the_16_bit_tolerance(ranks: Ranks) -> None:
    for complete, incomplete in ranks(3, errors_without_a_sample):
        assert complete < EXACT / 4
        assert incomplete > EXACT


def fitted_scale(group: dist.ProcessGroup) -> tuple[float, bool]:
    """Return the scale at which a far too large loss gives finite gradients, and whether they are finite."""
    strategy, parts = strategy_and_parts(group, "fp16_scaled")
    backward(strategy, [part._replace(share=part.share * 2**20) for part in parts])
    return strategy.scale, bool(summed_gradient(strategy).isfinite().all())


def test_the_proof_waits_until_the_scale_fits(ranks: Ranks) -> None:
    ((scale, finite),) = ranks(1, fitted_scale)
    assert finite
    assert 65536 / 2**MOST_HALVINGS < scale < 65536


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_DTYPE": "bfloat16"}, "allowed: float32"),
        ({"LAB_RESUME": "auto", "LAB_RUN_ID": "before"}, "LAB_RESUME=auto"),
        ({"LAB_BUG": "unscaled_clip", "LAB_CLIP": "1", "LAB_VARIANT": "bf16_master"}, "it takes fp16_scaled"),
        ({"LAB_BUG": "unscaled_clip", "LAB_CLIP": "1", "LAB_PROOF": "0"}, "LAB_PROOF=0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(config_of(3, **settings), MODE)
    (sentence,) = refused.value.faults
    assert words in sentence


# --- faults: each replaces a function that the ranks call, and the run must fail ---


def never_halved(adjust: Any) -> Any:
    def wrong(self: LossScale, *, overflowed: bool) -> None:
        value = self.value
        adjust(self, overflowed=overflowed)
        self.value = max(self.value, value)

    return wrong


def never_grown(adjust: Any) -> Any:
    def wrong(self: LossScale, *, overflowed: bool) -> None:
        value = self.value
        adjust(self, overflowed=overflowed)
        self.value = min(self.value, value)

    return wrong


def keep_good_steps(adjust: Any) -> Any:
    """Do not reset the count of good steps at an overflow."""

    def wrong(self: LossScale, *, overflowed: bool) -> None:
        before = self.good_steps
        adjust(self, overflowed=overflowed)
        self.good_steps = before if overflowed else self.good_steps

    return wrong


def start_small(right: Any) -> Any:
    return lambda self: right(self, value=1024.0)


def check_first_only(all_finite: Any) -> Any:
    """Check only the first gradient."""
    return lambda gradients: all_finite(gradients[:1])


def always(value: bool) -> Any:
    return lambda right: lambda gradients: value


def do_nothing(right: Any) -> Any:  # noqa: ARG001
    return lambda *args, **keywords: None


def halve_gradients(deliver: Any) -> Any:
    return lambda self, scale: deliver(self, 2 * scale)


def halve_rank_1(backward: Any) -> Any:
    """Halve the loss terms of rank 1."""

    def wrong(self: Replica, parts: list[Any]) -> Any:
        if dist.get_rank() == 1:
            parts = [part._replace(share=part.share / 2) for part in parts]
        return backward(self, parts)

    return wrong


def scale_by_three(backward: Any) -> Any:
    """Scale by 3 times a power of two, which rounds."""

    def wrong(self: Replica, parts: list[Any]) -> Any:
        scale = self.scale
        self.scale = 3 * scale if scale > 1 else scale
        loss = backward(self, parts)
        for parameter in self.model.parameters():
            if scale > 1 and parameter.grad is not None:
                parameter.grad.div_(3)
        self.scale = scale
        return loss

    return wrong


def round_masters(right: Any) -> Any:
    return lambda self, computing, exact, **keywords: right(
        self, computing, [each.to(torch.bfloat16).float() for each in exact], **keywords
    )


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "masters of rounded weights": (Masters, "__init__", round_masters),
    "never halved": (LossScale, "adjust", never_halved),
    "never grown": (LossScale, "adjust", never_grown),
    "count not reset": (LossScale, "adjust", keep_good_steps),
    "small first scale": (LossScale, "__init__", start_small),
    "a step with inf taken": (precision, "all_finite", always(True)),
    "one gradient checked": (precision, "all_finite", check_first_only),
    "no step taken": (precision, "all_finite", always(False)),
    "masters not copied back": (Masters, "refresh", do_nothing),
    "gradients halved": (Masters, "deliver", halve_gradients),
    "half of rank 1": (Replica, "backward", halve_rank_1),
    "a scale that rounds": (Replica, "backward", scale_by_three),
}


def failed_checks(ranks: Ranks, folder: Path, fault: str, variant: str) -> set[str]:
    """Return the failed checks of a run of two ranks with this fault."""
    return failed_with(ranks, folder, __name__, fault, RUN_MODE="precision", LAB_VARIANT=variant, LAB_STEPS="1")


@pytest.mark.parametrize("fault", ["never halved", "never grown", "count not reset", "small first scale"])
def test_a_wrong_loss_scale_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    assert "loss scale" in failed_checks(ranks, tmp_path, fault, "fp16_scaled")


@pytest.mark.parametrize("fault", ["a step with inf taken", "one gradient checked", "no step taken"])
def test_wrong_skipping_fails_the_run(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    assert "skipped" in failed_checks(ranks, tmp_path, fault, "fp16_scaled")


def test_wrong_master_weights_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "copied back" in failed_checks(ranks, tmp_path, "masters not copied back", "bf16_master")
    assert {"update", "weights"} <= failed_checks(ranks, tmp_path, "masters not copied back", "fp16_scaled")
    assert "first masters" in failed_checks(ranks, tmp_path, "masters of rounded weights", "bf16_master")


def test_wrongly_unscaled_gradients_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert "given" in failed_checks(ranks, tmp_path, "gradients halved", "fp16_scaled")


def test_wrong_gradients_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    assert {"gradients", "float64 gradients"} <= failed_checks(ranks, tmp_path, "half of rank 1", "bf16_master")
    assert "unscaled" in failed_checks(ranks, tmp_path, "a scale that rounds", "fp16_scaled")
