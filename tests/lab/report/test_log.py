"""What rank 0 prints last: columns in line, failures by name, and one line that says it all."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.lab.report.log import (
    SECTIONS,
    compared,
    end_lines,
    more_checks,
    rows_not_yet_printed,
    verdict_lines,
    words_of_row,
)
from distlab.lab.report.records import Check, Comparison, End, Failed, Lost, Ranks, Wire
from distlab.lab.report.run_folder import Level
from distlab.lab.report.sentences import UNTIL_ENDED, repeat_command
from distlab.lab.report.tables import LEGEND
from distlab.lab.report.verdict import first, judge
from tests.lab.report.made_up import (
    drilled_run,
    good_run,
    mistaken,
    pipeline_run,
    plus,
    unwrapped,
    with_check,
    with_measured,
    without,
)

REPORT = Path("runs/dp-20261120-171500/report.html")
RERUN = "rerun      RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 docker compose up"
LAST = ["PASS       16 checks passed", f"report     {REPORT}", RERUN]


def lines(records: Ranks, report: Path | None = REPORT) -> list[str]:
    return verdict_lines(judge(records), records, report)


def sentences(records: Ranks, report: Path | None = REPORT) -> list[str]:
    return unwrapped(lines(records, report))


def test_the_log_of_a_good_run() -> None:
    assert lines(good_run()) == [
        "skipped    sharded: 8 heads cannot be dealt to 3 ranks",
        "proof      float64, against the reference   gradients   weights   losses    (tolerance 1e-12)",
        "           naive                            2.8e-17     5.6e-17   0         passed",
        "           bucketed                         2.8e-17     5.6e-17   0         passed",
        "           ddp                              2.8e-17     5.6e-17   0         passed",
        "measured   20 steps, LAB_DTYPE=float32   ms per step   x ddp   MB predicted   called   wire",
        "           naive                                81.7    1.62           9.60     9.60   9.70   passed",
        "           bucketed                             50.5    1.00           9.60     9.60   9.61   passed",
        "           ddp                                  50.5    1.00           9.60     9.60   9.61   informational",
        (
            "memory     MB at rest / at the peak   parameters   gradients   activations         total   rest by formula"
            "       process"
        ),
        (
            "           naive                            6.40        6.40      0 / 7.80   12.8 / 20.6              12.8"
            "   13.1 / 21.6   passed"
        ),
        (
            "           bucketed                         6.40        6.40      0 / 10.8   12.8 / 23.6              12.8"
            "   13.1 / 24.6   passed"
        ),
        (
            "           ddp                              6.40        6.40      0 / 13.8   12.8 / 26.6              12.8"
            "   13.1 / 27.6   informational"
        ),
        "checks     shards disjoint   0   tolerance 0   passed",
        *LAST,
    ]


def twice() -> Ranks:
    """A mistake that a comparison sees."""
    records = with_measured(good_run(), "naive", "wire bytes", 12e6, 2)
    start = replace(first(records), mistake={"name": "twice", "what": "sends all twice", "check": "wire bytes"})
    return records | {0: [start, *records[0][1:]]}


UNIT = "epsilons of bfloat16"
MISSED = "weights of its own; not caught: the replicas check"
UNCHECKED = without(Check, good_run())
# Lines that a log has, with one blank where there are more.
CASES: dict[str, tuple[Ranks, list[str]]] = {
    "what failed, in tables and by name": (
        with_measured(with_check(good_run(), "gradients", 3.1e-2), "naive", "wire bytes", 12e6, 2),
        [
            "\nnaive 3.1e-02 5.6e-17 0 FAILED\nbucketed 3.1e-02 5.6e-17 0 FAILED\nddp 3.1e-02 5.6e-17 0 FAILED\n",
            "\nnaive 81.7 1.62 9.60 9.60 9.70 FAILED\n",
            "\nFAILED bucketed gradients: differs by 3.1e-02, but only 1e-12 is allowed\n",
            "\nFAILED naive wire bytes: predicted 9.60 MB ± 150 kB, rank 2 measured 12.0 MB\n",
            "\nFAIL 4 of 16 checks failed: naive gradients, ",
        ],
    ),
    "bytes that stay and should not": (
        with_measured(good_run(), "bucketed", "rest bytes", 19.2e6, 3),
        [
            "\nFAILED bucketed rest bytes: predicted 12.8 MB ± 128 kB, rank 3 measured 19.2 MB\n",
            " 13.1 / 21.6 passed\n", " 13.1 / 24.6 FAILED\n", " 13.1 / 27.6 informational\n",
        ],
    ),
    "a comparison of the mode's own": (
        plus(good_run(), Comparison("1f1b", "bubble", "", 0.273, 0.308, 0.0, decides=False, shown="a time")),
        ["\ncompared 1f1b bubble predicted 0.273 measured 0.308 informational\n"],
    ),
    "where time went": (
        pipeline_run(2, 2, ("1f1b",)),
        [
            "\nprofile ms per step (per cent) on the slowest data forward backward communication optimizer waiting"
            "\n1f1b rank 0 - 20.0 (17) 40.0 (34) 4.00 (3) 2.00 (2) 50.0 (43)\n"
        ],
    ),
    # The claim of the rank that is farthest off is another's.
    "of ranks that send unlike the most": (
        plus(good_run(), Comparison("bucketed", "called bytes", "B", 11.5e6, 11.5e6, 0.0, "2(N-1)/N·S"), rank=3),
        ["\nbucketed 50.5 1.00 11.5 9.60 9.61 passed\n"],
    ),
    "bytes that nobody counted": (without(Wire, good_run()), ["\nnaive 81.7 1.62 9.60 9.60 - passed\n"]),
    "no checks": (UNCHECKED, ["\nproof not proven: no check was made\n", "\nPASS not proven · "]),
    "a mistake that a comparison sees": (
        twice(),
        [
            " · LAB_BUG=twice: sends all twice; caught by naive wire bytes, as expected: predicted 9.60 MB ± 150 kB,"
            " rank 2 measured 12.0 MB\n"
        ],
    ),
    "a mistake that nothing detects": (
        plus(mistaken(good_run()), Check("naive", "replicas", 0.0, 0.0)),
        [f"{MISSED} passed: nothing in this run detects it\n"],
    ),
    "a mistake that nothing could detect": (
        mistaken(good_run()), [f"{MISSED} did not run: nothing in this run could detect it\n"],
    ),
    "timed steps": (
        plus(good_run(), Check("ring", "timed losses", 2e-7, 1e-5), Check("ring", "timed steps", 0.0, 0.0)),
        ["\ntimed difference / tolerance timed losses timed steps\nring 2.0e-07 / 1.0e-05 0 passed\n"],
    ),
    "timed steps without a proof": (
        plus(good_run(), Check("ring", "timed steps", 0.0, 0.0)),
        ["\ntimed not compared with the reference: LAB_PROOF=0"],
    ),
    "a difference with a unit": (
        plus(good_run(), Check("bf16", "gradients", 2.5, 8.0, unit=UNIT)),
        [
            "\nproof float64, against the reference gradients weights losses (tolerance 1e-12)\n",
            f" passed (tolerance 8 {UNIT})\n",
        ],
    ),
    "a row with a tolerance of its own": (
        plus(
            UNCHECKED, Check("theirs", "gradients", 0.0, 1e-11), Check("theirs", "weights", 0.0, 2e-11),
            Check("other", "gradients", 0.0, 1e-9),
        ),
        [" losses (tolerance 1e-11 to 2e-11)\ntheirs 0 0 - passed\nother 0 - - passed (tolerance 1e-09 in float64)\n"],
    ),
    "a unit in the first row": (
        plus(UNCHECKED, Check("bf16", "gradients", 2.5, 8.0, unit=UNIT), Check("fp32", "gradients", 0.0, 1e-12)),
        [
            f"\nproof against the reference gradients weights losses\nbf16 2.5e+00 - - passed (tolerance 8 {UNIT})"
            "\nfp32 0 - - passed (tolerance 1e-12 in float64)\n"
        ],
    ),
    "bytes that headers outweigh": (
        plus(good_run(), Comparison("line", "wire bytes", "B", 12.0, 592.0, 1024.0), Wire("line", 1, 592, 0)),
        [" passed, ± 1.02 kB\n"],
    ),
    "a planned fault": (drilled_run(), ["\nfault pause rank 1 for 2 s at step 30"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_log_has_these_lines(name: str) -> None:
    records, expected = CASES[name]
    both = [*lines(records), "", *sentences(records), ""]  # rows of tables, and sentences that were wrapped
    printed = "\n".join(" ".join(line.split()) for line in both)
    assert [part for part in expected if part not in printed] == []


def test_failed_checks_come_before_those_that_passed() -> None:
    printed = sentences(plus(good_run(), Check("ring", "loss replicated", 1.0, 0.0, "rank 1 had 3, not 2")))
    failed = next(number for number, line in enumerate(printed) if "loss replicated" in line)
    assert printed[failed].endswith("(rank 1 had 3, not 2)")
    assert failed < next(number for number, line in enumerate(printed) if "shards disjoint" in line)


def test_a_pipeline_has_its_profile_and_its_schedule_as_a_chart() -> None:
    printed = lines(pipeline_run(2, 2, ("1f1b",)))
    profile = next(number for number, line in enumerate(printed) if line.startswith("profile"))
    assert printed[profile : profile + 2] == [
        (
            "profile    ms per step (per cent) on   the slowest   data     forward    backward   communication  "
            " optimizer     waiting"
        ),
        (
            "           1f1b                        rank 0           -   20.0 (17)   40.0 (34)        4.00 (3)    2.00"
            " (2)   50.0 (43)"
        ),
    ]
    assert printed[-7:-3] == [
        "timeline   1f1b: bubble 0.37 measured, 0.33 by (p-1)/(m+p-1)",
        "           rank 0 |00000001111111..............aaaaaaaaaaaaaa.......bbbbbbbbbbbbbb+|",
        "           rank 1 |.......0000000aaaaaaaaaaaaaa1111111bbbbbbbbbbbbbb+..............|",
        f"           {LEGEND}",
    ]


def test_a_lost_rank_is_in_the_last_line_and_errors_are_printed_once() -> None:
    records = {
        rank: [*of_rank, Failed(3, "rank 2 is gone")] for rank, of_rank in without(End, good_run()).items() if rank != 2
    }
    printed = sentences(plus(records, Lost(2, 17, "silent for 2.5 s")), report=None)
    assert "error      ranks 0, 1 and 3 ended with code 3: rank 2 is gone" in printed
    before = "they ended before they wrote any; this verdict has none of their measurements and checks"
    assert f"unseen     no records of rank 2: {before}" in printed
    assert printed[-3:] == ["LOST       rank 2 lost at step 17: silent for 2.5 s", "report     none was written", RERUN]


def test_more_ranks_than_one_machine_starts_are_repeated_by_their_engine() -> None:
    last = lines(good_run(9))[-1]
    assert last.endswith("python -m workers, as each rank of an engine") and "docker" not in last


@pytest.mark.parametrize(
    ("mode", "started_by", "command"),
    [
        ("dp", "./run", "RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 ./run"),
        ("dp", "torchrun --nproc-per-node 4 -m workers", "LAB_SEED=1 torchrun --nproc-per-node 4 -m workers"),
        ("check", "./run", "./run check train.py --epochs 2"),
        ("check", "make run", "distlab check train.py --epochs 2"),
    ],
)
def test_a_run_is_repeated_in_the_way_that_it_was_started(mode: str, started_by: str, command: str) -> None:
    records = good_run()
    start = replace(records[0][0], run_mode=mode, started_by=started_by, title="train.py --epochs 2")
    assert repeat_command({**records, 0: [start, *records[0][1:]]}).endswith(command)


MADE = "bug        LAB_BUG=no_broadcast: every rank begins from weights of its own; the check that catches it: replicas"


def test_an_injected_bug_is_in_the_first_line_and_explained_in_the_last() -> None:
    records = plus(mistaken(good_run()), Check("naive", "replicas", 0.5, 0.0), Check("ddp", "replicas", 0.25, 0.0))
    printed = sentences(records)
    assert printed[0] == MADE
    assert printed[-3] == (
        "FAIL       2 of 18 checks failed: naive replicas, ddp replicas · LAB_BUG=no_broadcast: every rank begins from"
        " weights of its own; caught by naive replicas, as expected: differs by 5.0e-01, but only 0 is allowed"
    )
    assert sum("every rank begins" in line for line in printed) == 2
    assert sum("caught by" in line for line in printed) == 1


def test_sentences_of_a_log_are_no_wider_than_a_terminal() -> None:
    records = plus(mistaken(good_run()), Check("naive", "replicas", 0.5, 0.0), Failed(3, "much is wrong " * 20))
    words = ("skipped", "bug", "FAILED", "error")
    printed = [
        line for line in lines(records) if line.startswith(words) or (line[:11].isspace() and "   " not in line[11:])
    ]
    assert {line.split()[0] for line in printed} >= {"skipped", "bug", "FAILED", "error"}
    assert max(map(len, printed)) <= 80 - len("worker0-1  | ")


def printed_rows(records: Ranks, *names: str) -> set[str]:
    """The rows of these sections, as they were printed from the records until then."""
    return {words_of_row(row) for name in names for row in SECTIONS[name](judge(records), records, ())}


def test_quiet_is_the_verdict_alone_and_what_failed() -> None:
    run = judge(good_run())
    assert end_lines(run, good_run(), REPORT, "quiet") == LAST
    assert end_lines(run, good_run(), REPORT, "full") == lines(good_run())
    failed = with_check(good_run(), "weights", 3.1e-2)
    printed = unwrapped(end_lines(judge(failed), failed, REPORT, "quiet"))
    assert [line.split()[0] for line in printed] == [*["FAILED"] * 3, "FAIL", "report", "rerun"]


def test_rows_printed_during_the_run_are_not_printed_again() -> None:
    until_then = without(End, good_run())
    rows = printed_rows(until_then, "skipped", "proof", "timed", "measured", "memory")
    left = verdict_lines(judge(good_run()), good_run(), REPORT, rows)
    assert [line.split()[0] for line in left] == ["checks", "PASS", "report", "rerun"]
    assert rows >= {words_of_row(line) for line in lines(good_run())[:13]}


def test_later_rows_are_printed_under_their_heading() -> None:
    rows = printed_rows(good_run(), "skipped", "proof")
    later = plus(good_run(), Check("means", "losses", 1e-3, 1e-12))
    left = verdict_lines(judge(later), later, REPORT, rows)
    assert [line.split()[0] for line in left[:3]] == ["proof", "means", "measured"]
    assert rows_not_yet_printed([], rows) == []


def test_a_heading_whose_only_row_was_printed_is_left_out() -> None:
    block = ["skipped    a: no", "skipped    b: no", "checks     c   0", "           d   0"]
    assert rows_not_yet_printed(block, {"skipped a: no"}) == block[1:]
    assert rows_not_yet_printed(block, {words_of_row(row) for row in block[:3]}) == block[2:]
    assert rows_not_yet_printed(block, {words_of_row(row) for row in block}) == []


def of_mode(run_mode: str) -> Ranks:
    """The same run, of a script or of one's own model."""
    records = good_run()
    return records | {0: [replace(first(records), run_mode=run_mode), *records[0][1:]]}


