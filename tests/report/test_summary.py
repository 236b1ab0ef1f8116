"""The end of rank 0's log: a row a variant within 80 columns of a terminal, then what failed, then where to read on."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.report.log import end_lines
from distlab.report.records import (
    Check,
    Classes,
    Comparison,
    Failed,
    Load,
    Lost,
    Memory,
    Ranks,
    Record,
    Skipped,
    Start,
    Steps,
    Wire,
)
from distlab.report.summary import WIDTH, lost_lines, shortened, table_lines
from distlab.report.verdict import judge
from tests.report.made_up import bent, good_run, mistaken, plus, with_check, with_measured, without

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


def test_the_end_of_a_run_says_what_a_person_wants_to_know() -> None:
    assert end(without(Skipped, good_run())) == EXPECTED


def loaded(records: Ranks, cores: int, runnable: int | None, machine: str = "one") -> Ranks:
    """The same run on a machine of so many cores with so many threads that run, the ranks themselves among them."""
    for rank, moment in [(rank, moment) for rank in records for moment in ("start", "end")]:
        records = plus(records, Load(moment, machine, cores, "Example 9000", 3.5, runnable, 0.5, 100.0), rank=rank)
    return records


@pytest.mark.parametrize(
    ("cores", "runnable", "said"),
    [
        (2, 33, "4 ranks on 2 cores, 30 other runnable: compare bytes, not times"),
        (16, 3, "4 ranks on 16 cores, 0 other runnable: each rank had a core for itself"),
        (16, 18, "4 ranks on 16 cores, 15 other runnable: compare bytes, not times"),
        (2, None, "4 ranks on 2 cores, unknown other runnable: compare bytes, not times"),
    ],
)
def test_one_line_says_how_far_times_can_be_trusted(cores: int, runnable: int | None, said: str) -> None:
    records = loaded(good_run(), cores, runnable)
    assert [line for line in end(records) if line.startswith("times")] == [f"times      {said}"]
    machine = judge(records)["machines"]
    assert [(each["cores"], each["processor"], each["ranks"]) for each in machine] == [
        (cores, "Example 9000", [0, 1, 2, 3])
    ]
    assert machine[0]["end"] == {"load_average": 3.5, "runnable": runnable, "cpu_pressure": 0.5, "at": 100.0}


def test_nothing_is_said_of_times_that_were_not_taken_or_of_a_machine_that_is_not_known() -> None:
    assert not [line for line in end(good_run()) if line.startswith("times")]
    assert judge(good_run())["machines"] == []
    assert not [line for line in end(without(Steps, loaded(good_run(), 2, 9))) if line.startswith("times")]


@pytest.mark.parametrize("names", [{"ddp": LONG}, {"naive": LONG}, {"naive": LONG, "ddp": "torch_interleaved_zb"}])
def test_a_long_name_breaks_no_line(names: dict[str, str]) -> None:
    said = table_lines(judge(renamed(good_run(), names)), renamed(good_run(), names))
    assert len(said) == 5 and max(map(len, said)) <= WIDTH == 80 - len("worker0-1  | ")
    assert all(line.endswith(("passed", "shown")) for line in said[2:])


@pytest.mark.parametrize(("most", "short"), [(20, "wave"), (4, "wave"), (3, "w.."), (2, ".."), (1, ".")])
def test_a_name_loses_its_middle(most: int, short: str) -> None:
    assert shortened("wave", most) == short
    assert shortened("mine/wave.py:wave", 9) == "mine..ave"


def test_no_column_is_empty_and_a_value_that_is_not_there_is_an_empty_cell() -> None:
    unproven = without(Check, good_run())
    assert "exact" not in "\n".join(end(unproven)[:2])
    alone = bent(good_run(), lambda record: None if is_of(record, "naive", Wire, Classes, Memory) else record)
    row = next(line for line in end(alone) if line.startswith("naive")).split()
    assert len(row) < len(next(line for line in end(alone) if line.startswith("bucketed")).split())
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


def test_one_rank_is_told_that_there_is_nothing_to_communicate() -> None:
    said = end(alone := {0: [replace(good_run()[0][0], world_size=1), *good_run()[0][1:]]})
    assert "alone      WORLD_SIZE=1: there is nothing to communicate" in said
    assert not any("sent" in line for line in said[:3])
    assert any(line.startswith("alone") for line in end_lines(judge(alone), alone, REPORT, "full"))
    assert not any(line.startswith("alone") for line in end(good_run()))


def test_a_cluster_that_broke_says_where_to_read_on() -> None:
    records = plus(good_run(), Lost(1, 5, "no heartbeat"))
    said = lost_lines(judge(records), records, None, REPORT.parent)
    assert said[0] == f"read       the last lines of rank1.log in {REPORT.parent}"
    assert [line.split()[0] for line in said] == ["read", "rerun"]


def test_what_failed_is_a_sentence_and_where_to_read_on() -> None:
    said = end(with_measured(good_run(), "naive", "wire bytes", 12e6, rank=2))
    assert next(line for line in said if line.startswith("naive")).endswith("FAILED")
    assert "FAILED     naive wire bytes: predicted 9.60 MB ± 150 kB, rank 2 measured 12.0 MB" in said
    assert "read       experiments/dp/; LAB_VARIANT=naive runs it alone" in said
    many = end(with_check(good_run(), "weights", 3.1e-2))
    assert sum(line.startswith("FAILED") for line in many) == 3
    assert not any(line.startswith("read") for line in end(mistaken(with_check(good_run(), "weights", 3.1e-2))))


def test_a_rank_that_an_error_ended_has_its_log_named() -> None:
    said = end(plus(good_run(), Failed(1, "ValueError: no"), rank=2))
    assert "error      rank 2 ended with code 1: ValueError: no" in said
    assert f"read       rank2.log in {REPORT.parent}" in said


def test_variants_that_were_left_out_take_two_lines_at_most() -> None:
    records = without(Skipped, good_run())
    for name in ("zbv", "interleaved"):
        records = plus(records, Skipped(name, "too few layers"))
    assert [line for line in end(records) if line.startswith("skipped")] == [
        "skipped    zbv: too few layers", "skipped    interleaved: too few layers",
    ]  # fmt: skip
    (line,) = [line for line in end(plus(records, Skipped("dualpipev", "no"))) if line.startswith("skipped")]
    assert line.startswith("skipped    3 variants") and line.endswith("zbv, interleaved, dualpipev")


def test_five_variants_are_told_in_twelve_lines() -> None:
    assert len(end(without(Skipped, good_run(variants=dict.fromkeys(("a", "b", "c", "d", "ddp"), 0.05))))) <= 12


EXPECTED = """\
                    ms a           MB sent    a step  peak
variant   exact to  step  x ddp  predicted  measured    MB
naive      5.6e-17  81.7   1.62       9.60      9.70  20.6  passed
bucketed   5.6e-17  50.5   1.00       9.60      9.61  23.6  passed
ddp        5.6e-17  50.5   1.00       9.60      9.61  26.6  passed
PASS       16 checks passed
report     runs/dp-20261120-171500/report.html
rerun      RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 docker compose up
""".splitlines()
