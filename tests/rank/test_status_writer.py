"""What a rank notes of itself with LAB_LIVE=1: its phases, its shares of the losses, for whom it waits, what it sent."""

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.cluster.heartbeat import RunPosition
from distlab.collectives.phases import phase
from distlab.config import Config
from distlab.contract import Mode, Variant
from distlab.measure.traffic import connections
from distlab.rank import status_writer as rank_live
from distlab.rank.status_writer import Notes, Showing
from distlab.report.progress import Work, places

pytestmark = pytest.mark.timeout(60)


class Training:
    """A strategy whose loss falls by one a step."""

    def __init__(self) -> None:
        self.loss = torch.tensor(5.0)

    def backward(self, microbatches: list[Any]) -> Tensor | None:  # noqa: ARG002
        with phase("forward", "0"):
            self.loss -= 1  # in place: what was returned changes too
        return self.loss


def noted(works: list[tuple[int, str]], run: Callable[[Any], None] | None = None) -> tuple[Notes, Mode]:
    """The notes of a mode of one variant, whose work is at each look the next of `works`."""
    notes = Notes(lambda: works.pop(0))
    return notes, notes.taken_of(Mode(variants=(Variant("ring", Training), Variant("sum")), run=run))  # type: ignore[arg-type]


def test_shares_of_the_timed_pass_are_noted_as_they_were() -> None:
    notes, mode = noted([(0, "ring"), (1, "ring"), (0, "proof of ring")])
    assert [each.build is None for each in mode.variants] == [False, True]
    assert mode.variants[0].build is not None
    strategy = mode.variants[0].build()
    for _ in range(3):
        strategy.backward([])
    assert [(*where, float(share)) for *where, share in notes.shares] == [("ring", 0, 4.0), ("ring", 1, 3.0)]


def test_a_long_curve_keeps_some_of_its_steps_the_same_on_ranks_that_are_not_as_far(tmp_path: Path) -> None:
    notes = Notes(lambda: (0, ""))
    thread = showing(tmp_path, notes, RunPosition(), {})
    lengths = []
    for step in range(2001):
        notes.shares.append(("ring", step, torch.tensor(1.0)))
        lengths.append(len(thread.state(0.0).losses["ring"]) if step % 100 == 0 else 0)
    curve = thread.state(0.0).losses["ring"]
    assert [step for step, _ in curve] == list(range(0, 2001, 16))
    assert max(lengths) <= 250


def test_the_innermost_phase_of_the_run_is_known_and_of_nothing_else() -> None:
    seen: list[list[str]] = []

    def run(notes: Notes) -> None:
        with phase("forward"), phase("all_reduce"):
            seen.append([kind for _, kind in notes.phases])
        seen.append([kind for _, kind in notes.phases])

    notes, mode = noted([], run)
    assert mode.run is not None
    mode.run(notes)
    assert seen == [["forward", "all_reduce"], []]
    with phase("forward"):
        assert notes.phases == []


def showing(
    folder: Path, notes: Notes, place: RunPosition, waited_for: dict[int, Any], say: Callable[[str], None] = print
) -> Showing:
    """The thread of rank 0 of three, not started, in this place."""
    main = SimpleNamespace(work=(place.step, "ring"), place=place, here=lambda: place)
    watch: Any = SimpleNamespace(main=main, hearing=SimpleNamespace(waited_for=lambda _: waited_for))
    cluster: Any = SimpleNamespace(rank=0, world_size=3, store_port=1)
    journal: Any = SimpleNamespace(folder=folder, say=say)
    return Showing(Config.read({"LAB_STEPS": "20"}), ("ring",), cluster, watch, journal, 7.0, notes, Work())


def test_whom_it_waits_for_is_said_once_it_stands_still(tmp_path: Path) -> None:
    place = RunPosition(turn=3, step=4, phase="the wait at step 5 of ring", since=100.0)
    thread = showing(tmp_path, Notes(lambda: (0, "")), place, {2: None})
    state = thread.state(100.1)
    assert (state.step, state.variant, state.phase, state.phase_s) == (4, "ring", "the wait at step 5 of ring", 0.1)
    assert state.waits_for == []
    assert thread.state(100.7).waits_for == [2]
    place.turn += 1
    assert thread.state(100.8).waits_for == []


def test_an_open_phase_is_where_it_is_and_losses_are_numbers_or_none(tmp_path: Path) -> None:
    notes = Notes(lambda: (0, ""))
    notes.phases.append((102.0, "all_reduce"))
    notes.shares.extend([("ring", 0, torch.tensor(1.25)), ("ring", 1, torch.tensor(float("nan")))])
    state = showing(tmp_path, notes, RunPosition(turn=1, phase="ring", since=100.0), {}).state(102.5)
    assert (state.phase, state.phase_s) == ("all_reduce", 0.5)
    assert state.losses == {"ring": [[0, 1.25], [1, None]]}


def test_what_a_connection_sent_stays_when_it_is_closed(tmp_path: Path) -> None:
    thread = showing(tmp_path, Notes(lambda: (0, "")), RunPosition(), {})
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        near, far = list(client.getsockname()), list(server.getsockname())
        client.sendall(b"x" * 700)
        assert any(each.local == tuple(near) for each in connections().values())
        assert [near, far, 700] in thread.state(0.0).sent
    assert [near, far, 700] in thread.state(0.3).sent


def test_a_full_disk_ends_what_is_shown_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    thread = showing(tmp_path, Notes(lambda: (0, "")), RunPosition(), {}, said.append)
    monkeypatch.setattr(rank_live, "write_status", full)
    thread.run()
    assert said == ["live       nothing more is shown of this rank: No space left on device"]
    assert places(tmp_path) == {}
