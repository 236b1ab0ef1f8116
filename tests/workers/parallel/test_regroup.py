"""A group that is cut while it is made does not come to stand."""

import threading
from typing import Any

import pytest

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
