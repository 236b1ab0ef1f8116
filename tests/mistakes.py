"""The test runs of a mode: without a bug, and with each injected bug that must show."""

from distlab.contract import Mode
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from tests.labs import TINY

WORLD_SIZE = 2  # odd and larger worlds are in each mode's own tests; three ranks take half as long again
# The sizes at which a bug fails its check, where its `needs` do not state them.
BUG_SIZES = {
    "copies_apart": {"WORLD_SIZE": "4"},  # two axes
    "gate_over_itself": {"LAB_TOP_K": "1"},
    "gather_all": {"LAB_DEPTH": "4"},
    "hoarded_buckets": {"LAB_BUCKET_MIB": "0.01"},
    "oldest_state": {"WORLD_SIZE": "3"},  # one survivor has the sum, the other does not
    "old_cut": {"WORLD_SIZE": "3"},  # of two ranks only one would be left, which has everything
    "rate_kept": {"LAB_RESCALE": "1"},
    "lost_shard_tail": {"LAB_WIDTH": "20", "WORLD_SIZE": "3"},
    "stale_activation": {"WORLD_SIZE": "3"},  # a stage between two
    "norm_by_all": {"LAB_MESH": "tp2"},
    "tied_too_early": {"LAB_MESH": "pp2", "LAB_TIE": "1"},
    "stale_unbounded": {"LAB_LOCAL_STEPS": "1"},  # the run has few steps
    "rows_not_summed": {"LAB_MESH": "tp2"},
    "scaled_by_cp": {"LAB_MESH": "cp2"},
    "dropout_alike": {"LAB_DROPOUT": "0.2"},
}
# Small runs of each mode: an mlp takes a quarter of the time of a gpt, and only tp needs a gpt's layers.
MODE_SIZES = {
    "comm": {"LAB_SWEEP_MIB": "0.25"},
    "mesh": {"LAB_BATCH": "8", "LAB_STEPS": "2"},
    "largebatch": {"LAB_STEPS": "32"},
    "compress": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1"},
    "moe": {"LAB_MODEL": "mlp", "LAB_DEPTH": "2", "LAB_BATCH": "24"},
    "precision": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1"},
    "elastic": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "8", "LAB_SAVED_EVERY": "2"},
    "dp": {"LAB_MODEL": "mlp", "LAB_DEPTH": "2"},
    "fsdp": {"LAB_MODEL": "mlp", "LAB_DEPTH": "2"},
    "tp": {"LAB_DEPTH": "1"},
    "cp": {"LAB_DEPTH": "1", "LAB_SEQ": "24"},
    "pp": {"LAB_MODEL": "mlp", "LAB_DEPTH": "6"},
    "server": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STALENESS": "2"},
}

PAGE_WORLD_SIZE = 3
PAGE_SIZES = {
    "comm": {"LAB_SWEEP_MIB": "0.25", "LAB_VARIANT": "gloo,ring"},
    "cp": {"LAB_DEPTH": "2"},
    "fsdp": {"LAB_DEPTH": "2"},
    "pp": {"LAB_DEPTH": "4"},
    "elastic": {"LAB_STEPS": "10"},
    "largebatch": {"LAB_STEPS": "32"},
}


def correct_settings(run_mode: str) -> dict[str, str]:
    """Return the settings of a correct run of all variants, at the sizes of the runs with bugs: else a check might fail
    without a bug."""
    return {"RUN_MODE": run_mode} | MODE_SIZES.get(run_mode, {})


def page_settings(run_mode: str) -> dict[str, str]:
    """Return the settings of the run whose logs are in docs/modes, on PAGE_WORLD_SIZE ranks; comm and train have no
    model."""
    sizes = {} if run_mode in ("comm", "train") else {"LAB_STEPS": "5", "LAB_DEPTH": "1"}
    return {"RUN_MODE": run_mode} | sizes | PAGE_SIZES.get(run_mode, {})


def bug_settings(run_mode: str, bug: str) -> dict[str, str]:
    """Return the settings of a run in which a bug must show: its needs, and only the variants that it requires."""
    mode = load(run_mode)
    needs = mode.mistakes[bug].needs
    settings = correct_settings(run_mode) | {"LAB_BUG": bug} | BUG_SIZES.get(bug, {})
    settings |= {"LAB_CLIP": "0.05"} if needs.clip else {}
    settings |= {"LAB_CHECKPOINT_EVERY": "2"} if needs.saves else {}
    config = Config.read(TINY | {"WORLD_SIZE": str(WORLD_SIZE)} | settings)
    if config.num_microbatches < needs.microbatches:
        settings["LAB_MICROBATCHES"] = str(needs.microbatches)
    return settings | {"LAB_VARIANT": ",".join(variants_with_bug(mode, bug, config))}


def variants_with_bug(mode: Mode, bug: str, config: Config) -> list[str]:
    """Return the variants that can have a bug with these settings; if all can, the second that runs.

    The first variant is the naive one, which makes dozens of calls per step: it is omitted if another one can have
    the bug.
    """
    mistake = mode.mistakes[bug]
    cannot = mode.cannot(config)
    able = list(mistake.where.variants or mistake.needs.variants)
    able = able or [name for name in mode.names[1:] if name not in cannot][:1]
    able = [name for name in able if name not in cannot]
    return [name for name in able if name != mode.names[0]] or able
