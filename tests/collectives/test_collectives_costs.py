"""The formulas against the collectives themselves: to the byte, on every rank, at uneven lengths."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.collectives.by_hand import PAIRS_ABOVE_BYTES, SERVER_OVER_TCP_BYTES, Collective
from distlab.collectives.costs import (
    ALGORITHMS,
    TCP_PAIRS_BYTES,
    TCP_STAR_BYTES,
    algorithmic_factor,
    all_gather_bytes,
    all_reduce_bytes,
    all_reduce_rounds,
    all_reduce_seconds,
    busbw_factor,
    chunk_bytes,
    reduce_scatter_bytes,
)
from distlab.collectives.point_to_point import Pending
from distlab.measure.traffic import Calls
from distlab.testing.warm_ranks import Ranks

BY_HAND = [name for name in ALGORITHMS if name not in ("gloo", "tcp")]
FORMULAS: dict[str, Callable[..., float]] = {
    "all_reduce": all_reduce_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "all_gather": all_gather_bytes,
}


def sent_by_hand(group: dist.ProcessGroup, lengths: list[int]) -> dict[tuple[str, str, int], float]:
    """{(algorithm, operation, length): bytes in this rank's sends}"""
    found: dict[tuple[str, str, int], float] = {}
    for algorithm in BY_HAND:
        collective = Collective(group, algorithm)
        for length in lengths:
            whole = torch.ones(length)
            chunk = whole.tensor_split(group.size())[group.rank()]
            calls: dict[str, Callable[[], Pending]] = {
                "all_reduce": partial(collective.all_reduce, whole),
                "reduce_scatter": partial(collective.reduce_scatter, chunk.clone(), whole),
                "all_gather": partial(collective.all_gather, whole, chunk.clone()),
            }
            for operation, call in calls.items():
                with Calls() as seen:
                    call()
                found[algorithm, operation, length] = sum(entry.called_bytes for entry in seen.ops())
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_are_those_of_the_collectives(ranks: Ranks, world_size: int) -> None:
    for rank, found in enumerate(ranks(world_size, sent_by_hand, [1, 7, 12, 1023])):
        for (algorithm, operation, length), sent in found.items():
            predicted = FORMULAS[operation](algorithm, world_size, 4 * length, rank)
            assert sent == predicted, (algorithm, operation, length, rank)


@given(st.integers(1, 8), st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8]))
def test_what_all_ranks_send_together(world_size: int, numel: int, itemsize: int) -> None:
    nbytes = numel * itemsize
    chunks = chunk_bytes(world_size, nbytes, itemsize)
    assert sum(chunks) == nbytes
    assert max(chunks) - min(chunks) <= itemsize
    for algorithm in ("ring", "direct", "server"):
        sent = sum(all_reduce_bytes(algorithm, world_size, nbytes, rank, itemsize) for rank in range(world_size))
        assert sent == 2 * (world_size - 1) * nbytes
    for algorithm in ALGORITHMS:
        for formula in FORMULAS.values():
            assert all(formula(algorithm, world_size, nbytes, rank, itemsize) >= 0 for rank in range(world_size))


def test_published_figures() -> None:
    assert all_reduce_bytes("ring", 4, 4 << 20) == 1.5 * (4 << 20)
    assert reduce_scatter_bytes("ring", 4, 4 << 20) == 0.75 * (4 << 20)
    assert reduce_scatter_bytes("gloo", 4, 4 << 20) == 1.5 * (4 << 20)
    assert all_reduce_bytes("server", 8, 1 << 20) == 7 << 20  # the server's wall
    assert all_reduce_bytes("tree", 3, 1200, rank=2) == 1200  # folds
    assert all_reduce_bytes("tree", 3, 1200, rank=0) == 600 + 600 + 1200


@pytest.mark.parametrize("nbytes", [4096, TCP_STAR_BYTES, TCP_STAR_BYTES + 4, 4 << 20])
def test_plain_tcp_sends_the_least_in_the_mean_of_ranks(nbytes: int) -> None:
    sent = [all_reduce_bytes("tcp", 3, nbytes, rank) for rank in range(3)]
    assert sum(sent) == pytest.approx(4 * nbytes)
    assert (max(sent) > 1.4 * min(sent)) == (nbytes <= TCP_STAR_BYTES)
    assert SERVER_OVER_TCP_BYTES["all_reduce"] == TCP_STAR_BYTES
    assert PAIRS_ABOVE_BYTES["all_reduce"] == TCP_PAIRS_BYTES


def test_a_world_of_one_sends_nothing() -> None:
    for algorithm in ALGORITHMS:
        assert [formula(algorithm, 1, 4096) for formula in FORMULAS.values()] == [0, 0, 0]
        assert all_reduce_rounds(algorithm, 1) == 0
        assert all_reduce_seconds(algorithm, 1, 4096, 1e-3, 1e9) == 0
    assert algorithmic_factor("all_reduce", 1) == 0


def test_factors_are_those_of_nccl_tests() -> None:
    assert busbw_factor("all_reduce", 4) == 1.5
    assert busbw_factor("all_gather", 4) == busbw_factor("reduce_scatter", 4) == busbw_factor("all_to_all", 4) == 0.75
    assert busbw_factor("broadcast", 4) == busbw_factor("reduce", 4) == busbw_factor("send", 4) == 1
    assert algorithmic_factor("broadcast", 4) == 0.75


def test_time_has_a_latency_and_a_bandwidth_part() -> None:
    assert all_reduce_seconds("ring", 4, 0, 1e-3, 1e9) == pytest.approx(6e-3)
    assert all_reduce_seconds("tree", 4, 0, 1e-3, 1e9) == pytest.approx(4e-3)
    assert all_reduce_rounds("tree", 5) == 6
    assert [all_reduce_rounds("direct", ranks) for ranks in (2, 3, 8)] == [1, 2, 2]
    assert all_reduce_seconds("ring", 4, 10**9, 0, 1e9) == pytest.approx(1.5)
    assert all_reduce_seconds("server", 4, 10**9, 0, 1e9) == pytest.approx(6)
    assert all_reduce_seconds("tree", 3, 10**9, 0, 1e9) == pytest.approx(3)
