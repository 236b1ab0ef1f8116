"""Small values between ranks: every rank gets those of all, and a missing rank is named."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch.distributed as dist

from distlab.lab.cluster import control_plane
from distlab.lab.cluster.control_plane import Exchange


def on_each_rank(world_size: int, call: Callable[[Exchange], Any], timeout_s: float = 10) -> list[Any]:
    """Run `call` on `world_size` ranks, as threads with one store."""
    store = dist.HashStore()
    exchanges = [Exchange(store, rank, world_size, timeout_s) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, exchanges))


def test_everyone_returns_the_values_of_all_ranks_in_order() -> None:
    assert on_each_rank(3, lambda exchange: exchange.everyone("square", exchange.rank**2)) == [[0, 1, 4]] * 3


def test_a_float_arrives_unchanged_to_the_bit() -> None:
    value = 0.1 + 0.2
    assert on_each_rank(2, lambda exchange: exchange.everyone("loss", value)) == [[value, value]] * 2


def test_gather_returns_on_rank_0_and_share_sends_from_it() -> None:
    assert on_each_rank(3, lambda exchange: exchange.gather("rank", exchange.rank)) == [[0, 1, 2], None, None]
    assert on_each_rank(3, lambda exchange: exchange.share("rank", exchange.rank)) == [0, 0, 0]


def test_two_exchanges_with_one_name_are_separate() -> None:
    def twice(exchange: Exchange) -> list[Any]:
        return [exchange.everyone("x", exchange.rank), exchange.everyone("x", exchange.rank + 10)]

    assert on_each_rank(2, twice) == [[[0, 1], [10, 11]]] * 2


def test_all_ranks_change_place_equally_often() -> None:
    store, places = dist.HashStore(), [[], []]  # type: ignore[var-annotated]

    def on_rank(rank: int) -> None:
        @contextmanager
        def waiting(what: str) -> Iterator[None]:
            places[rank].append(what)
            yield

        exchange = Exchange(store, rank, 2, 10, waiting)
        exchange.everyone("everyone", rank)
        exchange.gather("gather", rank)
        exchange.share("share", rank)
        exchange.barrier("barrier")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on_rank, range(2)))
    assert places[0] == places[1] == ["everyone", "gather", "share", "barrier"]


def test_a_missing_rank_is_named() -> None:
    alone = Exchange(dist.HashStore(), rank=0, world_size=2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"waiting for rank 1 at 'step 3' after 0\.2 s"):
        alone.barrier("step 3")


def test_a_missing_rank_is_named_by_ranks_that_wait_for_rank_0_too() -> None:
    def waits(exchange: Exchange) -> str:
        if exchange.rank == 2:
            return ""
        with pytest.raises(TimeoutError) as raised:
            exchange.barrier("step 3")
        return str(raised.value)

    first, second, _ = on_each_rank(3, waits, timeout_s=0.3)
    assert first == second == "timed out waiting for rank 2 at 'step 3' after 0.3 s"


def test_64_ranks_send_few_requests_to_the_store() -> None:
    class Counted(dist.HashStore):
        requests = 0

        def get(self, key: str) -> bytes:
            type(self).requests += 1
            return super().get(key)

    store = Counted()
    exchanges = [Exchange(store, rank, 64, timeout_s=30) for rank in range(64)]
    with ThreadPoolExecutor(64) as pool:
        received = list(pool.map(lambda exchange: exchange.everyone("rank", {"rank": exchange.rank}), exchanges))
    assert received == [[{"rank": rank} for rank in range(64)]] * 64
    assert Counted.requests == 64 + 63, "rank 0 fetches each value, and every other rank the collected ones"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_wait_continues_after_each_slice(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "POLL_S", 0.1)
    stores: dict[str, Callable[[], dist.Store]] = {
        "hash": lambda: dist.HashStore(),
        "file": lambda: dist.FileStore(
            str(tmp_path / "store"), 2
        ),  # whole seconds, and no error of its own for their end
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    store = stores[kind]()
    one = Exchange(store, 0, 2, timeout_s=10)
    sender = Timer(1.5, store.set, ["exchange/1/late/1", "7"])
    sender.start()
    assert one.everyone("late", 5) == [5, 7]
    sender.join()


def test_a_closed_store_ends_the_wait_at_once() -> None:
    class Closed:
        def set(self, *_: object) -> None: ...

        def wait(self, *_: object) -> None:
            raise RuntimeError("Connection was likely closed")

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="waiting for rank 0"):
        Exchange(Closed(), 0, 2, timeout_s=30).barrier("end")  # type: ignore[arg-type]
    assert time.monotonic() - began < 5


def test_no_rank_waits_for_a_lost_rank_and_its_earlier_values_count() -> None:
    store = dist.HashStore()
    others = [Exchange(store, rank, 3, timeout_s=10) for rank in (0, 1)]
    lost = Exchange(store, 2, 3, timeout_s=10)
    lost._publish(lost._next("first"), "early")
    for exchange in others:
        exchange.lost.add(2)
    with ThreadPoolExecutor(2) as pool:
        assert (
            list(pool.map(lambda exchange: exchange.everyone("first", exchange.rank), others)) == [[0, 1, "early"]] * 2
        )
        assert list(pool.map(lambda exchange: exchange.everyone("then", exchange.rank), others)) == [[0, 1, None]] * 2
        assert list(pool.map(lambda exchange: exchange.gather("last", exchange.rank), others)) == [[0, 1, None], None]
