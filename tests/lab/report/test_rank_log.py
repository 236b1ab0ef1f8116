"""A rank's log, whole, of runs that never were: no two shapes, peers, bytes or times in them are equal.

tests/experiments/test_rank_logs.py has the logs of real runs.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.lab.report.rank_log import WIDTH, RankLog
from distlab.lab.report.records import (
    CallSample,
    Check,
    Classes,
    Comparison,
    End,
    Expected,
    FirstStep,
    Given,
    Holds,
    Losses,
    Noted,
    Placed,
    Record,
    Start,
    Steps,
    Told,
    WeightSample,
    Wire,
)  # fmt: skip
from distlab.lab.report.story import Story, digits_for, number
from distlab.lab.report.table import WIDTH as TERMINAL
from distlab.lab.report.table import with_units, wrapped

pytestmark = pytest.mark.timeout(60)
CONFIG = {"LAB_MODEL": "gpt", "LAB_DEPTH": 2, "LAB_OPTIMIZER": "sgd"}
START = Start(
    1, "dp-1", "dp", 3, "worker1", CONFIG, {}, {}, idea="Data: each a part.", stories={"flat": "sum at the end"}
)
PLACED = Placed("10.0.0.1", "cpu", {"dp": [1, 3]}, {})
EXPECTED = Expected([["flat", "timed steps", 1, False], ["ddp", "timed steps", 1, False]])
UP = "layers.1.mlp.up.weight"
# [operation, ranks, bytes sent, bytes of its tensors, tag, start, end, what, seconds waited, for whom]
REDUCE = ["all_reduce", [0, 1, 2], 800.0, 600.0, 0, 0.004, 0.0062, UP, 0.0013, 2]
SEND, RECV = (
    [op, ranks, nbytes, 500.0, 7, start_s, end_s, "", 0.0, -1]
    for op, ranks, nbytes, start_s, end_s in (
        ("send", [1, 2], 500.0, 0.001, 0.002),
        ("recv", [0, 1], 0.0, 0.001, 0.003),
    )
)
SPANS = [["forward", "0", 0.0, 0.0031], ["backward", "0", 0.0031, 0.0155], ["optimizer", "", 0.0193, 0.0217]]
FIRST = FirstStep("flat", 0, {}, SPANS, [REDUCE])
SUM = CallSample(
    "all_reduce", [0, 1, 2], [0], "", [UP, "layers.2.mlp.up.weight"], [150], "2.mlp", True, False, [0.005, 0.0062],
    UP, [0.25, 0.5, 0.75], [1.0, 2.0, 3.5], [(0, 0.5), (1, 0.25), (2, 0.25)], 0.004,
)  # fmt: skip
WEIGHT = WeightSample(UP, [5, 3], [0.1, 0.2, 0.3], [1.0, 2.0, 3.5], [0.05, 0.1, 0.125], 0.05)
LOGGED = Told("flat", 0, [SUM], WEIGHT, [1.25, 1.5, 1.75])
ENDS: list[Record] = [
    Wire("flat", 0, 4.0, 0.0), Wire("flat", 2, 826.0, 0.0), Wire("ddp", 2, 900.0, 0.0),
    Comparison("flat", "wire bytes", "B", 800.0, 830.0, 40.0, "2(N-1)/N x S"), Check("flat", "weights", 2e-3, 1e-12),
    Losses("flat", [4.5, 4.25]), Steps("flat", [0.02, 0.03, 0.04], []), Steps("ddp", [0.011], []),
    Classes("flat", {"parameters": 1200}, {"parameters": 1200, "activations": 300}),
]  # fmt: skip
LOG = """\
rank 1 of 3 · dp · each a part
I hold     60 B: 1 tensor of block 1, each whole
           my layers.1.mlp.up.weight [5, 3] begins                 +0.100000 +0.200000 +0.300000
