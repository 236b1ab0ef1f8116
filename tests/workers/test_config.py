"""The environment becomes one Config, or all its faults at once."""

import subprocess
import sys

import pytest

from workers.config import Config, ConfigError, modes, table

RANK_OF_FOUR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker0"}


def faults(**environ: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        Config.read(environ)
    return refused.value.faults


def test_defaults_are_those_of_the_stable_interface() -> None:
    config = Config.read({})
    assert (config.run_mode, config.world_size, config.master_port) == ("dp", 4, 29500)
    assert (config.model, config.width, config.depth, config.heads, config.seq) == ("gpt", 128, 8, 8, 64)
    assert (config.steps, config.batch, config.num_microbatches, config.dtype) == (20, 16, 1, "float32")
    assert (config.join_timeout_s, config.lost_after_s, config.collective_timeout_s) == (60, 2.5, 300)


def test_empty_counts_as_unset() -> None:
    assert Config.read({"LAB_STEPS": "", "LAB_CLIP": " ", "WORLD_SIZE": ""}) == Config.read({})


def test_values_get_their_types() -> None:
    config = Config.read(RANK_OF_FOUR | {"LAB_VARIANT": "naive, ring", "LAB_PROOF": "0", "LAB_LR": "1e-3"})
    assert config.rank == 1
    assert config.variant == ("naive", "ring")
    assert config.proof is False
    assert config.learning_rate == 1e-3


def test_what_was_set_repeats_the_run() -> None:
    environ = RANK_OF_FOUR | {"LAB_VARIANT": "naive,ring", "LAB_PROOF": "0", "LAB_STEPS": "7"}
    assert Config.read(environ).environ() == environ


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "9"}, "WORLD_SIZE='9' is out of range: allowed is 1 to 8"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is out of range: allowed is 1 to 8"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' is not a whole number"),
        ({"RUN_MODE": "trian"}, "RUN_MODE='trian' is not a mode (did you mean 'train'?)"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}, "RANK=4 is outside of WORLD_SIZE=4, allowed: 0 to 3"),
        ({"MASTER_ADDR": "worker0"}, "MASTER_ADDR='worker0' is set and RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set and MASTER_ADDR is not"),
        ({"LAB_STEP": "5"}, "LAB_STEP is not a variable of the lab (did you mean 'LAB_STEPS'?)"),
        ({"LAB_MODEL": "gtp"}, "LAB_MODEL='gtp' is not one of line, mlp, gpt (did you mean 'gpt'?)"),
        ({"LAB_PROOF": "maybe"}, "LAB_PROOF='maybe' is neither 0 nor 1"),
        ({"LAB_LR": "nan"}, "LAB_LR='nan' is not a number"),
        ({"LAB_LR": "0"}, "LAB_LR='0' is out of range: allowed is more than 0"),
        ({"LAB_RUN_ID": "a/b"}, "LAB_RUN_ID='a/b' is not a run id"),
        ({"LAB_RUN_ID": ".."}, "LAB_RUN_ID='..' is not a run id"),
        ({"LAB_MEMORY": "much"}, "LAB_MEMORY='much' is not a size such as 900m or 2g"),
        ({"LAB_BACKEND": "nccl", "LAB_DEVICE": "cpu"}, "LAB_BACKEND=nccl works on LAB_DEVICE=cuda alone"),
        ({"RUN_MODE": "tp", "LAB_RECOMPUTE": "1"}, "LAB_RECOMPUTE=1 is not possible in tp, allowed: dp, fsdp"),
        ({"RUN_MODE": "pp", "LAB_RECOMPUTE": "1"}, "LAB_RECOMPUTE=1 is not possible in pp"),
    ],
)
def test_each_fault_is_one_sentence(environ: dict[str, str], words: str) -> None:
    found = faults(**environ)
    assert len(found) == 1
    assert found[0].startswith(words)


def test_all_faults_are_told_at_once() -> None:
    assert len(faults(WORLD_SIZE="9", RUN_MODE="tpp", LAB_STEP="5", LAB_MODEL="gtp", LAB_SEED="-1")) == 5


def test_the_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.read({}).steps = 3  # type: ignore[misc]


def test_the_table_names_every_variable_once() -> None:
    rows = table().splitlines()[2:]
    names = [row.split("`")[1] for row in rows]
    assert names == [field.alias for field in Config.model_fields.values()]


def test_the_modes_are_the_files_of_experiments() -> None:
    assert {"comm", "dp", "train"} <= set(modes())


def test_faults_are_found_without_torch() -> None:
    program = """import sys, workers.config as c
try: c.Config.read({'WORLD_SIZE': '9'})
except c.ConfigError: print('torch' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
