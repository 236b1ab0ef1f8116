"""A group that is cut while it is made does not come to stand."""

import io
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workers.parallel.line import Address
from workers.parallel.regroup import Regroup

pytestmark = pytest.mark.timeout(30)
HOST = Address("127.0.0.1", 1, 2)


def made(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> Regroup:
    """A group whose making takes some time, and that is cut meanwhile, once."""
    group = Regroup("127.0.0.1", 5.0, set)
    again = threading.Event()
    cuts = [0]

    def shut(self: Regroup, right: Any = Regroup.cut) -> None:
        cuts[0] += 1
        right(self)
        if cuts[0] > 1:
            again.set()

    def formed(*_: Any) -> object:
        if cut:
            cuts[0] = 0
            group.cut()
            assert again.wait(5), "what is opened after a cut has to be cut too"
        return object()

    monkeypatch.setattr(Regroup, "cut", shut)
    monkeypatch.setattr(group, "_formed", formed)
    group.form("a name", 0, 1, HOST, lambda: True)
    return group


def test_a_call_that_comes_while_a_group_is_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="called the others"):
        made(monkeypatch, cut=True)


def test_one_that_nobody_cuts_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, cut=False)


def test_where_nobody_listens_it_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"nobody listens at the store of 127.0.0.1:2"):
        Regroup("127.0.0.1", 5.0, set).form("a name", 0, 1, HOST, lambda: True)


def test_a_store_that_dies_after_it_was_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's answer to the question is its last; its death is noticed 0.1 s later, on another connection."""
    asked: list[float] = []

    def answered(*_: Any) -> io.BytesIO:
        asked.append(time.monotonic())
        return io.BytesIO()

    monkeypatch.setattr(socket, "create_connection", answered)
    with pytest.raises(RuntimeError, match=r"the store of 127.0.0.1:2 went while it was connected to"):
        Regroup("127.0.0.1", 5.0, set).form(
            "a name", 0, 1, HOST, lambda: not asked or time.monotonic() < asked[0] + 0.1
        )


def test_a_store_that_is_there_forms_a_group() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = Regroup("127.0.0.1", 5.0, set)
    group.form("a name", 0, 1, Address("127.0.0.1", 1, host.port), lambda: True)
    assert group.sum(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    group.leave()