@pytest.mark.parametrize(
    ("run_mode", "level", "words"),
    [
        ("dp", "normal", {"variant", "PASS", "report", "rerun"}), ("check", "normal", {"proof", "checks", "PASS"}),
        ("prove", "normal", {"proof", "checks", "PASS"}), ("dp", "full", {"proof", "checks", "PASS"}),
        ("check", "quiet", {"PASS", "report", "rerun"}), ("dp", "quiet", {"PASS", "report", "rerun"}),
    ],
)  # fmt: skip
def test_a_log_depends_on_its_level_and_a_scripts_has_all(run_mode: str, level: Level, words: set[str]) -> None:
    records = of_mode(run_mode)
    printed = {line.split()[0] for line in end_lines(judge(records), records, REPORT, level)}
    assert words <= printed
    assert ("measured" in printed) == ("proof" in printed)
    assert printed == words or level != "quiet"


@pytest.mark.parametrize("level", ["quiet", "normal", "full"])
def test_other_events_are_printed_at_every_level(level: Level) -> None:
    records = plus(with_check(good_run(), "weights", 3.1e-2), Failed(1, "ValueError: no"), rank=2)
    records = {rank: of_rank for rank, of_rank in records.items() if rank != 3}
    lost = [Lost(3, 17, "silent"), Lost(1, 18, "gone")]
    printed = end_lines(judge(plus(records, *lost)), plus(records, *lost), None, level)
    assert [line for line in printed if line.startswith(("error", "lost"))] == [
        "error      rank 2 ended with code 1: ValueError: no", "lost       rank 1 lost at step 18: gone",
        "lost       rank 3 lost at step 17: silent",
    ]  # fmt: skip
    assert sum(line.startswith("unseen     no records of rank 3") for line in printed) == 1
    assert sum(line.startswith("FAILED") for line in printed) == 3


