"""The parts of the doctor that need no script: circles of waits, axes of a mesh, stacks, spans, facts of ranks."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.tools import check
from distlab.tools.check.judge.axes import groups_of
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.deadlock import Blocked, IdleWatch, hung
from distlab.tools.check.judge.exceptions import how_it_ended
from distlab.tools.check.judge.matching import Matching
from distlab.tools.check.judge.rank_state import DEVICES, HANG, CallPlace, Frame, RankState, Wait
from distlab.tools.check.judge.report import MOST, spans_of
from distlab.tools.check.judge.silent_faults import SilentFaults
from distlab.tools.check.start.script_process import parsed
from distlab.tools.check.watch.axes import Axes
from distlab.tools.check.watch.patches import before, in_place_of, leave_uncompiled
from distlab.tools.check.watch.recorder import Recorder, ending_of
from tests.tools.check.cases import called, doctor_of, lines_of

KINDS = sorted(name.removeprefix("_on_") for name in vars(RankState) if name.startswith("_on_"))
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 10**400, "\ud800", "é", 1e308])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
told_lines = (
    st.binary(max_size=80)
    | anything.map(lambda value: json.dumps(value).encode())
    | st.tuples(
        st.sampled_from([*KINDS, "said", "finding", "record", "refused", "module"]), st.lists(anything, max_size=6)
    ).map(lambda told: json.dumps([told[0], *told[1]]).encode())
    | st.sampled_from([b"[" * 100_000, b"9" * 5000])
)


@settings(max_examples=300)
@given(st.lists(told_lines, max_size=6))
def test_no_line_ends_the_doctor(lines: list[bytes]) -> None:
    """Of a script that has found the pipe, or a rank that is defective."""
    said: list[str] = []
    doctor = Coordinator(2, 3.0, 60.0, said.append)
    doctor.receive(1, lines, 0.0)
    doctor.evaluate(0.5)
    assert sum(doctor.malformed.values()) <= 2 * len(lines)


NO_WAIT = Wait(None, "store.wait('key')", CallPlace("train.py:1"), 0.0)


def standing(*needs: int, any_of: bool = False) -> Blocked:
    return Blocked(NO_WAIT, frozenset(needs), any_of)


@pytest.mark.parametrize(
    ("waits", "over", "stuck"),
    [
        ({0: standing(1), 1: standing(0)}, set(), {0, 1}),
        ({0: standing(1), 1: standing(2)}, set(), set()),  # rank 2 computes
        ({0: standing(1), 1: standing(2)}, {2}, {0, 1}),  # rank 2 has ended
        ({0: standing(1, 2), 1: standing(0)}, set(), {0, 1}),
        ({0: standing(1, 2, any_of=True)}, {1}, set()),  # rank 2 may still set the key
        ({0: standing(1, 2, any_of=True)}, {1, 2}, {0}),
        ({0: standing(1, 2, any_of=True), 1: standing(0), 2: standing(0)}, set(), {0, 1, 2}),
    ],
)
def test_who_waits_for_those_alone_that_never_come(waits: dict[int, Blocked], over: set[int], stuck: set[int]) -> None:
    assert set(hung(waits, over)) == stuck


def test_groups_of_an_axis_stand_in_the_order_of_the_mesh() -> None:
    assert groups_of("tp", ["dp", "tp"], [2, 3], list(range(6))) == [[0, 1, 2], [3, 4, 5]]
    assert groups_of("tp", ["tp", "dp"], [2, 3], list(range(6))) == [[0, 3], [1, 4], [2, 5]]
    assert groups_of("tp", ["dp"], [6], list(range(6))) == []
    assert groups_of("tp", ["dp", "tp"], [2, 2], list(range(6))) == []  # LAB_MESH of another WORLD_SIZE


def test_stacks_are_read_by_thread() -> None:
    text = 'Thread 0x1f (most recent call first):\n  File "a.py", line 3 in f\n  File "b.py", line 4 in g\n\n'
    text += 'Current thread 0x20 (most recent call first):\n  File "c d.py", line 5 in <module>\n'
    assert parsed(text) == {
        0x1F: [Frame("a.py", 3, "f"), Frame("b.py", 4, "g")],
        0x20: [Frame("c d.py", 5, "<module>")],
    }
    assert parsed("") == {}


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(7) == "called os._exit(7)"


HEAD = called("all_reduce", "train.py:4")[1:-1]
MADE = [["call", number, 1, 1, 1, number, 7, float(number)] for number in range(1, 4)]
ENDED = "all_reduce train.py:4, until the run was ended"


def test_spans_are_calls_to_their_ends_and_what_is_cut_is_counted() -> None:
    told = lines_of(*HEAD, *MADE, ["end", 1, 1.5], ["waited", 2, 7, 2.25])
    spans, more = spans_of(told)
    assert spans == [
        ("all_reduce", "all_reduce train.py:4", 1.0, 1.5),
        ("all_reduce", "all_reduce train.py:4", 2.0, 2.25),
        ("wait", ENDED, 3.0, 3.0),
    ]
    assert more == 0
    foreign = [b"no json", b"[]", b"7", *lines_of(["call", 9, 1, 0, 3, 9, 7, 1.0], ["end", [], 1.0], ["kind", [], 0])]
    assert spans_of([*told, *foreign]) == (spans, 0)
    many = ((["call", each, 1, 1, 1, each, 7, 1.0], ["end", each, 2.0]) for each in range(MOST + 5))
    spans, more = spans_of(lines_of(*HEAD, *chain.from_iterable(many)))
    assert (len(spans), more) == (MOST, 5)


def test_what_a_rank_hangs_in_is_drawn_to_the_right_edge() -> None:
    told = *HEAD, ["call", 1, 1, 1, 1, 1, 7, 2.0], ["enter", "store.wait", ["key"], 1, 9, 3.0]
    (stands, waits), _ = spans_of(lines_of(*told), 9.5)
    assert stands == ("wait", ENDED, 2.0, 9.5)
    assert waits == ("wait", "store.wait train.py:4, until the run was ended", 3.0, 9.5)
    late = ["waited", 1, 7, 9.75], ["leave", 9, 9.75], ["raised", "RuntimeError", "closed", "", "", 9.75]
    assert spans_of(lines_of(*told, *late), 9.5)[0] == [stands, waits]  # as the others were ended
    # Not of a script that had ended, whose handle nobody waited for, nor of what was left again.
    left = lines_of(*told, ["leave", 9, 4.0], ["ended", 0, 4.5])
    assert spans_of(left, 9.5) == ([("all_reduce", "all_reduce train.py:4", 2.0, 2.0)], 0)


@pytest.mark.parametrize(
    ("devices", "visible", "found"),
    [
        ([("one", "a"), ("one", "a"), ("two", "b")], 2, [(DEVICES, (0, 1))]),
        ([("one", "a"), ("one", "a")], 1, []),  # one GPU for all
        ([("one", "a"), ("two", "a")], 2, []),  # each sees its own
    ],
)
def test_two_ranks_on_one_gpu_of_a_host_are_found(
    devices: list[tuple[str, str]], visible: int, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    doctor = doctor_of(*([["device", 0, uuid, host, visible]] for uuid, host in devices))
    assert [(each.check, each.ranks) for each in doctor.silent_faults.at_end()] == found


def test_a_call_without_a_handle_ends_with_the_stream_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Work, "unbox", lambda _: None)  # NCCL's, of a call that nobody asked a handle of
    assert ending_of("allreduce_", ([], object())) is None, "without a GPU nothing tells"
    event = Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", event)
    ending: Any = ending_of("allreduce_", ([], object()))
    assert ending is event.return_value
    assert event.return_value.record.called


def test_unequal_numbers_of_batches_are_asked_about() -> None:
    at: list[Any] = ["place", 1, "train.py:8", "", "train.py"]
    alone: list[Any] = ["place", 2, "train.py:30", "", "train.py"]  # a pass that rank 0 alone makes
    first = [at, alone, ["pass", 0, 2, -1], ["pass", 7, 1, -1], ["batches", 7, 4]]
    (question,) = doctor_of(first, [at, ["pass", 7, 1, -1], ["batches", 7, 3]]).silent_faults.questions()
    assert "rank 0: 4, rank 1: 3" in question


CALLED = called("all_reduce", "train.py:4")
FOREIGN: list[list[Any]] = [
    ["batches", 0, [4]],
    ["batch", 0, 0, [4]],
    ["input", "DDP 0", 1, 0, [4], 1],
    ["sums", "weights", "DDP 0", 1, -1, ["no pair"], 1],
    ["sums", "gradients", "DDP 0", 1, 1, [["weight", "no number"]], 1],
    ["trace", "DDP 0", 1, 1, [4], 0, 0],
    ["options", "DDP 0", 1, 0, 1, [{"lr": 0.1}], 1],
    ["fault", "DDP 0", 1, "past", 1, [], 99, 1],
    ["averaged", "optimizer 0", 1, 1, 1],
    ["dropout", 0, [4], 5, 1],
    ["device", [0], "host"],
    ["mesh", ["tp"], [{}, 1]],
    ["copies", 1, "replicate", [0, 1], [["weight", "4", 1.0]]],
    ["copies", 1, "replicate", [0, 7], [["weight", 4, 1.0]]],
    ["declared", 0, "tp", [[0], 1], 4, 1.0, 1],
    ["given", 1, "shard", [0, 1], "4", 1],
    ["summands", 1, 1, [4], 1],
    ["drawn", 0, 1, 2, 3, 4, [2], 1],
    ["split", 0, [4, "1"], 5, 1],
    ["clipped", 0, 10**400, [0, 1], 1],
    ["unread", "all_reduce", 1, [4]],
    ["strided", 1, [4], ["3"], False],
    ["strided", 1, [4], [3, 1], True],
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda line: f"{line[0]} {str(line[1])[:8]}")
def test_a_foreign_fact_is_dropped_and_asked_nothing_of(foreign: list[Any]) -> None:
    """The script has the pipe too; what it writes there must not end the doctor when it looks at all facts."""
    said: list[str] = []
    doctor = Coordinator(2, 3.0, 60.0, said.append)
    for rank in range(2):
        doctor.receive(rank, lines_of(*CALLED, foreign, foreign), 0.0)
    doctor.evaluate(0.5)
    assert list(doctor.silent_faults.questions()) == []
    assert list(doctor.silent_faults.at_end()) == []
    assert doctor.malformed == {0: 2, 1: 2}
    assert len(said) == 2


def test_what_watch_tells_somebody_takes_and_nothing_is_taken_that_is_not_told() -> None:
    """But for what a doctor tells of a process, and a proof of itself."""
    sources = "".join(path.read_text() for path in Path(check.__file__).parent.glob("*/*.py"))
    told = re.findall(r"""send\(\s*"(\w+)"|write(?:_later)?\(\s*f?'\["(\w+)"|number\("(\w+)\"""", sources)
    kinds = {kind for each in told for kind in each if kind} | {"look", "stacks", "gone"}
    taken = {*KINDS, *SilentFaults(2)._handlers, "changed", "unrecorded", "refused"}
    assert kinds - taken == set()
    assert taken - kinds == {"counting", "wire"}


@pytest.mark.parametrize(("strides", "found"), [([1, 4], 1), ([1, 3], 0)])
def test_a_layout_without_gaps_is_wrong_where_ranks_differ(strides: list[int], found: int) -> None:
    doctor = doctor_of(*([*CALLED, ["strided", 1, [3, 4], each, False]] for each in (strides, [1, 3])))
    assert len(list(doctor.silent_faults.at_end())) == found


def test_ranks_that_all_stand_still_are_a_finding_and_one_that_computes_is_none() -> None:
    said: list[str] = []
    still, matching = IdleWatch(10.0, said.append), Matching(2)
    cases = [RankState(rank, 2, cpu_share=0.0, exit_code=0 if rank else None) for rank in range(2)]
    assert still.find_idle(cases, matching, 9.0) is None
    found = still.find_idle(cases, matching, 10.5)
    assert found is not None
    assert (found.check, found.ranks) == (HANG, (0,))
    cases[0].cpu_share = 0.9
    assert still.find_idle(cases, matching, 99.0) is None
    cases[0].cpu_share, cases[0].starved_share = 0.03, 0.9
    assert still.find_idle(cases, matching, 99.0) is None, "30 others have the cores"


def test_weights_that_cannot_be_read_do_not_end_a_script_that_gives_them_to_fsdp() -> None:
    reporter = Mock()
    axes = Axes(Recorder(reporter, Mock()))
    sums: list[list[Any]] = []
    axes._note_sums(sums, lambda: [("weight", Mock(is_meta=False, detach=Mock(side_effect=RuntimeError("no data"))))])
    assert sums == []
    reporter.send.assert_called_once_with("unrecorded", "_note_sums", "RuntimeError('no data')")


def test_torch_compile_traces_what_a_function_of_check_stands_for() -> None:
    said: list[torch.Tensor] = []
    twice = in_place_of(lambda values: values * 2, before(said.append))
    compiled = torch.compile(lambda values: twice(values) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert said == []


def test_what_torch_keeps_out_of_its_graph_is_seen() -> None:
    leave_uncompiled()
    said: list[torch.Tensor] = []
    apart: Any = torch.compiler.disable(lambda values: values * 2)
    watched = in_place_of(apart, before(said.append))
    compiled = torch.compile(lambda values: watched(values) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert len(said) == 1
