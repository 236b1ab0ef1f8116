"""The pace of the server's variants: what is predicted of them; the chart of a straggler; and one slow beyond all
noise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.config import Config
from distlab.experiments.server import schemes
from distlab.experiments.server.asynchronous import Rate, Report, check_rate, measure_rate, samples_of, stragglers
from distlab.parameter_server.costs import granted_rate, in_step_rate
from distlab.testing.warm_ranks import Ranks
from distlab.workload.data import shard_sizes
from tests.labs import run_experiment


def lab_of(world_size: int, slow_rank: str | None) -> Any:
    """What the pace asks of a Lab: the settings, and a batch of 16 dealt to ranks."""
    slowed = {"LAB_SLOW_RANK": slow_rank} if slow_rank else {}
    config = Config.read({"RUN_MODE": "server", "WORLD_SIZE": str(world_size)} | slowed)
    batches = SimpleNamespace(sample_ids=lambda step, rank, ranks: range(shard_sizes(16, ranks)[rank]))
    claims: list[tuple[Any, ...]] = []
    return SimpleNamespace(
        config=config, world_size=world_size, batches=lambda dtype: batches, claims=claims,
        check=lambda *claim, **words: claims.append((*claim, words["variant"])),
    )  # fmt: skip


def test_who_does_not_wait_is_predicted_by_the_steps_granted_and_the_bound() -> None:
    """Four workers of 10 ms a step, of which one takes 40: each scheme of a run by its own rules, not by the sum of
    rates, 1300."""
    lab = lab_of(4, "2:0.25")
    reports = {rank: Report(1, steps, 0.01 * steps, 0.32, "") for rank, steps in enumerate((24, 24, 8, 24))}
    reports[2].compute_s *= 4
    pushed = {rank: [report.steps] for rank, report in reports.items()}
    ssp, downpour = (measure_rate(lab, scheme, reports, pushed) for scheme in schemes(lab.config))
    assert lab.claims == [("samples of the pace", 0, 320e-9, name) for name in ("ssp", "downpour")]
    assert downpour.predicted == downpour.measured == pytest.approx(1000)  # 80 steps of 4 samples in the straggler's 8
    assert 400 < ssp.predicted < 450  # in step it would be 400: the bound of 2 steps is soon reached


@pytest.mark.parametrize("rate", [6 / 0.4, 16 / 0.2])  # of the slowest worker alone, and in the fastest one's time
def test_a_rate_of_some_samples_alone_fails(rate: float) -> None:
    lab = lab_of(3, None)
    check_rate(lab, Rate("dp", [], 0.0, 16 / 0.4), 16, [0.2, 0.4, 0.3])
    check_rate(lab, Rate("dp", [], 0.0, rate), 16, [0.2, 0.4, 0.3])
    (_, off, tolerance, _), (_, wrong, _, _) = lab.claims
    assert off <= tolerance < wrong


@pytest.mark.parametrize(
    ("world_size", "slow_rank"),
    [(1, "0:0.5"), (2, "1:0.5"), (2, "1:0.25"), (2, "0:0.25"), (3, "2:0.25"), (3, "0:0.25"), (3, "1:0.02"), (3, None)],
)
def test_perfect_measurements_lie_on_the_curves_of_a_straggler(world_size: int, slow_rank: str | None) -> None:
    """At three ranks the shares of a batch of 16 differ too: 6, 5 and 5 samples."""
    lab = lab_of(world_size, slow_rank)
    slow, share = (int(slow_rank[0]), float(slow_rank[2:])) if slow_rank else (0, 1.0)
    step_s = [0.01 / (share if rank == slow else 1) for rank in range(world_size)]
    samples, budget = samples_of(lab), world_size * lab.config.steps
    perfect = {
        "dp": ("in step", in_step_rate(samples, step_s)),
        "ssp": ("apart, at most 2 ahead", granted_rate(samples, step_s, budget, staleness=2)),
        "downpour": ("apart, 4 steps at a time", granted_rate(samples, step_s, budget, most=4)),
    }
    drawn = stragglers(
        lab, [Rate(name, step_s, rate, rate) for name, (_, rate) in perfect.items()], schemes(lab.config)
    )
    for name, (curve, _) in perfect.items():
        (x,), (y,) = drawn[f"{name}, measured"]
        at = dict(zip(*drawn[curve], strict=True))
        assert x == 1 / share and y == pytest.approx(at[x])


def test_who_does_not_wait_for_a_straggler_is_many_times_faster(ranks: Ranks, tmp_path: Path) -> None:
    """At a fiftieth of its speed: rank 0 does all steps but one while `sync` and a bound of no step wait 12 times for
    rank 1.

    So 12 times the samples a second, less what messages cost; a machine that is busy draws out both.
    """
    settings = {"LAB_VARIANT": "sync,ssp,downpour", "LAB_STEPS": "12", "LAB_STALENESS": "0", "LAB_LOCAL_STEPS": "1"}
    settings |= {"RUN_MODE": "server", "LAB_PROOF": "0", "LAB_SLOW_RANK": "1:0.02"}
    run, _ = run_experiment(ranks, 2, tmp_path, **settings)
    assert run["verdict"] == "pass"
    rates = {entry["variant"]: entry for entry in run["comparisons"] if entry["name"] == "samples a second"}
    for name in ("sync", "ssp"):  # its compute alone takes as long: no message and no load makes a run faster
        assert rates[name]["measured"] <= rates[name]["predicted"] * (1 + 1e-9)
        assert rates["downpour"]["measured"] > 3 * rates[name]["measured"]