I get      5 of 16 samples: 3 1 4 1 and 1 more
STEP 0 of `flat`: sum at the end
    3.1    my part of the loss is 1.500000; with ranks 0 and 2 it is 4.500000; now backward
    4.0    all_reduce of block 1 to block 2 (2 tensors), 600 B, begins: I go on
             my gradient of layers.1.mlp.up.weight                 +0.250000 +0.500000 +0.750000
    6.2      the sum of 3 ranks; I waited 1.30 ms for rank 2       +1.000000 +2.000000 +3.500000
             rank 0 +0.500000, me +0.250000, rank 2 +0.250000: +1.000000
   21.7    weight - 0.05 x gradient gives                          +0.050000 +0.100000 +0.125000
word       noted after the step
I sent     826 B to rank 2 per step; predicted 800 B = 2(N-1)/N x S
losses     4.500 4.250 · 30.0 ms per step · memory 1.20 kB, peak 1.50 kB
also       ddp 11.0 ms 900 B
FAILED     flat weights: differs by 2.0e-03
PASS       1 of 2 checks of mine passed · report runs/here/report.html"""


def logged(of: Sequence[Record], width: int = WIDTH) -> list[str]:
    log = RankLog(width=width)
    lines = [line for record in of for line in log.lines(record)]
    return [line.text for line in [*lines, *log.verdict("pass", Path("runs/here"))]]


def run(logged: Told = LOGGED, first: FirstStep = FIRST) -> list[Record]:
    inputs, holds = Given(0, [3, 1, 4, 1, 5], 16, [5]), Holds("flat", [[UP, [5, 3], [5, 3], [], 60]])
    noted, end = Noted("word", "noted after the step"), End(1, 0.0, None, 1.0, 0.0)
    return [START, EXPECTED, PLACED, inputs, first, logged, holds, noted, *ENDS, end]


def test_the_whole_log_of_a_rank() -> None:
    assert logged(run()) == LOG.splitlines()


def test_it_fits_into_a_terminal_and_loses_no_word() -> None:
    lines = logged(run(), TERMINAL)[:-1]
    assert max(map(len, lines)) <= TERMINAL
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(LOG.splitlines()[:-1]).split())


def test_a_wrong_sum_is_reported() -> None:
    off = replace(SUM, taken=[0.75, 2.0, 3.5])
    log = " ".join(" ".join(logged(run(replace(LOGGED, calls=[off])))).split())
    assert "me +0.250000, rank 2 +0.250000: +0.750000, but their sum is +1.000000" in log
    mean = replace(SUM, taken=[1 / 3, 2.0, 3.5])  # PyTorch's fully_shard averages
    assert any(line.endswith(": +0.333333, their mean") for line in logged(run(replace(LOGGED, calls=[mean]))))
    rounded = replace(SUM, taken=[1.001, 2.0, 3.5])  # of 16 bits
    assert any(line.endswith(": +1.001000, rounded") for line in logged(run(replace(LOGGED, calls=[rounded]))))


def test_the_largest_of_all_ranks_is_no_sum() -> None:
    largest = replace(SUM, taken=[0.5, 2.0, 3.5])
    assert any(line.endswith("rank 2 +0.250000: +0.500000") for line in logged(run(replace(LOGGED, calls=[largest]))))


def test_a_message_has_one_key_at_both_ends() -> None:
    def of(op: str, me: int, call: list[object]) -> list[tuple[str, str]]:
        sample = replace(
            SUM, op=op, ranks=[1, 2], parameters=[], shape=[4, 8], inside="", backward=False, of_ranks=[],
            given=[0.5, 0.25, 0.125] if op == "send" else [], taken=[] if op == "send" else [0.5, 0.25, 0.125],
        )  # fmt: skip
        first, logged = (
            replace(FIRST, calls=[call], spans=[]),
            replace(LOGGED, calls=[sample], weight=None, shares=[None] * 3),
        )
        return [(line.text, line.key) for line in Story(replace(START, rank=me), first, logged, WIDTH).lines(9)]

    (sent, key_there), (got, key_here) = *of("send", 1, SEND), *of("recv", 2, [RECV[0], [1, 2], *RECV[2:]])
    assert key_there == key_here != ""
    assert sent == "    4.0    to rank 2: [4, 8]                                       +0.500000 +0.250000 +0.125000"
    assert got == "    6.2    from rank 1: [4, 8]                                     +0.500000 +0.250000 +0.125000"


def test_a_message_is_of_the_pass_that_ended_nearest_to_it() -> None:
    spans = [["forward", "0", 0.001, 0.0039], ["forward", "1", 0.0041, 0.0046], ["backward", "0", 0.005, 0.006]]
    sample = replace(SUM, op="send", ranks=[1, 2], parameters=[], shape=[4, 8], inside="", backward=False, of_ranks=[])
    story = Story(START, replace(FIRST, calls=[SEND], spans=spans), replace(LOGGED, calls=[sample]), WIDTH)
    assert any("to rank 2, of forward 0: [4, 8]" in line.text for line in story.lines(9))


def test_calls_of_a_kind_are_printed_once_and_counted() -> None:
    samples = [
        replace(SUM, parameters=[], shape=[4, 8], inside=f"{layer}.mlp", backward=False, at_once=True, calls=[layer - 1],
                start_s=0.001 * layer, wait_s=[0.001 * layer, 0.001 * layer + 0.0005])
        for layer in (1, 2)
    ]  # fmt: skip
    first = replace(FIRST, calls=[REDUCE, REDUCE])
    lines = logged(run(replace(LOGGED, calls=samples), first))
    assert "    1.0    block 1, mlp: my [4, 8] begins                          +0.250000 +0.500000 +0.750000" in lines
    assert "           1 more all_reduce like it, 600 B, block 2, until 2 ms" in lines


def test_a_long_step_loses_its_small_calls_first() -> None:
    many = [
        replace(SUM, op="all_reduce" if kind == 5 else "broadcast", parameters=[], shape=[4] * (kind + 1),
                inside=f"1.part{kind}", of_ranks=SUM.of_ranks if kind == 5 else [], calls=[kind])
        for kind in range(6)
    ]  # fmt: skip
    calls = [[many[kind].op, *REDUCE[1:3], 100.0 * (kind + 1), *REDUCE[4:]] for kind in range(6)]
    story = Story(START, replace(FIRST, calls=calls), replace(LOGGED, calls=many), WIDTH)
    long, short = ([line.text for line in story.lines(room)] for room in (99, 6))
    assert len(long) > 12 >= 6 >= len(short)
    assert any("the sum of 3 ranks" in line for line in short)
    assert any(" more call" in line for line in short)


@pytest.mark.parametrize(
    ("values", "text"),
    [([1.0, -2.0], "+1"), ([0.5, 1.0], "+0.500000"), ([5e-4, 1e-5], "+5.00e-04"), ([0.0, 0.0], "+0.00e+00")],
)
def test_digits(values: list[float], text: str) -> None:
    assert number(values[0], digits_for(values)) == text


def test_an_injected_bug_is_in_every_log_with_the_failed_checks() -> None:
    start = replace(START, mistake={"name": "lost", "what": "a rank's part is left out", "check": "weights"})
    lines = logged([start, *run()[1:]])
    assert not any(line.startswith("bug") for line in logged([replace(start, rank=0), *run()[1:]]))
    assert lines[1] == "bug        LAB_BUG=lost: a rank's part is left out"
    assert "FAILED     flat weights: differs by 2.0e-03" in lines


def test_no_line_ends_between_a_number_and_its_unit() -> None:
    lines = wrapped("word", with_units("a call of 262 kB for rank 2 in 10.2 ms: +0.25 -> -0.5"), 20)
    text = "\n".join(lines)
    assert all(each in text for each in ("262 kB", "rank 2", "10.2 ms", "+0.25 -> -0.5"))


def test_a_modes_notes_are_printed_even_if_no_step_is_left() -> None:
    lines = logged([START, EXPECTED, PLACED, Noted("units", "one was whole"), End(1, 0.0, None, 1.0, 0.0)])
    assert "units      one was whole" in lines
