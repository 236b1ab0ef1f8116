"""The parts of the coordinator that need no script: circular waits, axes of a mesh, stacks, spans, reports of ranks."""

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
from tests.tools.check.cases import coordinator_of, first_call, lines_of

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
report_lines = (
    st.binary(max_size=80)
    | anything.map(lambda value: json.dumps(value).encode())
    | st.tuples(
        st.sampled_from([*KINDS, "said", "finding", "record", "refused", "module"]), st.lists(anything, max_size=6)
    ).map(lambda reports: json.dumps([reports[0], *reports[1]]).encode())
    | st.sampled_from([b"[" * 100_000, b"9" * 5000])
)


@settings(max_examples=300)
@given(st.lists(report_lines, max_size=6))
def test_no_line_stops_the_coordinator(lines: list[bytes]) -> None:
    """Lines of a script that writes to the pipe, or of a defective rank."""
    printed: list[str] = []
    coordinator = Coordinator(2, 3.0, 60.0, printed.append)
    coordinator.receive(1, lines, 0.0)
    coordinator.evaluate(0.5)
    assert sum(coordinator.malformed.values()) <= 2 * len(lines)


NO_WAIT = Wait(None, "store.wait('key')", CallPlace("train.py:1"), 0.0)


def blocked(*needs: int, any_of: bool = False) -> Blocked:
    return Blocked(NO_WAIT, frozenset(needs), any_of)


@pytest.mark.parametrize(
    ("waits", "over", "stuck"),
    [
        ({0: blocked(1), 1: blocked(0)}, set(), {0, 1}),
        ({0: blocked(1), 1: blocked(2)}, set(), set()),  # rank 2 computes
        ({0: blocked(1), 1: blocked(2)}, {2}, {0, 1}),  # rank 2 has ended
        ({0: blocked(1, 2), 1: blocked(0)}, set(), {0, 1}),
        ({0: blocked(1, 2, any_of=True)}, {1}, set()),  # rank 2 may still set the key
        ({0: blocked(1, 2, any_of=True)}, {1, 2}, {0}),
        ({0: blocked(1, 2, any_of=True), 1: blocked(0), 2: blocked(0)}, set(), {0, 1, 2}),
    ],
)
def test_hung_ranks_wait_only_for_ranks_that_never_come(
    waits: dict[int, Blocked], over: set[int], stuck: set[int]
) -> None:
    assert set(hung(waits, over)) == stuck


def test_groups_of_an_axis_are_in_the_order_of_the_mesh() -> None:
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


def test_the_end_of_a_process_in_words() -> None:
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(7) == "called os._exit(7)"


HEAD = first_call("all_reduce", "train.py:4")[1:-1]
MADE = [["call", number, 1, 1, 1, number, 7, float(number)] for number in range(1, 4)]
ENDED = "all_reduce train.py:4, until the run was ended"


def test_spans_end_with_their_calls_and_the_rest_is_counted() -> None:
    reports = lines_of(*HEAD, *MADE, ["end", 1, 1.5], ["waited", 2, 7, 2.25])
    spans, more = spans_of(reports)
    assert spans == [
        ("all_reduce", "all_reduce train.py:4", 1.0, 1.5),
        ("all_reduce", "all_reduce train.py:4", 2.0, 2.25),
        ("wait", ENDED, 3.0, 3.0),
    ]
    assert more == 0
    malformed = [b"no json", b"[]", b"7", *lines_of(["call", 9, 1, 0, 3, 9, 7, 1.0], ["end", [], 1.0], ["kind", [], 0])]
    assert spans_of([*reports, *malformed]) == (spans, 0)
    many = ((["call", each, 1, 1, 1, each, 7, 1.0], ["end", each, 2.0]) for each in range(MOST + 5))
    spans, more = spans_of(lines_of(*HEAD, *chain.from_iterable(many)))
    assert (len(spans), more) == (MOST, 5)


def test_a_hung_call_is_drawn_to_the_right_edge() -> None:
    reports = *HEAD, ["call", 1, 1, 1, 1, 1, 7, 2.0], ["enter", "store.wait", ["key"], 1, 9, 3.0]
    (hung_call, waits), _ = spans_of(lines_of(*reports), 9.5)
    assert hung_call == ("wait", ENDED, 2.0, 9.5)
    assert waits == ("wait", "store.wait train.py:4, until the run was ended", 3.0, 9.5)
    late = ["waited", 1, 7, 9.75], ["leave", 9, 9.75], ["raised", "RuntimeError", "closed", "", "", 9.75]
    assert spans_of(lines_of(*reports, *late), 9.5)[0] == [hung_call, waits]  # when the others were ended
    # Not for a script that had ended without waiting for its handle, nor for a function that returned.
    left = lines_of(*reports, ["leave", 9, 4.0], ["ended", 0, 4.5])
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
    coordinator = coordinator_of(*([["device", 0, uuid, host, visible]] for uuid, host in devices))
    assert [(each.check, each.ranks) for each in coordinator.silent_faults.at_end()] == found


