"""Small values between ranks: everyone hears everyone, and who stays away is named."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from workers.exchange import Exchange


def on_each_rank(world_size: int, call: Callable[[Exchange], Any], timeout_s: float = 10) -> list[Any]:
    """`call` on `world_size` ranks that are threads with one store."""
    store = dist.HashStore()
    exchanges = [Exchange(store, rank, world_size, timeout_s) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, exchanges))


def test_everyone_hears_everyone_in_rank_order() -> None:
    assert on_each_rank(3, lambda exchange: exchange.everyone("square", exchange.rank**2)) == [[0, 1, 4]] * 3


def test_a_float_comes_through_to_the_bit() -> None:
    value = 0.1 + 0.2
    assert on_each_rank(2, lambda exchange: exchange.everyone("loss", value)) == [[value, value]] * 2


def test_gather_ends_on_rank_0_and_share_begins_there() -> None:
    assert on_each_rank(3, lambda exchange: exchange.gather("rank", exchange.rank)) == [[0, 1, 2], None, None]
    assert on_each_rank(3, lambda exchange: exchange.share("rank", exchange.rank)) == [0, 0, 0]


def test_a_second_exchange_of_one_name_is_another() -> None:
    def twice(exchange: Exchange) -> list[Any]:
        return [exchange.everyone("x", exchange.rank), exchange.everyone("x", exchange.rank + 10)]

    assert on_each_rank(2, twice) == [[[0, 1], [10, 11]]] * 2


def test_every_rank_changes_place_as_often_as_every_other() -> None:
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


def test_who_does_not_come_is_named() -> None:
    alone = Exchange(dist.HashStore(), rank=0, world_size=2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"waited for rank 1 at 'step 3' for 0\.2 s"):
        alone.barrier("step 3")
