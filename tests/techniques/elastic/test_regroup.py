"""Groups that are cut, during their creation and later, and groups whose store is lost."""

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


def create_group(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> Regroup:
    """Create a group slowly; with `cut`, cut it once meanwhile."""
    group = Regroup("127.0.0.1", KEY, 5.0, set)
    again = threading.Event()
    cuts = [0]

    def count_cuts(self: Regroup, right: Any = Regroup.cut) -> None:
        cuts[0] += 1
        right(self)
        if cuts[0] > 1:
            again.set()

    def create(*_: Any) -> object:
        if cut:
            cuts[0] = 0
            group.cut()
            assert again.wait(5), "sockets opened after a cut must be cut too"
        return object()

    monkeypatch.setattr(Regroup, "cut", count_cuts)
    monkeypatch.setattr(group, "_create_group", create)
    group.form("a name", 0, 1, HOST, lambda: True)
    return group


def test_a_cut_during_the_creation_of_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="left while the group was created, or cut it"):
        create_group(monkeypatch, cut=True)


def test_a_group_that_is_not_cut_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    create_group(monkeypatch, cut=False)


def test_a_store_that_does_not_listen_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"no store listens at 127.0.0.1:2"):
        Regroup("127.0.0.1", KEY, 5.0, set).form("a name", 0, 1, HOST, lambda: True)


def test_a_store_that_dies_after_the_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host accepts the connection and dies; another connection reports that 0.1 s later."""
    accepted: list[float] = []
    silent: list[socket.socket] = []

    def accept(*_: Any) -> socket.socket:
        accepted.append(time.monotonic())
        near, far = socket.socketpair()
        silent.append(far)
        return near

    monkeypatch.setattr(socket, "create_connection", accept)
    with pytest.raises(RuntimeError, match=r"the store at 127.0.0.1:2 was lost while the group was created"):
        Regroup("127.0.0.1", KEY, 5.0, set).form(
            "a name", 0, 1, HOST, lambda: not accepted or time.monotonic() < accepted[0] + 0.1
        )


def test_a_group_is_created_over_a_store() -> None:
    host = StoreServer(listen("127.0.0.1"), KEY)
    group = Regroup("127.0.0.1", KEY, 5.0, set)
    group.form("a name", 0, 1, ("127.0.0.1", host.port), lambda: True)
    assert group.sum(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    group.leave()


class Never:
    """A call of gloo that never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        time.sleep(20)
        raise RuntimeError("Operation timed out!")


class Waits:
    """A ProcessGroupGloo with a waiting thread, for which its destructor waits."""

    def __init__(self, ends: threading.Event) -> None:
        self.ends = ends

    def allreduce(self, _: list[torch.Tensor]) -> Never:
        return Never()

    def __del__(self) -> None:
        self.ends.wait(20)


def test_a_cut_ends_a_wait_for_gloo() -> None:
    group, ends = Regroup("127.0.0.1", KEY, 5.0, set), threading.Event()
    group._gloo = Waits(ends)
    threading.Timer(0.1, group.cut).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the group was cut while gloo waited"):
        group.sum(torch.ones(3))
    group.leave()
    assert time.monotonic() - began < 5, "leaving does not wait for gloo either"
    ends.set()


def test_any_error_of_a_wait_reaches_the_caller() -> None:
    group = Regroup("127.0.0.1", KEY, 5.0, set)
    with pytest.raises(ValueError, match="unexpected"):
        group._unless_cut(unexpected, "cut")


def unexpected() -> None:
    raise ValueError("unexpected")


def test_an_error_of_gloo_is_raised_unchanged(ranks: Ranks) -> None:
    assert ranks(2, sum_after_leave) == ["", "an error of gloo"]


def sum_after_leave(group: dist.ProcessGroup) -> str:
    """Sum with a member that leaves: the error is gloo's own, not that of a cut."""
    host = StoreServer(listen("127.0.0.1"), KEY) if group.rank() == 0 else None
    port = [host.port if host is not None else 0]
    dist.broadcast_object_list(port, 0, group=group)
    own = {each.descriptor for each in sockets()}
    pair = Regroup("127.0.0.1", KEY, 20.0, lambda: own)
    pair.form("a pair", group.rank(), 2, ("127.0.0.1", port[0]), lambda: True)
    dist.barrier(group)
    outcome = ""
    if group.rank() == 0:
        pair.leave()
    else:
        try:
            pair.sum(torch.ones(3))
        except RuntimeError as error:
            outcome = "a cut" if "was cut" in str(error) else "an error of gloo"
    pair.leave()
    dist.barrier(group)
    return outcome