def test_checks_without_findings_are_listed_by_name() -> None:
    checks = [
        Check("", "replicas agree", 0, 0, unit="findings"), Check("", "calls match", 0, 0, UNTIL_ENDED, unit="findings"),
        Check("", "a device a rank", 1, 0, "two share", unit="findings"), Check("ring", "timed steps", 0.0, 0.0),
        Check("", "sum", 0.0, 0.5),
    ]  # fmt: skip
    assert more_checks(judge(plus(without(Check, good_run()), *checks))) == [
        "checks     sum   0   tolerance 0.5   passed", "checks     passed: replicas agree",
        "checks     passed until the run was ended: calls match",
    ]  # fmt: skip


def test_comparisons_that_a_table_has_are_left_out_of_variants_that_are_timed() -> None:
    more = [
        Comparison(variant, name, "calls", 3.0, measured, 1.0)
        for variant, name, measured in (
            ("naive", "drawn bytes", 3.0),
            ("idle", "drawn bytes", 3.0),
            ("naive", "calls", 3.0),
            ("naive", "odd", 9.0),
        )
    ]
    assert compared(judge(plus(without(Comparison, good_run()), *more))) == [
        "compared   idle drawn bytes   predicted 3 calls   measured 3 calls   passed",
        "           naive calls        predicted 3 calls   measured 3 calls   passed",
    ]
