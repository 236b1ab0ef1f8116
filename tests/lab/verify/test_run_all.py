"""The passes in their order, and when a section of rank 0's log is finished: what is known then is printed, not at the
end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distlab.contract import Variant
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.lab.report import records
from distlab.lab.report.records import Check, Memory, Steps, Wire
from distlab.lab.verify.run_all import everything, measure, timed_ends
from tests.labs import TINY, failed, lab_of, run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)
SETTINGS = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LAB_VARIANT": "per_parameter"} | TINY


def sections(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[tuple[str, set[str]]]:
    """The sections that a run finishes on this rank, and of which kinds it had written records until then."""
    lab, found = lab_of(group, settings, folder), []
    kinds = (Check, Steps, Wire, Memory)
    lab.finished = lambda name, _rows=(): found.append(
        (name, {kind.__name__ for kind in kinds if any(isinstance(record, kind) for record in lab.journal.records)})
    )
    everything(lab)
    return found


def test_a_section_is_finished_as_soon_as_its_numbers_are_written_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, sections, SETTINGS, str(tmp_path))
    assert (
        [name for name, _ in first]
        == ["proof", "timed", "profile", "measured", "memory"]
        == [name for name, _ in second]
    )
    assert first[0][1] == {"Check"}
    assert first[1][1] == {"Check", "Steps"}
    assert first[3][1] == {"Check", "Steps", "Wire", "Memory"}


def test_without_the_proof_there_is_no_such_section(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(2, sections, SETTINGS | {"LAB_PROOF": "0"}, str(tmp_path))
    assert [name for name, _ in first] == ["timed", "profile", "measured", "memory"]


def counted(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    """Where rank 0 is, and of how many units how many are done, as its heartbeat tells it at each change of place."""
    lab, found = lab_of(group, settings, folder), []
    lab.at = lambda _step, phase: found.append(phase + lab.work.progress_text().partition(",")[0])
    everything(lab)
    return found


def test_recorded_and_counted_steps_belong_to_the_estimate(ranks: Ranks, tmp_path: Path) -> None:
    places, _ = ranks(2, counted, SETTINGS | {"LAB_VARIANT": "per_parameter,flat"}, str(tmp_path))
    proof = [line for line in places if "of the proof" in line]
    assert proof[:2] == [
        "one process (0 of 9 steps of the proof)",
        "the construction of per_parameter (3 of 9 steps of the proof)",
    ]
    assert proof[-1] == "proof of flat (8 of 9 steps of the proof)"
    steps = [line for line in places if line.startswith(("per_parameter", "flat"))]
    names = ("per_parameter", "flat", "flat", "per_parameter") * 2
    assert steps == [f"{name} ({done} of 20 steps)" for done, name in enumerate(names)]
    assert "recorded step 2 of flat (13 of 20 steps)" in places and "count of flat (17 of 20 steps)" in places


def test_a_variants_proof_is_printed_before_the_next_one_is_built(ranks: Ranks, tmp_path: Path) -> None:
    places, _ = ranks(2, proofs, SETTINGS | {"LAB_VARIANT": "per_parameter,flat"}, str(tmp_path))
    assert places == [
        ("the construction of per_parameter", []),
        ("the construction of flat", ["per_parameter"]),
        ("the end", ["per_parameter", "flat"]),
    ]


def proofs(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[tuple[str, list[str]]]:
    """The variants whose proof was finished when each is made, and in the end; the rows to come are all of them."""
    lab, places, proven = lab_of(group, settings, folder), [], []

    def finished(section: str, rows: tuple[str, ...] = ()) -> None:
        if section == "proof":
            assert rows == ("per_parameter", "flat")
            checked = [record.variant for record in lab.journal.records if isinstance(record, Check)]
            proven.append(checked[-1] if checked else "")

    lab.finished = finished
    lab.at = lambda _step, phase: (
        places.append((phase, list(proven))) if phase.startswith("the construction of ") else None
    )
    measure(lab)
    return [*[place for place in places if "all" not in place[0]], ("the end", list(proven))]


def test_the_default_run_is_as_small_as_the_docs_say() -> None:
    """README's promise of a minute rests on this, and the clock of a busy machine says nothing of it."""
    config = Config.read({})
    mode = load(config.run_mode)
    (slow,) = [each.name for each in mode.variants if each.timed_part > 1]
    calls = next(each.calls for each in mode.predict(config) if each.variant == slow)
    lab = SimpleNamespace(config=config, mode=mode)
    ends = timed_ends(lab, mode.names, same_steps=False)  # type: ignore[arg-type]
    top = Path(__file__).parents[3]
    assert "a verdict within 60 s on two cores" in " ".join((top / "README.md").read_text().split())
    page = " ".join((top / "docs" / "performance.md").read_text().split())
    assert f"a first run has {config.depth} layers" in page and f"`{slow}`, which sends {calls} tensors a step" in page
    assert f"takes {ends[slow]} of the {config.steps} timed steps" in page
    assert {end for name, end in ends.items() if name != slow} == {config.steps}


# A variant that is in a run for what it shows takes its share of the timed steps, and says so.


def lab_of_three(**settings: Any) -> Any:
    config = SimpleNamespace(**{"steps": 20, "backend": "gloo", "world_size": 4} | settings)
    mode = SimpleNamespace(variants=[Variant("slow", timed_part=3), Variant("fast"), Variant("other")])
    return SimpleNamespace(config=config, mode=mode)


@pytest.mark.parametrize(("steps", "slow"), [(3, 3), (5, 5), (12, 5), (20, 7), (100, 34)])
def test_a_slow_variant_takes_a_part_of_the_steps_and_five_at_least(steps: int, slow: int) -> None:
    assert timed_ends(lab_of_three(steps=steps), ["slow", "fast"], same_steps=False) == {"slow": slow, "fast": steps}


@pytest.mark.parametrize(
    ("settings", "chosen", "same_steps"),
    [
        ({}, ["slow"], False),
        ({}, ["slow", "fast"], True),
        ({"backend": "tcp"}, ["slow", "fast"], False),
        ({"world_size": 1}, ["slow", "fast"], False),
    ],
)
def test_it_takes_all_steps_alone_or_if_nothing_is_slow_or_steps_must_be_equal(
    settings: dict[str, Any], chosen: list[str], same_steps: bool
) -> None:
    assert set(timed_ends(lab_of_three(**settings), chosen, same_steps=same_steps).values()) == {20}


def test_fewer_timed_steps_are_checked_like_all_others(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "dp", "LAB_STEPS": "9", "LAB_VARIANT": "per_parameter,flat"}
    run, by_rank = run_experiment(ranks, 2, tmp_path, **settings)
    assert failed(run) == set()
    timed = {each.variant: len(each.step_seconds) for each in by_rank[0] if isinstance(each, records.Steps)}
    assert timed == {"per_parameter": 5 - 2, "flat": 9 - 2}
    details = {(claim["variant"], claim["name"]): claim["detail"] for claim in run["checks"]}
    assert details["per_parameter", "timed steps"].startswith("steps 0 to 4, audited: 0,")
    assert details["flat", "timed steps"].startswith("steps 0 to 8, audited: 0,")
    assert ("per_parameter", "timed losses") in details
    texts = [each.text for each in by_rank[0] if isinstance(each, records.Said)]
    assert any("only 5 of 9 steps of per_parameter are timed" in text for text in texts)
