"""Which bug LAB_BUG=mystery:7 injects: one that the run can show, the same on every rank and in every rerun."""

import pytest

from distlab.config import Config, ConfigError
from distlab.rank.injected_bug import bug_of, mistake_of, showable
from distlab.rank.mode_loader import load
from distlab.rank.preflight import refuse
from distlab.report.mystery import is_sealed, mystery_number, open_mistake


def asked(run_mode: str, bug: str | None, **settings: str) -> Config:
    return Config.read({"RUN_MODE": run_mode} | ({"LAB_BUG": bug} if bug else {}) | settings)


def test_the_number_draws_the_bug_on_every_rank_alike() -> None:
    mode = load("dp")
    drawn = [bug_of(asked("dp", "mystery:7", RANK=str(rank), MASTER_ADDR="localhost"), mode) for rank in range(4)]
    assert len(set(drawn)) == 1
    by_number = {bug_of(asked("dp", f"mystery:{number}"), mode) for number in range(60)}
    assert by_number == set(showable(asked("dp", "mystery:0"), mode)), "each bug is drawn by some number"


def test_what_a_run_cannot_show_is_not_drawn() -> None:
    mode = load("dp")
    assert "save_without_barrier" not in showable(asked("dp", "mystery:7"), mode)
    assert "save_without_barrier" in showable(asked("dp", "mystery:7", LAB_CHECKPOINT_EVERY="2"), mode)
    flat = {bug_of(asked("dp", f"mystery:{number}", LAB_VARIANT="flat"), mode) for number in range(60)}
    assert "hook_race" not in flat  # which only buckets can have


def test_what_is_not_a_mystery_is_what_it_says() -> None:
    mode = load("dp")
    assert bug_of(asked("dp", None), mode) is None
    assert mistake_of(asked("dp", None), mode) == {}
    assert bug_of(asked("dp", "hook_race"), mode) == "hook_race"
    assert not is_sealed(mistake_of(asked("dp", "hook_race"), mode))


def test_the_records_have_it_encoded() -> None:
    mode, config = load("dp"), asked("dp", "mystery:7")
    name = bug_of(config, mode)
    assert name is not None
    written = mistake_of(config, mode)
    assert written["name"] == "mystery:7" and is_sealed(written)
    assert not [word for word in (name, mode.mistakes[name].what) if word in " ".join(written.values())]
    assert open_mistake(written) == {"name": name, "what": mode.mistakes[name].what, "check": mode.mistakes[name].check}


@pytest.mark.parametrize("bug", ["mystery", "mystery:", "mystery:x", "mystery:-1", "mystery:7 ", "mystery:1234567890"])
def test_what_is_no_number_is_no_mystery(bug: str) -> None:
    assert mystery_number(bug) is None


@pytest.mark.parametrize(
    ("run_mode", "bug", "settings", "sentence"),
    [
        ("dp", "mystery:x", {}, "LAB_BUG='mystery:x' is not a bug of dp, allowed: means_of_shards"),
        ("tp", "mystery:7", {"WORLD_SIZE": "1"}, "no bug of tp can be detected with these settings: "),
        ("precision", "mystery:7", {"LAB_PROOF": "0"}, "unscaled_clip with LAB_PROOF=0: nothing is compared"),
    ],
)
def test_a_mystery_that_no_run_can_show_is_refused(
    run_mode: str, bug: str, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(asked(run_mode, bug, **settings), load(run_mode))
    (fault,) = refused.value.faults
    assert sentence in fault
