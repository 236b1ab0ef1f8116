"""Every way in which a run may fail to hold is seen, and each test's counterpart is the run that passes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from distlab.lab.report.reading import BrokenRecord, read_run
from distlab.lab.report.records import (
    Check,
    Classes,
    Comparison,
    Digest,
    End,
    Failed,
    Left,
    Lost,
    Ranks,
    Record,
    Resumed,
    Saved,
    Start,
    Steps,
    Unshared,
    Wire,
)
from distlab.lab.report.verdict import (
    exit_code,
    first,
    judge,
    merge_checks,
    merge_comparisons,
    passes,
    pytorch_own,
    write_run,
)  # fmt: skip
from tests.lab.report.made_up import (
    MISTAKE,
    bent,
    good_run,
    mistaken,
    plus,
    start,
    with_check,
    with_measured,
    without,
    written,
)


def verdict(records: Ranks) -> tuple[str, int]:
    run = judge(records)
    return run["verdict"], exit_code(run)


def test_the_good_run_passes_and_is_proven() -> None:
    run = judge(good_run())
    assert (run["verdict"], exit_code(run), run["proven"]) == ("pass", 0, True)
    fields = "schema run_id run_mode world_size verdict config versions variants skipped checks comparisons lost"
    assert set(fields.split()) <= set(run)
    assert run["schema"] == 1
    assert run["skipped"] == [{"variant": "sharded", "reason": "8 heads cannot be dealt to 3 ranks"}]


@pytest.mark.parametrize("own_words", [[], [Failed(143, "stopped"), Lost(3, 7, "stopped")], [Failed(1, "ValueError")]])
def test_a_rank_that_left_a_run_that_went_on_is_named_and_decides_nothing(own_words: list[Record]) -> None:
    records = plus(without(End, good_run(), 3), *own_words, rank=3)
    records = plus(records, Left(3, 7, "no heartbeat for 2.5 s; the remaining ranks continued"))
    run = judge(records)
    assert (run["verdict"], exit_code(run), run["errors"]) == ("pass", 0, [])
    assert run["lost"] == [{"rank": 3, "step": 7, "reason": "no heartbeat for 2.5 s; the remaining ranks continued"}]
    del records[3]  # nodes need not share a disk
    assert verdict(records) == ("pass", 0)
    assert verdict(with_check(records, "gradients", 1.0)) == ("fail", 1)
    assert verdict(without(End, records, 2)) == ("lost", 3), "another is silent, and nobody let it go"


def ended(code: int) -> Ranks:
    return plus(without(End, good_run(), 1), Failed(code, "so it ended"), rank=1)


GOOD = good_run()
VERDICTS: dict[str, tuple[Ranks, tuple[str, int]]] = {
    **{
        f"{name} off by {off}": (with_check(GOOD, name, off), ("fail", 1))
        for name in ("gradients", "weights", "losses")
        for off in (1.1e-12, 3.1e-2, math.nan, math.inf, -1.0)
    },
    "at the tolerance": (with_check(GOOD, "gradients", 1e-12), ("pass", 0)),
    "no number where anything is allowed": (plus(GOOD, Check("naive", "losses", math.nan, math.inf)), ("fail", 1)),
    "infinite where anything is allowed": (plus(GOOD, Check("naive", "losses", math.inf, math.inf)), ("fail", 1)),
    "off on rank 0": (plus(GOOD, Check("naive", "gradients", 0.5, 1e-12)), ("fail", 1)),
    "off on rank 3": (plus(GOOD, Check("naive", "gradients", 0.5, 1e-12), rank=3), ("fail", 1)),
    "more bytes": (with_measured(GOOD, "bucketed", "called bytes", 9.6e6 + 0.16e6, 1), ("fail", 1)),
    "fewer bytes": (with_measured(GOOD, "bucketed", "called bytes", 9.6e6 - 0.16e6, 1), ("fail", 1)),
    "no number of bytes": (with_measured(GOOD, "bucketed", "called bytes", math.nan, 1), ("fail", 1)),
    "what only informs": (with_measured(GOOD, "ddp", "wire bytes", 99e6, 1), ("pass", 0)),
    "no tolerance": (plus(GOOD, Comparison("naive", "bubble", "", 0.3, 0.3, math.nan)), ("fail", 1)),
    "one rank alone": (good_run(1), ("pass", 0)),
    "an error": (ended(1), ("fail", 1)),
    "a refusal": (ended(2), ("refused", 2)),
    "a loss": (ended(3), ("lost", 3)),
    "SIGTERM": (ended(143), ("lost", 143)),
    "Ctrl-C": (ended(130), ("lost", 130)),
    "an error, and the loss that it caused": (plus(ended(1), Lost(1, 4, "failed")), ("fail", 1)),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_each_way_to_fail_is_seen(name: str) -> None:
    records, expected = VERDICTS[name]
    assert verdict(records) == expected


@pytest.mark.parametrize(
    ("records", "rank"),
    [(without(End, GOOD, 0), 0), (without(End, GOOD, 2), 2), ({rank: GOOD[rank] for rank in range(3)}, 3)],
    ids=["0 without a last word", "2 without a last word", "3 without a record"],
)
def test_a_rank_without_its_last_word_is_lost(records: Ranks, rank: int) -> None:
    run = judge(records)
    assert (run["verdict"], exit_code(run), [lost["rank"] for lost in run["lost"]]) == ("lost", 3, [rank])


def test_survivors_name_the_lost_rank() -> None:
    gone = Lost(2, 17, "silent for 2.5 s")
    records = {
        rank: [*of_rank, gone, Failed(3, "rank 2 was lost")]
        for rank, of_rank in without(End, good_run()).items()
        if rank != 2
    }
    run = judge(records)
    assert run["lost"] == [{"rank": 2, "step": 17, "reason": "silent for 2.5 s"}]
    assert (run["verdict"], exit_code(run), run["proven"]) == ("lost", 3, False)
    assert run["unseen"] == [{"rank": 2, "host": None}]


def test_what_stayed_on_other_machines_is_named_with_them() -> None:
    hosts = ["node0", "node1", "node0", "node1"]
    records = plus(good_run(), Unshared(hosts), Failed(3, "rank 1 was lost"))
    assert judge(records)["unseen"] == []
    here = {rank: of_rank for rank, of_rank in records.items() if rank in (0, 2)}
    assert judge(here)["unseen"] == [{"rank": 1, "host": "node1"}, {"rank": 3, "host": "node1"}]


@pytest.mark.parametrize("value", [False, "0", 0])
def test_a_run_without_proof_is_not_proven(value: object) -> None:
    def change(record: Record) -> Record:
        return replace(record, config=record.config | {"LAB_PROOF": value}) if isinstance(record, Start) else record

    run = judge(bent(good_run(), change))
    assert (run["verdict"], run["proven"]) == ("pass", False)
    assert judge(without(Check, good_run()))["proven"] is False  # nor is one without checks


def test_variants_have_an_entry_a_rank() -> None:
    run = judge(without(Wire, good_run(), rank=1))
    naive = next(variant for variant in run["variants"] if variant["name"] == "naive")
    assert [
        len(naive[kind]) for kind in ("step_seconds", "cpu_seconds", "wire_bytes", "called_bytes", "peak_bytes")
    ] == [4] * 5
    assert naive["step_seconds"][0] == pytest.approx(81e-3, rel=0.06)
    assert naive["called_bytes"] == [9.6e6] * 4
    assert naive["wire_bytes"] == [pytest.approx(9.6e6 * 1.01), None, *[pytest.approx(9.6e6 * 1.01)] * 2]
    assert naive["peak_bytes"] == [20_000_000, 20_200_000, 20_400_000, 20_600_000]


def test_memory_is_listed_by_class_and_rank() -> None:
    naive = judge(without(Classes, good_run(), rank=2))["variants"][0]
    assert naive["rest_bytes"] == [12_800_000, 12_800_000, None, 12_800_000]
    assert naive["rest_by_class"][0] == {
        "parameters": 6_400_000, "gradients": 6_400_000, "optimizer": 0, "activations": 0, "communication": 0,
    }  # fmt: skip
    assert [by_class and by_class["activations"] for by_class in naive["peak_by_class"]] == [
        7_200_000,
        7_400_000,
        None,
        7_800_000,
    ]


def test_a_step_is_the_median_of_the_timed_ones() -> None:
    records = plus(without(Steps, good_run(1)), Steps("naive", [1.0, 9.0, 2.0], [0.5, 0.5, 0.1]))
    naive = judge(records)["variants"][0]
    assert (naive["step_seconds"], naive["cpu_seconds"]) == ([2.0], [0.5])


def test_pytorch_own_is_what_the_start_names() -> None:
    assert pytorch_own(judge(good_run())) == "ddp"
    assert pytorch_own(judge(good_run(variants={"naive": 1.0}))) is None


@pytest.mark.parametrize(
    "stranger", [start(3), start(1, run_id="dp-of-yesterday"), start(1, world_size=5)], ids=["rank", "run", "size"]
)  # fmt: skip
def test_records_of_another_run_are_refused(stranger: Start) -> None:
    records = good_run()
    records[1] = [stranger, *records[1][1:]]
    with pytest.raises(BrokenRecord, match="rank 1"):
        judge(records)
    with pytest.raises(BrokenRecord, match="Start"):
        first(without(Start, good_run()))


def test_the_same_records_give_the_same_run_json(tmp_path: Path) -> None:
    records = with_check(good_run(), "losses", math.nan)
    write_run(tmp_path, judge(records))
    at_once = (tmp_path / "run.json").read_text()
    write_run(tmp_path, judge(read_run(written(tmp_path, records))))
    assert (tmp_path / "run.json").read_text() == at_once
    assert json.loads(at_once, parse_constant=pytest.fail)["checks"][2]["max_abs_diff"] is None


def test_an_injected_bug_is_in_run_json() -> None:
    assert judge(mistaken(good_run()))["mistake"] == MISTAKE
    assert judge(good_run())["mistake"] is None


def test_saves_a_resume_and_final_weights_are_rank_zeros_words() -> None:
    records = good_run()
    records[0] += [
        Resumed(1, 10, "runs/a/checkpoints/step-00000010"),
        Saved(15, 0.5, 0.25, 999),
        Saved(20, 0.0, 0.0, 0, "full"),
    ]
    records[0].append(Digest("naive", "ab" * 32))
    run = judge(records)
    assert run["resumed"] == {"epoch": 1, "step": 10, "path": "runs/a/checkpoints/step-00000010"}
    assert run["checkpoints"] == [
        {"step": 15, "seconds": 0.5, "held_seconds": 0.25, "bytes": 999, "error": ""},
        {"step": 20, "seconds": 0.0, "held_seconds": 0.0, "bytes": 0, "error": "full"},
    ]
    digests = {variant["name"]: variant["weights_sha256"] for variant in run["variants"]}
    assert digests == {"naive": "ab" * 32, "bucketed": None, "ddp": None}
    assert (run["verdict"], judge(good_run())["resumed"], judge(good_run())["checkpoints"]) == ("pass", None, [])


# Which of several claims of one name is kept.


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        ([[Check("v", "a", 0.25, 1.0)], [Check("v", "a", 0.5, 1.0)]], [("v", "a", 0.5, True)]),
        ([[Check("v", "a", 0.5, 1.0)], [Check("v", "a", 0.25, 1.0)]], [("v", "a", 0.5, True)]),
        ([[Check("v", "a", 0.5, 1.0)], [Check("v", "a", 0.25, 0.125)]], [("v", "a", 0.25, False)]),
        ([[Check("v", "a", 0.25, 0.125)], [Check("v", "a", 0.5, 1.0)]], [("v", "a", 0.25, False)]),
        ([[Check("v", "a", 2.0, 1.0)], [Check("v", "a", 3.0, 1.0)]], [("v", "a", 3.0, False)]),
        ([[Check("v", "a", 2.0, 1.0), Check("w", "a", 3.0, 9.0), Check("v", "b", 0.0, 0.0)]],
         [("v", "a", 2.0, False), ("w", "a", 3.0, True), ("v", "b", 0.0, True)]),
    ],
)  # fmt: skip
def test_of_checks_of_one_name_the_worst(of_ranks: list[list[Record]], expected: list[tuple[Any, ...]]) -> None:
    found = merge_checks(dict(enumerate(of_ranks)))
    assert [(each["variant"], each["name"], each["max_abs_diff"], each["passed"]) for each in found] == expected


def compared(measured: float, tolerance: float = 4.0, variant: str = "v", *, decides: bool = True) -> Comparison:
    return Comparison(variant, "a", "B", 10.0, measured, tolerance, decides=decides)


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        ([compared(11.0), compared(7.0)], [("v", 1, 7.0, True)]), ([compared(13.0), compared(8.0)], [("v", 0, 13.0, True)]),
        ([compared(11.0, 0.5), compared(7.0)], [("v", 0, 11.0, False)]),
        ([compared(19.0, decides=False), compared(5.0)], [("v", 1, 5.0, False)]),
        ([compared(19.0, decides=False), compared(7.0, decides=False)], [("v", 0, 19.0, True)]),
        ([compared(3.0), compared(math.nan)], [("v", 1, math.nan, False)]),
        ([compared(14.0), compared(6.0, variant="w")], [("v", 0, 14.0, True), ("w", 1, 6.0, True)]),
    ],
)  # fmt: skip
def test_of_comparisons_of_one_name_that_of_the_rank_farthest_off(
    of_ranks: list[Comparison], expected: list[tuple[Any, ...]]
) -> None:
    found = merge_comparisons({rank: [each] for rank, each in enumerate(of_ranks)})
    assert repr([(each["variant"], each["rank"], each["measured"], each["passed"]) for each in found]) == repr(expected)


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (Check("v", "a", 1.0, 1.0), True), (Check("v", "a", 1.0001, 1.0), False), (Check("v", "a", -2.0, 1.0), False),
        (Check("v", "a", math.inf, math.inf), False), (Check("v", "a", math.nan, 1.0), False),
        (compared(6.0), True), (compared(14.5), False), (compared(5.5), False), (compared(99.0, decides=False), True),
    ],
)  # fmt: skip
def test_a_claim_passes_up_to_its_tolerance(claim: Check | Comparison, expected: bool) -> None:
    assert passes(claim) is expected