def test_a_call_without_a_handle_ends_with_the_stream_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Work, "unbox", lambda _: None)  # NCCL's, of a call whose handle was not requested
    assert ending_of("allreduce_", ([], object())) is None, "without a GPU the end is unknown"
    event = Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", event)
    ending: Any = ending_of("allreduce_", ([], object()))
    assert ending is event.return_value
    assert event.return_value.record.called


def test_unequal_numbers_of_batches_are_a_question() -> None:
    at: list[Any] = ["place", 1, "train.py:8", "", "train.py"]
    alone: list[Any] = ["place", 2, "train.py:30", "", "train.py"]  # a pass that rank 0 alone makes
    first = [at, alone, ["pass", 0, 2, -1], ["pass", 7, 1, -1], ["batches", 7, 4]]
    (question,) = coordinator_of(first, [at, ["pass", 7, 1, -1], ["batches", 7, 3]]).silent_faults.questions()
    assert "rank 0: 4, rank 1: 3" in question


CALLED = first_call("all_reduce", "train.py:4")
MALFORMED: list[list[Any]] = [
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


@pytest.mark.parametrize("malformed", MALFORMED, ids=lambda line: f"{line[0]} {str(line[1])[:8]}")
def test_a_malformed_report_is_dropped_without_a_question(malformed: list[Any]) -> None:
    """The script has the pipe too; what it writes there must not stop the coordinator."""
    printed: list[str] = []
    coordinator = Coordinator(2, 3.0, 60.0, printed.append)
    for rank in range(2):
        coordinator.receive(rank, lines_of(*CALLED, malformed, malformed), 0.0)
    coordinator.evaluate(0.5)
    assert list(coordinator.silent_faults.questions()) == []
    assert list(coordinator.silent_faults.at_end()) == []
    assert coordinator.malformed == {0: 2, 1: 2}
    assert len(printed) == 2


def test_each_report_of_watch_has_a_handler_and_each_handler_a_report() -> None:
    """Except the reports of supervisors and proofs."""
    sources = "".join(path.read_text() for path in Path(check.__file__).parent.glob("*/*.py"))
    reports = re.findall(r"""send\(\s*"(\w+)"|write(?:_later)?\(\s*f?'\["(\w+)"|number\("(\w+)\"""", sources)
    kinds = {kind for each in reports for kind in each if kind} | {"look", "stacks", "gone"}
    handled = {*KINDS, *SilentFaults(2)._handlers, "changed", "unrecorded", "refused"}
    assert kinds - handled == set()
    assert handled - kinds == {"counting", "wire"}


@pytest.mark.parametrize(("strides", "found"), [([1, 4], 1), ([1, 3], 0)])
def test_a_layout_without_gaps_is_wrong_where_ranks_differ(strides: list[int], found: int) -> None:
    coordinator = coordinator_of(*([*CALLED, ["strided", 1, [3, 4], each, False]] for each in (strides, [1, 3])))
    assert len(list(coordinator.silent_faults.at_end())) == found


def test_ranks_that_are_all_idle_are_a_finding() -> None:
    printed: list[str] = []
    still, matching = IdleWatch(10.0, printed.append), Matching(2)
    states = [RankState(rank, 2, cpu_share=0.0, exit_code=0 if rank else None) for rank in range(2)]
    assert still.find_idle(states, matching, 9.0) is None
    found = still.find_idle(states, matching, 10.5)
    assert found is not None
    assert (found.check, found.ranks) == (HANG, (0,))
    states[0].cpu_share = 0.9
    assert still.find_idle(states, matching, 99.0) is None
    states[0].cpu_share, states[0].starved_share = 0.03, 0.9
    assert still.find_idle(states, matching, 99.0) is None, "30 others have the cores"


def test_unreadable_weights_do_not_end_an_fsdp_script() -> None:
    reporter = Mock()
    axes = Axes(Recorder(reporter, Mock()))
    sums: list[list[Any]] = []
    axes._note_sums(sums, lambda: [("weight", Mock(is_meta=False, detach=Mock(side_effect=RuntimeError("no data"))))])
    assert sums == []
    reporter.send.assert_called_once_with("unrecorded", "_note_sums", "RuntimeError('no data')")


def test_torch_compile_traces_the_function_that_check_wraps() -> None:
    printed: list[torch.Tensor] = []
    twice = in_place_of(lambda values: values * 2, before(printed.append))
    compiled = torch.compile(lambda values: twice(values) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert printed == []


def test_functions_outside_of_the_graph_are_observed() -> None:
    leave_uncompiled()
    printed: list[torch.Tensor] = []
    apart: Any = torch.compiler.disable(lambda values: values * 2)
    watched = in_place_of(apart, before(printed.append))
    compiled = torch.compile(lambda values: watched(values) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert len(printed) == 1
