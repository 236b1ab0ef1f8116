"""Each line of a rank's own log, whole, of a run that never was: no two shapes, peers, bytes or times in it are equal.

tests/experiments/test_rank_logs.py has the logs of real runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from distlab.lab.report.rank_log import WIDTH, Log, RankLog, fitted, verdict_of_all
from distlab.lab.report.records import (
    Check,
    Classes,
    Comparison,
    End,
    Expected,
    FirstStep,
    Given,
    Holds,
    Messages,
    Noted,
    Placed,
    Reached,
    Record,
    Skipped,
    Start,
    Wire,
)

pytestmark = pytest.mark.timeout(60)
START = Start(1, "dp-1", "dp", 3, "worker1", {"LAB_BACKEND": "gloo"}, {}, {}, "mlp, 12 parameters", by_torch=["ddp"])


def timed(*variants: str) -> Expected:
    return Expected([["drawn", "losses", 1, False], *([variant, "timed steps", 1, False] for variant in variants)])


THREE = timed("flat", "ring", "ddp")
SIX = timed(*"abcde", "ddp")
NINE = timed(*"abcdefgh", "ddp")
NAME, WORD = "x" * 70, "y" * 88  # so long that what follows or comes before is on another line

# [name, shape here, shape of the whole, first and last index along the axis that is cut, bytes]
UP = [["layers.0.up", [5, 3], [5, 3], [], 60], ["layers.1.up", [5, 3], [5, 3], [], 60]]
ROWS, COLUMNS = ["head.bias", [2], [7], [[3, 4]], 8], ["head.down", [4, 3], [4, 9], [[6, 8]], 48]
AXIS, BOXES = ["conv", [2, 3, 4], [2, 3, 8], [[4, 7]], 96], ["1.norm", [6], [19], [[1, 2], [5, 8]], 24]
FAR = [[f"{layer}.gate", [4], [4], [], 16] for layer in (0, 2, 5)]
EXPERTS = [[f"layers.{layer}.experts.{expert}", [], [], [], 4] for layer, expert in ((0, 1), (0, 2), (1, 1))]
BLOCKED = Holds("flat", [["layers.0.up", [5, 3], [5, 3], [], 60], [NAME, [4, 3], [4, 9], [[6, 8]], 99]])

# [operation, ranks, bytes sent, bytes of its tensors, tag, start, end, what, seconds waited, for whom]
REDUCED = [
    ["all_reduce", [0, 1, 2], 800.0, 600.0, None, 0.004, 0.0062, "layers.0.up", 0.0013, 2],
    ["all_reduce", [0, 1, 2], 400.0, 300.0, None, 0.005, 0.0082, "head.bias", 0.0011, 2],
]
SENT = ["send", [1, 2], 44.0, 40.0, 7, 0.009, 0.0099, "[5, 3] in forward", 0.0, -1]
RECEIVED = ["recv", [0, 1], 0.0, 36.0, 8, 0.0107, 0.0151, "", 0.0021, 0]
ANYONE = ["recv", [-1, 1], 0.0, 36.0, 8, 0.0107, 0.0151, "", 0.0021, -1]
CALLS = [REDUCED[0], SENT, RECEIVED, REDUCED[1]]
SECONDS = {"forward": 0.0031, "backward": 0.0124, "communication": 0.0052, "optimizer": 0.0007, "waiting": 0.0009}
SPANS = [["forward", "", 0.0, 0.0031], ["optimizer", "", 0.0193, 0.0217], ["backward", "", 0.0031, 0.0155]]
STEP = FirstStep("flat", 2, SECONDS, SPANS, CALLS)
# In a chart of 40 columns a millisecond each; the send begins with the forward that it lies in, and is over before it.
PIPED = [
    ["forward", "0", 0.0, 0.010], ["send", "1", 0.010, 0.012], ["forward", "1", 0.010, 0.020],
    ["backward", "0", 0.025, 0.040],
]  # fmt: skip
CHART = "|0000000000--11111111.....aaaaaaaaaaaaaaa|"
HEAD = "22 ms: forward 3.10, backward 12, calls 6.10 (1.24 kB), waited 2.40 for rank 2"  # 2's are 1.3 + 1.1, 0's 2.1
ALIKE = "2 x all_reduce with ranks 0 and 2: 900 B, 4.20 ms, waited 2.40 for rank 2, layers.0.up"  # from 4 to 8.2 ms
EACH = [
    "             all_reduce with ranks 0 and 2: 600 B, 2.20 ms, waited 1.30 for rank 2, layers.0.up",
    "             sent to rank 2: 40 B, 0.900 ms, [5, 3] in forward",
    "             received from rank 0: 36 B, 4.40 ms, waited 2.10 for rank 0",
    "             all_reduce with ranks 0 and 2: 300 B, 3.20 ms, waited 1.10 for rank 2, head.bias",
]

WIRES = [
    Wire("flat", 0, 480.0, 9e9), Wire("flat", 2, 20_700.0, 9e9), Wire("ring", 0, 3100.0, 0.0),
    Wire("ring", 2, 3100.0, 0.0), Wire("ddp", 2, 10_000.0, 0.0), Wire("ddp", 0, 99.0, 0.0),
]  # fmt: skip
CLAIMS = [
    Comparison("flat", "wire bytes", "B", 21_000.0, 21_180.0, 200.0),
    Comparison("ring", "wire bytes", "B", 6200.0, 6320.0, 100.0),  # off by 120
    Comparison("ring", "called bytes", "B", 1.0, 2.0, 0.5, decides=False),
    Check("", "shards disjoint", 0.0, 0.0),
    Check("flat", "losses", 3e-12, 2e-12),
]
HELD = [
    Classes("flat", {"parameters": 1200, "gradients": 300, "optimizer": 0}, {"parameters": 1200, "activations": 2650}),
    Classes("ring", {"parameters": 1700}, {"parameters": 1700, "activations": 70}),
]
ENDS = [
    "sent       kB a step to ranks 0 / 2: flat 0.480 / 20.7 · to each of ranks 0 and 2: ring 3.10 · to",
    "           rank 2: ddp 10.0",
    "predicted  / measured kB on the wire: flat 21.0 / 21.2; ring 6.20 / 6.32",
    "waited     in the first steps for rank 0 4.20 ms, rank 2 2.40 ms",
    "memory     kB at rest / peak: flat 1.50 / 3.85; ring 1.70 / 1.77",
    "checks     FAILED on this rank: flat losses, ring wire bytes",
]
FULL_MEMORY = [
    "memory     flat parameters 1.20 kB, gradients 300 B at rest, peak 3.85 kB; ring parameters 1.70 kB",
    "           at rest, peak 1.77 kB",
]
RAN = (THREE, STEP, replace(STEP, variant="ring", calls=[RECEIVED]), *WIRES, *CLAIMS, *HELD)
REACHED = Reached(
    17, {"flat": 0.0213, "ring": 0.0347}, {"flat": 0.0041, "ring": None, "ddp": 0.009}, {"flat": 2.3456}, 1830.0
)
PACE = "a step 21.3 to 34.7 ms · in calls 4.10 to 9.00 ms · sent 1.83 kB since"
END = End(1, 0.0, None, 1.0, 0.0)


class Case(NamedTuple):
    """What a log says of a record, behind those `before` it and so many lines."""

    record: Record
    lines: Sequence[str]
    log: Log = "normal"
    before: Sequence[Record] = (THREE,)
    said: int = 0
    start: Start = START


def holds(*parameters: Any, variant: str = "flat") -> Holds:
    return Holds(variant, [list(each) for each in parameters])


def lost(losses: dict[str, float | None]) -> Reached:
    return replace(REACHED, losses=losses, called_seconds={}, step_seconds={"flat": 0.0213}, sent_bytes=None)


ALONE = replace(START, rank=0, world_size=1)
AT = "gloo · mlp, 12 parameters · worker1 (10.0.0.7) · cpu"
CASES = {
    "who it is": Case(
        Placed("10.0.0.7", "cpu", {"dp": [1, 3], "tp": [0, 1]}, {"previous": 0, "next": 2}),
        [f"rank 1 of 3 · dp · {AT}", "mesh       dp 1 of 3; previous: rank 0, next: rank 2"],
    ),
    "two axes": Case(
        Placed("10.0.0.7", "cpu", {"dp": [0, 2], "tp": [3, 5]}, {}),
        [f"rank 1 of 3 · dp · {AT}", "mesh       dp 0 of 2, tp 3 of 5"],
    ),
    "alone": Case(
        Placed("10.0.0.7", "cpu", {"dp": [0, 1]}, {}),
        [f"rank 0 of 1 · dp · {AT}", "mesh       one rank alone: there is nothing to communicate"],
        start=ALONE,
    ),
    "quiet": Case(Given(0, [1], 3, [1]), [], "quiet"),
    "few samples": Case(
        Given(4, [5, 17, 29], 8, [2, 1]), ["gets       step 4: 3 of 8 samples, in 2 microbatches of 2 + 1: 5 17 29"]
    ),
    "eight samples": Case(
        Given(0, [*range(10, 18)], 20, [8]), ["gets       step 0: 8 of 20 samples: 10 11 12 13 14 15 16 17"]
    ),
    "nine samples": Case(
        Given(0, [*range(10, 19)], 20, [9]), ["gets       step 0: 9 of 20 samples: 10 11 12 13 14 15 16 ... 18"]
    ),
    "nine samples in full": Case(
        Given(0, [*range(10, 19)], 20, [9]), ["gets       step 0: 9 of 20 samples: 10 11 12 13 14 15 16 17 18"], "full"
    ),
    "a note with room": Case(Noted("took", f"a {WORD}"), ["took       a", f"           {WORD}"], said=17),
    "a note without": Case(Noted("took", f"a {WORD}"), ["took       a ..."], said=18),
    "a note in full": Case(Noted("took", f"a {WORD}"), ["took       a", f"           {WORD}"], "full", said=18),
    "holds nothing": Case(holds(), ["holds      flat: no parameter"]),
    "holds": Case(
        holds(ROWS, *UP, BOXES), ["holds      flat: 152 B in 4 tensors (2 cut), largest layers.0-1.up [5x3]"]
    ),
    "holds a part": Case(holds(UP[0], AXIS), ["holds      flat: 156 B in 2 tensors (1 cut), largest conv axis 2: 4-7 of 8"]),
    "holds in full": Case(
        holds(ROWS, *UP, COLUMNS, AXIS, BOXES),
        [
            "holds      flat: 296 B in 6 tensors (4 cut): layers.0-1.up [5x3]; conv [2x3x4] axis 2: 4-7 of 8;",
            "           head.down [4x3] columns 6-8 of 9; 1.norm [6] rows 1-8 of 19; head.bias [2] rows 3-4 of 7",
        ],
        "full",
    ),
    "holds alike ones": Case(
        holds(*FAR, *EXPERTS),
        ["holds      flat: 60 B in 6 tensors: 0,2,5.gate [4]; layers.0.experts.1 and 2 alike [1]"],
        "full",
    ),
    "holds others": Case(
        holds(*UP, variant="ring"), ["           ring: 120 B in 2 tensors, largest layers.0-1.up [5x3]"],
        before=(THREE, holds(UP[0])),
    ),
    "holds the same in full": Case(
        holds(UP[0], variant="ring"), ["           ring: as flat"], "full", (THREE, holds(UP[0]))
    ),
    "holds the same": Case(holds(UP[0], variant="ring"), [], before=(THREE, holds(UP[0]))),
    "holds, with two lines to go": Case(
        BLOCKED, ["holds      flat: 159 B in 2 tensors (1 cut), largest", f"           {NAME} columns 6-8 of 9"], said=12
    ),
    "holds, with one line to go": Case(BLOCKED, ["holds      flat: 159 B in 2 tensors (1 cut), largest ..."], said=13),
    "holds, with no more to go": Case(BLOCKED, ["holds      flat: 159 B in 2 tensors (1 cut), largest ..."], said=14),
    "holds, without room": Case(BLOCKED, [], said=15),
    "first step": Case(STEP, [f"step 2     flat: {HEAD}", f"             {ALIKE}"]),
    "first step in full": Case(STEP, [f"step 2     flat: {HEAD}", *EACH], "full"),
    "first step behind another": Case(
        replace(STEP, variant="ring"), [f"           ring: {HEAD}", f"             {ALIKE}"], before=(THREE, STEP)
    ),
    "first step of PyTorch's own": Case(replace(STEP, variant="ddp"), [f"step 2     ddp: {HEAD}"]),
    "first step of five timed": Case(
        STEP, [f"step 2     flat: {HEAD}", f"             {ALIKE}"], before=(SIX, Skipped("a", "it is odd"))
    ),
    "first step of six": Case(STEP, [f"step 2     flat: {HEAD}"], before=(SIX,)),
    "first step of six with a long name": Case(
        replace(STEP, variant="a_name_as_long"),
        ["step 2     a_name_as_long: 22 ms: calls 6.10 (1.24 kB), waited 2.40 for rank 2"],
        before=(SIX,),
    ),
    "first step of three with a long name": Case(
        replace(STEP, variant="a_name_as_long"),
        [f"step 2     a_name_as_long: {HEAD.removesuffix(' rank 2')}", "           rank 2"],
    ),
    "first step of eight": Case(STEP, [f"           flat: {HEAD}"], before=(timed(*"abcdefg", "ddp"), STEP)),
    "first step of nine": Case(STEP, [f"step 2     flat: {HEAD}"], before=(NINE,)),
    "first step of nine, sent alike": Case(STEP, [], before=(NINE, replace(STEP, variant="ring"))),
    "first step of nine, more sent": Case(
        STEP, [f"           flat: {HEAD}"], before=(NINE, replace(STEP, calls=CALLS[1:]))
    ),
    "first step of nine, of PyTorch's own": Case(replace(STEP, variant="ddp"), [], before=(NINE,)),
    "first step of nine in full, of PyTorch's own": Case(
        replace(STEP, variant="ddp"), [f"step 2     ddp: {HEAD}", *EACH], "full", (NINE,)
    ),
    "first step of one call, whose wait is told already": Case(
        replace(STEP, calls=CALLS[:1]),
        [
            "step 2     flat: 22 ms: forward 3.10, backward 12, calls 6.10 (800 B), waited 1.30 for rank 2",
            "             all_reduce with ranks 0 and 2: 600 B, 2.20 ms, layers.0.up",
        ],
    ),
    "first step that waits in no call": Case(
        replace(STEP, seconds=dict.fromkeys(SECONDS, 0.0) | {"backward": 0.0124}, calls=[SENT]),
        ["step 2     flat: 22 ms: backward 12, sent 44 B", EACH[1]],
    ),
    "first step from whoever sends": Case(
        replace(STEP, calls=[ANYONE]),
        [
            "step 2     flat: 22 ms: forward 3.10, backward 12, calls 6.10 (0 B)",
            "             received from any rank: 36 B, 4.40 ms",
        ],
    ),
    "first step of a pipeline": Case(
        replace(STEP, spans=PIPED),
        [f"step 2     flat: {CHART} 40 ms, 1.24 kB, waited 2.40 for rank 2", f"             {ALIKE}"],
    ),
    "a drawn step": Case(
        Messages("own ring", [each[:7] for each in (SENT, RECEIVED)]),
        [
            "all_reduce own ring: sent to rank 2: 40 B, 0.900 ms",
            "                     received from rank 0: 36 B, 4.40 ms",
        ],
    ),
    "a drawn step of as many calls as lines": Case(
        Messages("own ring", [each[:7] for each in REDUCED]),
        [
            "all_reduce own ring: all_reduce with ranks 0 and 2: 600 B, 2.20 ms",
            "                     all_reduce with ranks 0 and 2: 300 B, 3.20 ms",
        ],
    ),
    "a drawn step of three groups": Case(
        Messages("own ring", [each[:7] for each in (RECEIVED, SENT, *REDUCED)]),
        [
            "           own ring: sent to rank 2: 40 B, 0.900 ms",
            "                     2 x all_reduce with ranks 0 and 2: 900 B, 4.20 ms",
        ],
        before=(THREE, Messages("gloo", [])),
    ),
    "a drawn step in full": Case(
        Messages("own ring", [each[:7] for each in (RECEIVED, SENT, REDUCED[0])]),
        [
            "all_reduce own ring: received from rank 0: 36 B, 4.40 ms",
            "                     sent to rank 2: 40 B, 0.900 ms",
            "                     all_reduce with ranks 0 and 2: 600 B, 2.20 ms",
        ],
        "full",
    ),
    "a drawn step that is timed": Case(Messages("ring", [SENT[:7]]), []),
    "pace": Case(REACHED, [f"step 17    loss 2.346 · {PACE}"]),
    "pace without calls": Case(lost({"flat": None}), ["step 17    loss not known here · a step 21.3 ms"]),
    "pace of three losses": Case(
        lost({"flat": 2.3456, "ring": 1.5, "zero": 2.3456, "ddp": None, "cp": 3.25}),
        ["step 17    loss flat, zero 2.346; ring 1.5; cp 3.25 · a step 21.3 ms"],
    ),
    "pace of four losses": Case(
        lost({"flat": 2.3456, "ring": 1.5, "ep": 3.25, "cp": 2.5}),
        ["step 17    loss 1.5 (ring) to 3.25 (ep) · a step 21.3 ms"],
    ),
    "the end": Case(END, ENDS, before=RAN, said=18),
    "the end without room": Case(
        END, [f"{ENDS[0]}...", *ENDS[2:]], before=RAN, said=19
    ),
    "the end in full": Case(
        END, [*ENDS[:4], *FULL_MEMORY, ENDS[-1]], "full", RAN, said=30
    ),
    "the end in full of rank 0": Case(
        END, ENDS[:4], "full", RAN, start=replace(START, rank=0)
    ),
    "the end of few and many bytes": Case(
        END,
        [
            "sent       kB a step to rank 2: flat 2.90; ring 3100",
            "predicted  / measured kB on the wire: flat 2.85 / 2.90; ring 3050 / 3100",
            "memory     MB at rest / peak: flat 0.001 / 0.004; ring 1.70 / 2.30",
            "checks     all passed on this rank",
        ],
        before=(
            THREE, Wire("flat", 2, 2900.0, 0.0), Wire("ring", 2, 3.1e6, 0.0),
            Comparison("flat", "wire bytes", "B", 2850.0, 2900.0, 50.0),
            Comparison("ring", "wire bytes", "B", 3.05e6, 3.1e6, 5e4),
            Classes("flat", {"parameters": 1200}, {"parameters": 3600}),
            Classes("ring", {"parameters": 1_700_000}, {"parameters": 2_300_000}),
        ),
    ),
    "the end of nine, without PyTorch's own": Case(
        END,
        [
            "sent       kB a step to rank 2: 2.90",
            "predicted  / measured B on the wire: 310 / 323",
            "checks     all passed on this rank",
        ],
        before=(
            NINE, Wire("a", 2, 2900.0, 0.0), Wire("a", 0, 0.0, 0.0), Wire("ddp", 0, 3700.0, 0.0),
            Comparison("a", "wire bytes", "B", 310.0, 323.0, 13.0),
            Comparison("ddp", "wire bytes", "B", 910.0, 923.0, 1.0, decides=False), Classes("ddp", {"parameters": 9}, {}),
        ),
    ),
    "the end of a rank that sent just headers' share": Case(
        END,
        ["sent       kB a step to ranks 0 / 2: 0.101 / 10.0", "checks     none was made on this rank"],
        before=(THREE, Wire("flat", 0, 101.0, 0.0), Wire("flat", 2, 10_000.0, 0.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whole_lines_of_a_record(case: Case) -> None:
    log = RankLog(case.log)
    log.before += [case.start, *case.before]
    log.said = case.said
    found = log.lines(case.record)
    assert found == case.lines
    assert log.said == case.said + len(found)
    assert log.before[-1] is case.record
    assert max(map(len, found), default=0) <= WIDTH


def test_the_verdict_of_a_rank_that_does_not_speak_for_all() -> None:
    assert verdict_of_all("pass", Path("/r")) == "PASS       of all ranks · report /r/report.html"
    assert verdict_of_all("pass", Path("/" + "r" * WIDTH)) == f"PASS       of all ranks · report /{'r' * 63}..."


def blocks() -> list[list[str]]:
    return [["sent 1", "sent 2", "sent 3"], ["waited"], ["memory 1", "m" * WIDTH]]


@pytest.mark.parametrize(
    ("of", "room", "lines"),
    [
        (blocks(), 6, ["sent 1", "sent 2", "sent 3", "waited", "memory 1", "m" * WIDTH]),
        (blocks(), 5, ["sent 1", "sent 2 ...", "waited", "memory 1", "m" * WIDTH]),
        (blocks(), 4, ["sent 1 ...", "waited", "memory 1", "m" * WIDTH]),  # of two that are as long, the first
        (blocks(), 0, ["sent 1 ...", "waited", "memory 1 ..."]),
        ([], 0, []),
        ([["m" * WIDTH, "n"]], 1, ["m" * (WIDTH - 3) + "..."]),
    ],
)
def test_the_longest_block_is_cut_first_and_one_line_of_each_stays(
    of: list[list[str]], room: int, lines: list[str]
) -> None:
    assert fitted(of, room) == lines
