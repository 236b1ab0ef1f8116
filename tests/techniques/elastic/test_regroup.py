"""A group that is cut while it is made does not come to stand."""

import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.techniques.elastic.process_group import Regroup, sockets
from distlab.techniques.transport.handshake import listen
from distlab.techniques.transport.store_server import StoreServer
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(30)
KEY = b"the key"
HOST = ("127.0.0.1", 2)


def made(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> Regroup:
    """A group whose making takes some time, and that is cut meanwhile, once."""
    group = Regroup("127.0.0.1", KEY, 5.0, set)
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
    with pytest.raises(RuntimeError, match="left while the group was created, or cut it"):
        made(monkeypatch, cut=True)


def test_one_that_nobody_cuts_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, cut=False)


def test_where_nobody_listens_it_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"nobody listens at the store of 127.0.0.1:2"):
        Regroup("127.0.0.1", KEY, 5.0, set).form("a name", 0, 1, HOST, lambda: True)


def test_a_store_that_dies_after_it_was_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's answer to the question is its last; its death is noticed 0.1 s later, on another connection."""
    asked: list[float] = []

    silent: list[socket.socket] = []

    def answered(*_: Any) -> socket.socket:
        asked.append(time.monotonic())
        ours, theirs = socket.socketpair()
        silent.append(theirs)
        return ours

    monkeypatch.setattr(socket, "create_connection", answered)
    with pytest.raises(RuntimeError, match=r"the store of 127.0.0.1:2 went while it was connected to"):
        Regroup("127.0.0.1", KEY, 5.0, set).form(
            "a name", 0, 1, HOST, lambda: not asked or time.monotonic() < asked[0] + 0.1
        )


def test_a_store_that_is_there_forms_a_group() -> None:
    host = StoreServer(listen("127.0.0.1"), KEY)
    group = Regroup("127.0.0.1", KEY, 5.0, set)
    group.form("a name", 0, 1, ("127.0.0.1", host.port), lambda: True)
    assert group.sum(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    group.leave()


class Never:
    """What gloo never comes to the end of."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        time.sleep(20)
        raise RuntimeError("Operation timed out!")


class Waits:
    """A ProcessGroupGloo of which a thread waits on, so that its end does."""

    def __init__(self, ends: threading.Event) -> None:
        self.ends = ends

    def allreduce(self, _: list[torch.Tensor]) -> Never:
        return Never()

    def __del__(self) -> None:
        self.ends.wait(20)


def test_who_waits_for_gloo_looks_up_whether_its_group_was_cut() -> None:
    group, ends = Regroup("127.0.0.1", KEY, 5.0, set), threading.Event()
    group._gloo = Waits(ends)
    threading.Timer(0.1, group.cut).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the group was cut, and gloo waits on"):
        group.sum(torch.ones(3))
    group.leave()
    assert time.monotonic() - began < 5, "nor is the end of what waits waited for"
    ends.set()


def test_any_error_of_a_wait_comes_to_who_wants_its_result() -> None:
    group = Regroup("127.0.0.1", KEY, 5.0, set)
    with pytest.raises(ValueError, match="of a kind that nobody expects"):
        group._unless_cut(unexpected, "cut")


def unexpected() -> None:
    raise ValueError("of a kind that nobody expects")


def test_what_gloo_has_met_is_raised_as_it_is(ranks: Ranks) -> None:
    assert ranks(2, left_alone) == ["", "a sentence of gloo's"]


def left_alone(group: dist.ProcessGroup) -> str:
    """A sum with one that hangs up: what the other one is told is not that it was cut."""
    host = StoreServer(listen("127.0.0.1"), KEY) if group.rank() == 0 else None
    port = [host.port if host is not None else 0]
    dist.broadcast_object_list(port, 0, group=group)
    own = {each.descriptor for each in sockets()}
    pair = Regroup("127.0.0.1", KEY, 20.0, lambda: own)
    pair.form("a pair", group.rank(), 2, ("127.0.0.1", port[0]), lambda: True)
    dist.barrier(group)
    said = ""
    if group.rank() == 0:
        pair.leave()
    else:
        try:
            pair.sum(torch.ones(3))
        except RuntimeError as error:
            said = "a cut" if "was cut" in str(error) else "a sentence of gloo's"
    pair.leave()
    dist.barrier(group)
    return said
