"""Parse LAB_FAULTS: the fields of an entry, the ranks that LAB_SEED draws, and an error for invalid entries."""

import pytest

from distlab.lab.config import Config, ConfigError
from distlab.lab.config.fault_spec import FaultSpec, parse_faults, planned

pytestmark = pytest.mark.timeout(60)
SETTINGS = {"RUN_MODE": "dp", "WORLD_SIZE": "4", "LAB_STEPS": "20"}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("kill:rank2@step5", {"kind": "kill", "rank": 2, "step": 5}),
        ("pause:500ms@2m", {"kind": "pause", "at_s": 120.0, "duration_s": 0.5}),
        ("pause@12s", {"kind": "pause", "at_s": 12.0, "duration_s": 5.0}),
        ("cut:in:rank0@1.5s", {"kind": "cut", "way": "in", "rank": 0, "at_s": 1.5}),
        ("cut:1s@step0", {"kind": "cut", "duration_s": 1.0, "step": 0}),
        ("slow_link:10mbit@step3", {"kind": "slow_link", "rate": "10mbit", "step": 3}),
        ("slow_rank:0.5@step3", {"kind": "slow_rank", "share": 0.5, "step": 3}),
        ("full_disk@step3", {"kind": "full_disk", "step": 3}),
    ],
)
def test_an_entry_is_parsed_into_its_fields(text: str, fields: dict[str, object]) -> None:
    assert parse_faults(text) == ([FaultSpec(text, **fields)], [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil@step1", "did you mean 'kill'?"),
        ("kill", "needs a time"),
        ("kill:1/3s", "can no longer repeat (1/3s): use one time, @step5 or @12s"),
        ("kill:1s@step1", "has argument '1s', allowed: rank0"),
        ("kill@5", "which is no time"),
        ("kill@0s", "which is no time"),
        ("kill:rank1:rank2@step1", "has more than one rank"),
        ("flip:gradient@step3", "was removed: LAB_AUDIT_EVERY=1 with a LAB_BUG"),
        ("corrupt_checkpoint@step5", "was removed: change a byte"),
        ("full_disk@3s", "can only occur at the start of a step"),
        ("slow_link@step3", "such as 10mbit"),
        ("slow_link:5ms@step3", "LAB_NET_DELAY with compose/net.yaml"),
        ("slow_link:0mbit@step3", "would let nothing through"),
        ("slow_rank:1.5@step3", "allowed: rank0, 0.5"),
        ("cut:out:1s@step1", "has no duration, leave it out"),
        ("kill:rank4@step1", "allowed: rank0 to rank3"),
        ("kill@step20", "allowed: step0 to step19"),
    ],
)
def test_an_invalid_entry_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.read(SETTINGS | {"LAB_FAULTS": text})
    (fault,) = refused.value.faults
    assert fault.startswith(f"LAB_FAULTS='{text}' ")
    assert words in fault


def test_all_faults_of_entries_and_variables_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        Config.read(SETTINGS | {"LAB_FAULTS": "kil@step1, kill,pause@5", "LAB_AUDIT_EVERY": "0"})
    assert len(refused.value.faults) == 4


def test_one_rank_alone_has_no_link() -> None:
    with pytest.raises(ConfigError, match="needs at least two ranks"):
        Config.read(SETTINGS | {"WORLD_SIZE": "1", "LAB_FAULTS": "cut@step3"})


def test_a_missing_rank_is_drawn_by_the_seed() -> None:
    entries, _ = parse_faults("kill@step1,pause@2s,kill:rank3@step2")
    drawn = planned(entries, 7, 4)
    assert drawn == planned(entries, 7, 4)
    assert [(each.kind, each.number) for each in drawn] == [("kill", 0), ("pause", 1), ("kill", 2)]
    assert drawn[2].rank == 3
    assert {planned(entries, seed, 4)[0].rank for seed in range(40)} == {0, 1, 2, 3}


def test_an_event_has_a_readable_label() -> None:
    entries, _ = parse_faults(
        "kill:rank2@step5,pause:rank1:1s@4s,full_disk:rank0@step3,cut:in:rank1@2s,slow_rank:rank0:0.5@step1"
    )
    assert [each.label for each in planned(entries, 1, 4)] == [
        "kill rank 2 at step 5",
        "pause rank 1 for 1 s after 4.0 s",
        "fill the disk of rank 0 at step 3",
        "cut rank 1 (incoming messages) after 2.0 s",
        "slow rank 0 to 0.5 of its speed at step 1",
    ]
