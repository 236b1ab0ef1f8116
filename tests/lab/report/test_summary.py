"""The end of rank 0's log: a row a variant within 80 columns of a terminal, then what failed, then where to read on."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.lab.report import sentences, summary
from distlab.lab.report.log import end_lines
from distlab.lab.report.records import (
    Check,
    Classes,
    Comparison,
    Failed,
    Load,
    Lost,
    Memory,
    Ranks,
    Record,
    Run,
    Skipped,
    Start,
    Steps,
    Wire,
)
from distlab.lab.report.summary import table_lines
from distlab.lab.report.table import WIDTH, in_lines, middle_cut
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import bent, good_run, mistaken, plus, unwrapped, with_check, with_measured, without

REPORT = Path("runs/dp-20261120-171500/report.html")
LONG = "mine/folder/of_a_model.py:my_own_strategy_with_a_long_name"


def end(records: Ranks) -> list[str]:
    return end_lines(judge(records), records, REPORT, "normal")


def renamed(records: Ranks, names: dict[str, str]) -> Ranks:
    """The same run with other names of its variants."""

    def change(record: Record) -> Record:
        if isinstance(record, Start):
            return replace(record, by_torch=[names.get(each, each) for each in record.by_torch])
        variant = getattr(record, "variant", "")
        return replace(record, variant=names[variant]) if variant in names else record

    return bent(records, change)


def test_the_last_lines_of_a_run() -> None:
    assert end(without(Skipped, good_run())) == EXPECTED


def loaded(records: Ranks, cores: int, runnable: int | None, machine: str = "one") -> Ranks:
    """The same run on a machine of so many cores with so many threads that run, the ranks themselves among them."""
    for rank, moment in [(rank, moment) for rank in records for moment in ("start", "end")]:
        records = plus(records, Load(moment, machine, cores, "Example 9000", 3.5, runnable, 0.5, 100.0), rank=rank)
    return records


@pytest.mark.parametrize(
    ("cores", "runnable", "sentence"),
    [
        (2, 33, "4 ranks on 2 cores, 30 other runnable threads: compare bytes, not times"),
        (16, 3, "4 ranks on 16 cores, 0 other runnable threads: each rank had a core for itself"),
        (16, 18, "4 ranks on 16 cores, 15 other runnable threads: compare bytes, not times"),
        (2, None, "4 ranks on 2 cores, unknown other runnable threads: compare bytes, not times"),
    ],
)
def test_one_line_about_the_reliability_of_times(cores: int, runnable: int | None, sentence: str) -> None:
    records = loaded(good_run(), cores, runnable)
    assert [line for line in unwrapped(end(records)) if line.startswith("times")] == [f"times      {sentence}"]
    machine = judge(records)["machines"]
    assert [(each["cores"], each["processor"], each["ranks"]) for each in machine] == [
        (cores, "Example 9000", [0, 1, 2, 3])
    ]
    assert machine[0]["end"] == {"load_average": 3.5, "runnable": runnable, "cpu_pressure": 0.5, "at": 100.0}


def test_no_line_about_times_without_times_or_machines() -> None:
    assert not [line for line in end(good_run()) if line.startswith("times")]
    assert judge(good_run())["machines"] == []
    assert not [line for line in end(without(Steps, loaded(good_run(), 2, 9))) if line.startswith("times")]


@pytest.mark.parametrize("names", [{"ddp": LONG}, {"naive": LONG}, {"naive": LONG, "ddp": "torch_interleaved_zb"}])
def test_a_long_name_breaks_no_line(names: dict[str, str]) -> None:
    printed = table_lines(judge(renamed(good_run(), names)), renamed(good_run(), names))
    assert len(printed) == 5 and max(map(len, printed)) <= WIDTH == 80 - len("worker0-1  | ")
    assert all(line.endswith(("passed", "shown")) for line in printed[2:])


@pytest.mark.parametrize(("most", "short"), [(20, "wave"), (4, "wave"), (3, "w.."), (2, ".."), (1, ".")])
def test_a_name_loses_its_middle(most: int, short: str) -> None:
    assert middle_cut("wave", most) == short
    assert middle_cut("mine/wave.py:wave", 9) == "mine..ave"


def test_no_column_is_empty_and_a_value_that_is_not_there_is_an_empty_cell() -> None:
    unproven = without(Check, good_run())
    assert "exact" not in "\n".join(end(unproven)[:2])
    single = bent(good_run(), lambda record: None if is_of(record, "naive", Wire, Classes, Memory) else record)
    row = next(line for line in end(single) if line.startswith("naive")).split()
    assert len(row) < len(next(line for line in end(single) if line.startswith("bucketed")).split())
    assert "-" not in row and "None" not in row


@pytest.mark.parametrize("config", [{"LAB_PROOF": False}, {"LAB_PROOF": "0"}, {}], ids=str)
def test_what_was_not_proven_is_exact_to_nothing(config: dict[str, object]) -> None:
    """Its other checks may be of differences too, such as those between replicas."""

    def change(record: Record) -> Record | None:
        if isinstance(record, Start):
            return replace(record, config=record.config | config)
        return replace(record, name="replicas", max_abs_diff=0) if isinstance(record, Check) else record

    unproven = bent(good_run(), change)
    assert judge(unproven)["proven"] == (not config)
    assert [line.split()[1] for line in end(unproven)[2:5]] == ["-"] * 3


def is_of(record: Record, variant: str, *kinds: type[Record]) -> bool:
    return isinstance(record, kinds) and getattr(record, "variant", "") == variant


def test_a_mode_that_times_calls_has_the_bytes_of_its_largest() -> None:
    calls = [Comparison("ring", f"wire bytes all_reduce {mib} MiB", "B", mib * 1e6, mib * 1.1e6, 1e6) for mib in (1, 4)]
    records = {rank: [each[0], *calls, Check("ring", "sum", 0, 0), each[-1]] for rank, each in good_run().items()}
    assert table_lines(judge(records), records) == [
        "                     MB sent   at most",
        "variant  exact to  predicted  measured",
        "ring            0       4.00      4.40  passed",
    ]


def test_a_mode_that_times_no_steps_names_the_checks_that_decided() -> None:
    records = {
        rank: [each[0], Check("", "gathered", 0, 0), Check("", "shards", 0, 0), each[-1]]
        for rank, each in good_run().items()
    }
    assert end(records)[0] == "decided by gathered, shards"
    assert not any(line.startswith("decided") for line in end(good_run()))


def test_a_single_rank_has_a_line_that_nothing_is_communicated() -> None:
    printed = end(single := {0: [replace(good_run()[0][0], world_size=1), *good_run()[0][1:]]})
    assert "alone      WORLD_SIZE=1: there is nothing to communicate" in printed
    assert not any("sent" in line for line in printed[:3])
    assert any(line.startswith("alone") for line in end_lines(judge(single), single, REPORT, "full"))
    for mode in ("check", "prove"):  # which say it in their own words
        script = {0: [replace(single[0][0], run_mode=mode), *single[0][1:]]}
        assert not any(line.startswith("alone") for line in end_lines(judge(script), script, REPORT, "full"))
    assert not any(line.startswith("alone") for line in end(good_run()))


def test_a_broken_cluster_names_the_logs_to_read() -> None:
    records = plus(good_run(), Lost(1, 5, "no heartbeat"))
    printed = in_lines(sentences.lost_lines(judge(records), records, None, REPORT.parent))
    assert printed[0] == f"read       the last lines of rank1.log in {REPORT.parent}"
    assert [line.split()[0] for line in printed] == ["read", "rerun"]


def test_what_failed_is_a_sentence_and_where_to_read_on() -> None:
    printed = unwrapped(end(with_measured(good_run(), "naive", "wire bytes", 12e6, rank=2)))
    assert next(line for line in printed if line.startswith("naive")).endswith("FAILED")
    assert "FAILED     naive wire bytes: predicted 9.60 MB ± 150 kB, rank 2 measured 12.0 MB" in printed
    assert "read       experiments/dp/; LAB_VARIANT=naive runs it alone" in printed
    many = end(with_check(good_run(), "weights", 3.1e-2))
    assert sum(line.startswith("FAILED") for line in many) == 3
    assert not any(line.startswith("read") for line in end(mistaken(with_check(good_run(), "weights", 3.1e-2))))


def test_a_rank_that_an_error_ended_has_its_log_named() -> None:
    printed = end(plus(good_run(), Failed(1, "ValueError: no"), rank=2))
    assert "error      rank 2 ended with code 1: ValueError: no" in printed
    assert f"read       rank2.log in {REPORT.parent}" in printed


def test_skipped_variants_take_two_lines_at_most() -> None:
    records = without(Skipped, good_run())
    for name in ("zbv", "interleaved"):
        records = plus(records, Skipped(name, "too few layers"))
    assert [line for line in end(records) if line.startswith("skipped")] == [
        "skipped    zbv: too few layers", "skipped    interleaved: too few layers",
    ]  # fmt: skip
    printed = unwrapped(end(plus(records, Skipped("dualpipev", "no"))))
    (line,) = [line for line in printed if line.startswith("skipped")]
    assert line.startswith("skipped    these settings rule out 3 variants") and line.endswith(
        "zbv, interleaved, dualpipev"
    )


def test_five_variants_take_twelve_lines() -> None:
    assert len(end(without(Skipped, good_run(variants=dict.fromkeys(("a", "b", "c", "d", "ddp"), 0.05))))) <= 12


# Each decision of a sentence, by made-up entries of run.json.


def claim(name: str, passed: bool, variant: str = "flat", **fields: object) -> Run:
    made = {"variant": variant, "name": name, "max_abs_diff": 0.25, "tolerance": 0.125, "unit": "", "detail": "",
            "control": ""}  # fmt: skip
    return made | {"passed": passed} | fields


def comparison(name: str, passed: bool, predicted: float = 3.0, measured: float = 5.0, **fields: object) -> Run:
    made = {"variant": "flat", "name": name, "predicted": predicted, "measured": measured, "tolerance": 1.0,
            "unit": "calls", "rank": 2, "decides": True, "control": ""}  # fmt: skip
    return made | {"passed": passed} | fields


def made_run(**fields: object) -> Run:
    return {
        "verdict": "pass", "run_mode": "dp", "proven": True, "checks": [], "comparisons": [], "lost": [], "errors": [],
        "variants": [], "skipped": [], "mistake": None, "world_size": 2, "by_torch": [], "config": {},
    } | fields  # fmt: skip


LOST = [{"rank": 3, "step": 7, "reason": "silent"}, {"rank": 1, "step": None, "reason": "gone"}]
ERRORS = [{"rank": 2, "exit_code": 1, "error": "no"}, {"rank": 0, "exit_code": 2, "error": "bad"}]
FIVE = [claim(name, False) for name in "abcde"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (made_run(verdict="lost", lost=LOST), "rank 3 lost at step 7: silent; rank 1 lost: gone"),
        (made_run(verdict="refused", errors=[*ERRORS, ERRORS[0]]), "no; bad"),
        (made_run(verdict="fail", errors=ERRORS), "no"),
        (made_run(checks=FIVE[:4], comparisons=[comparison("calls", True)]),
         "4 of 5 checks failed: flat a, flat b, flat c, flat d"),
        (made_run(checks=FIVE, comparisons=[comparison("time", True, decides=False)]),
         "5 of 5 checks failed: flat a, flat b, flat c, flat d, ..."),
        (made_run(comparisons=[comparison("calls", False)], checks=[claim("a", True)]),
         "1 of 2 checks failed: flat calls"),
        (made_run(checks=[claim("a", True)], lost=LOST[:1]), "1 check passed · without rank 3"),
        (made_run(checks=[claim("a", True)], proven=False), "not proven · 1 check passed"),
        (made_run(checks=[claim("a", True)] * 2, proven=False, run_mode="check"), "2 checks passed"),
    ],
)  # fmt: skip
def test_the_verdict_in_one_phrase(run: Run, expected: str) -> None:
    assert sentences.headline(run) == expected


def moment(runnable: int | None) -> Run:
    return {"runnable": runnable}


@pytest.mark.parametrize(
    ("ranks", "cores", "start", "end", "others", "crowded"),
    [
        ([0, 1], 4, moment(3), moment(1), 2, False), ([0, 1], 4, moment(1), moment(3), 2, False),
        ([0, 1], 4, moment(1), moment(4), 3, True), ([0, 1], 4, moment(None), moment(3), 2, False),
        ([0, 1, 2], 2, None, moment(1), 0, True), ([0, 1], 2, None, None, None, False),
    ],
)  # fmt: skip
def test_threads_beside_the_ranks(
    ranks: list[int], cores: int, start: Run | None, end: Run | None, others: int | None, crowded: bool
) -> None:
    """One rank is not counted among those that run; the larger of both moments counts."""
    machine = {"ranks": ranks, "cores": cores, "start": start, "end": end}
    assert (sentences.others_runnable(machine), sentences.is_crowded(machine)) == (others, crowded)


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (claim("gradients", False), "flat gradients: differs by 2.5e-01, but only 0.125 is allowed"),
        (claim("a", False, "", detail="rank 1"), "a: differs by 2.5e-01, but only 0.125 is allowed (rank 1)"),
        (claim("replicas agree", False, "", unit="findings", detail="w differs"), "replicas differ: w differs"),
        (comparison("calls", False), "flat calls: predicted 3 calls ± 1 call, rank 2 measured 5 calls"),
    ],
)
def test_what_was_expected_and_what_was_seen(failed: Run, expected: str) -> None:
    assert sentences.failure_sentence(failed) == expected
    assert sentences.claim_name(claim("replicas agree", True, "", unit="findings")) == "replicas agree"


BUG = {"name": "twice", "what": "sends twice", "check": "calls"}


@pytest.mark.parametrize(
    ("checks", "comparisons", "seen"),
    [
        ([claim("a", False)], [comparison("calls", False)],
         "caught by flat calls: predicted 3 calls ± 1 call, rank 2 measured 5 calls"),
        ([claim("calls", False), claim("calls", False, "ring", max_abs_diff=0.5)], [],
         "caught by flat calls, ring calls: the first differs by 2.5e-01, but only 0.125 is allowed"),
        ([claim("a", False)], [comparison("calls", True)],
         "not caught: the calls check passed: nothing in this run detects it"),
        ([claim("a", False)], [], "not caught: the calls check did not run: nothing in this run could detect it"),
    ],
)  # fmt: skip
def test_whether_a_mistake_was_caught(checks: list[Run], comparisons: list[Run], seen: str) -> None:
    run = made_run(mistake=BUG, checks=checks, comparisons=comparisons)
    assert sentences.caught_sentence(run) == seen
    assert sentences.mistake_sentence(run) == "LAB_BUG=twice: sends twice; the check that catches it: calls"
    assert sentences.explanation(run).startswith("LAB_BUG=twice: sends twice; ")
    assert ("as expected" in sentences.explanation(run)) == seen.startswith("caught")


def test_equal_errors_missing_records_and_dropped_messages() -> None:
    errors = [*ERRORS, ERRORS[0] | {"rank": 5}, ERRORS[1] | {"rank": 4, "error": "no"}]
    assert sentences.error_sentences(made_run(errors=errors)) == [
        "ranks 2 and 5 ended with code 1: no", "rank 0 ended with code 2: bad", "rank 4 ended with code 2: no",
    ]  # fmt: skip
    unseen = [{"rank": 1, "host": "far"}, {"rank": 3, "host": None}]
    assert sentences.unseen_sentence({"unseen": unseen}).startswith(
        "no records of rank 1 (on far), rank 3: their records are on that host, not here;"
    )
    assert "rank 3: they ended before they wrote any;" in sentences.unseen_sentence({"unseen": unseen[1:]})
    dropped = {"messages": 7, "by_fault": {"bad tags": 4, "replays": 3}, "by_source": {"10.0.0.9": 5, "10.0.0.8": 2}}
    assert sentences.dropped_sentence({"dropped": dropped}) == (
        "rejected 7 unauthenticated messages: 4 bad tags, 3 replays; from 10.0.0.9 (5), 10.0.0.8 (2)"
    )


def test_parts_of_a_step_in_words() -> None:
    shares = sentences.Shares(0.5, 0.3, 0.2)
    assert shares.in_words(seen=True) == "compute 50%, communication and waiting 30%, idle 20%"
    assert shares.in_words(seen=False) == ("compute, communication and waiting 80% (not visible separately), idle 20%")


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (made_run(), ""), (made_run(proven=False, verdict="fail"), ""), (made_run(proven=False, run_mode="check"), ""),
        (made_run(proven=False), "not proven: no check was made"),
        (made_run(proven=False, checks=FIVE), "not proven: LAB_PROOF=0 skips the proof"),
    ],
)  # fmt: skip
def test_why_a_run_that_did_not_fail_is_not_proven(run: Run, note: str) -> None:
    assert sentences.proof_note(run) == note


@pytest.mark.parametrize(
    ("checks", "shown"),
    [
        ([claim("gradients", True, max_abs_diff=1e-9), claim("weights", True, max_abs_diff=3e-9),
          claim("calls", True, max_abs_diff=7.0)], "3.0e-09"),
        ([claim("gradients", False, max_abs_diff=1e-9), claim("weights", True, max_abs_diff=3e-9)], "1.0e-09"),
        ([claim("sum", True, max_abs_diff=2.0, unit="findings"), claim("mean", True, max_abs_diff=0.5)], "5.0e-01"),
        ([claim("losses", True, max_abs_diff=2.5, unit="epsilons of bfloat16")], "2.5 eps"),
        ([claim("losses", True, "ring")], ""),
    ],
)  # fmt: skip
def test_a_variant_is_as_exact_as_its_worst_proof(checks: list[Run], shown: str) -> None:
    assert summary.exact(made_run(checks=checks), "flat") == shown
    assert summary.exact(made_run(checks=[claim("losses", True, "")]), "") == ""


def test_of_more_claims_than_have_room_the_rest_is_counted() -> None:
    printed = in_lines(sentences.first_failures(made_run(checks=FIVE)))
    assert [line.split()[:3] for line in printed] == [
        *(["FAILED", "flat", f"{name}:"] for name in "abcd"), ["and", "1", "more:"], ["read", "experiments/dp/;", "LAB_VARIANT=flat"],
    ]  # fmt: skip
    assert len(in_lines(sentences.first_failures(made_run(checks=FIVE[:4])))) == 5
    first, second = claim("a", False, "m.py:f", control="LAB_BUG=x"), claim("b", False, "", control="tests/x")
    assert in_lines(sentences.first_failures(made_run(checks=[first, second])))[2:] == [
        "read       m.py; LAB_VARIANT=m.py:f runs it alone; LAB_BUG=x makes",
        "           this check fail on purpose",
    ]
    assert in_lines(sentences.first_failures(made_run(checks=[second], run_mode="mine/m.py")))[1:] == [
        "read       mine/m.py"
    ]
    names = [claim(name, True) for name in "abcdefghi"]
    assert in_lines(sentences.deciding_checks(made_run(checks=names))) == [
        "decided by a, b, c, d, e, f, g, h and 1 more"
    ]
    assert in_lines(sentences.deciding_checks(made_run(checks=names[:8]))) == ["decided by a, b, c, d, e, f, g, h"]


def test_names_and_claims_are_those_of_a_variant() -> None:
    run = made_run(
        checks=[claim("a", True, ""), claim("a", False, "ring"), claim("a", True)], skipped=[{"variant": "ring"}],
        comparisons=[comparison("wire bytes", True, 4.0, 9.0), comparison("calls", True, 8.0, 8.0),
                     comparison("wire bytes", True, 6.0, 7.0, variant="ring")],
    )  # fmt: skip
    assert summary.variants(run) == ["flat"]
    assert (summary.judged(run, "flat"), summary.judged(run, "ring")) == ("passed", "FAILED")
    assert summary.traffic(run, {}) == ({"flat": 4.0}, {"flat": 9.0})


def test_bytes_of_a_table_have_one_unit_by_the_most() -> None:
    flat = {"name": "flat", "step_seconds": [0.02], "wire_bytes": [9600.0], "called_bytes": [1.0], "peak_bytes": [2e6],
            "peak_by_class": [None]}  # fmt: skip
    assert [line.split() for line in summary.table_lines(made_run(variants=[flat]), {})] == [
        ["step", "per", "step", "peak"], ["variant", "ms", "measured", "MB"], ["flat", "20.0", "0.010", "2.00"],
    ]  # fmt: skip


def test_a_table_of_one_number_beside_the_verdicts_is_shown() -> None:
    run = made_run(checks=[claim("losses", True, max_abs_diff=0.0)])
    assert summary.table_lines(run, {}) == ["variant  exact to", "flat            0  passed"]


EXPECTED = """\
                    step           MB sent  per step  peak
variant   exact to    ms  x ddp  predicted  measured    MB
naive      5.6e-17  81.7   1.62       9.60      9.70  20.6  passed
bucketed   5.6e-17  50.5   1.00       9.60      9.61  23.6  passed
ddp        5.6e-17  50.5   1.00       9.60      9.61  26.6  passed
PASS       16 checks passed
report     runs/dp-20261120-171500/report.html
rerun      RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 docker compose up
""".splitlines()
