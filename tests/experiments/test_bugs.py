"""Every LAB_BUG of every mode, through the whole experiment: the check that is meant for it fails, by name."""

from pathlib import Path

import pytest

from tests.labs import TINY, failed, run_experiment
from tests.ranks import Ranks
from workers.config import Config
from workers.config.values import modes
from workers.contract import Mode
from workers.rank.modes import load

WORLD_SIZE = 3
# What a mistake's needs do not say: sizes that it shows at.
SIZES = {
    "hoarded_buckets": {"LAB_BUCKET_MIB": "0.01"},
    "lost_shard_tail": {"LAB_WIDTH": "20"},
    "lr_unscaled": {"LAB_MODEL": "mlp"},
}
SHORTER = {"comm": {"LAB_SWEEP_MIB": "0.25"}}
BUGS = [(mode, bug) for mode in modes() for bug in load(mode).mistakes]


def settings(run_mode: str, bug: str) -> dict[str, str]:
    """The run in which a mistake has to show: by its needs, with enough variants and no more."""
    mode = load(run_mode)
    needs = mode.mistakes[bug].needs
    given = {"RUN_MODE": run_mode, "LAB_BUG": bug} | SIZES.get(bug, {}) | SHORTER.get(run_mode, {})
    given |= {"LAB_CLIP": "0.05"} if needs.clip else {}
    given |= {"LAB_CHECKPOINT_EVERY": "2"} if needs.saves else {}
    config = Config.read(TINY | {"WORLD_SIZE": str(WORLD_SIZE)} | given)
    if config.num_microbatches < needs.microbatches:
        given["LAB_MICROBATCHES"] = str(needs.microbatches)
    return given | {"LAB_VARIANT": ",".join(makers(mode, bug, config))}


def makers(mode: Mode, bug: str, config: Config) -> list[str]:
    """The variants that can make a mistake with these settings; where all can, the second.

    The first is the naive one, which makes dozens of calls a step: it is left out wherever another makes the mistake
    too.
    """
    mistake = mode.mistakes[bug]
    able = list(mistake.where.variants or mistake.needs.variants) or list(mode.names[1:2])
    able = [name for name in able if name not in mode.cannot(config)]
    return [name for name in able if name != mode.names[0]] or able


@pytest.mark.parametrize("run_mode", modes())
def test_without_a_bug_every_check_holds(ranks: Ranks, tmp_path: Path, run_mode: str) -> None:
    made = {name for bug in load(run_mode).mistakes for name in settings(run_mode, bug)["LAB_VARIANT"].split(",")}
    given = SHORTER.get(run_mode, {}) | {"RUN_MODE": run_mode, "LAB_VARIANT": ",".join(sorted(made))}
    run, _ = run_experiment(ranks, WORLD_SIZE, tmp_path, **given)
    assert failed(run) == set()
    assert run["verdict"] == "pass"


@pytest.mark.parametrize(("run_mode", "bug"), BUGS)
def test_each_bug_fails_the_check_that_is_meant_for_it(ranks: Ranks, tmp_path: Path, run_mode: str, bug: str) -> None:
    given = settings(run_mode, bug)
    run, _ = run_experiment(ranks, WORLD_SIZE, tmp_path, **given)
    meant = load(run_mode).mistakes[bug].check
    assert meant in failed(run)
    claims = [claim for claim in run["checks"] + run["comparisons"] if claim["name"] == meant and not claim["passed"]]
    seen = {claim["variant"].rpartition(" ")[2] for claim in claims}  # largebatch names the model before it
    assert seen == {""} or seen >= set(given["LAB_VARIANT"].split(",")), "a variant that can make it does not show it"
    assert run["verdict"] == "fail"
