"""The formulas compared with counted bytes, messages and socket traffic, and with figures of papers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.lab.measure.prediction import Prediction
from distlab.lab.measure.traffic import Calls
from distlab.techniques.collectives.by_hand import SERVER_OVER_TCP_BYTES, Collective
from distlab.techniques.collectives.costs import (
    ALGORITHMS,
    FRAMES_BYTES,
    TCP_STAR_BYTES,
    algorithmic_factor,
    all_gather_bytes,
    all_reduce_bytes,
    all_reduce_messages,
    all_reduce_rounds,
    all_reduce_seconds,
    attention_flops,
    busbw_factor,
    chunk_bytes,
    exposed_seconds,
    gloo_all_reduce_messages,
    half_messages,
    message_seconds,
    reduce_scatter_bytes,
    training_flops,
    wire_tolerance,
)
from distlab.techniques.collectives.point_to_point import Pending
from tests.lab.measure.test_traffic import ledger_of
from tests.warm_ranks import Ranks

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
def test_formulas_equal_counted_bytes(ranks: Ranks, world_size: int) -> None:
    for rank, found in enumerate(ranks(world_size, sent_by_hand, [1, 7, 12, 1023])):
        for (algorithm, operation, length), sent in found.items():
            predicted = FORMULAS[operation](algorithm, world_size, 4 * length, rank)
            assert sent == predicted, (algorithm, operation, length, rank)


@given(st.integers(1, 8), st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8]))
def test_total_bytes_of_all_ranks(world_size: int, numel: int, itemsize: int) -> None:
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
def test_plain_tcp_sends_minimal_bytes_on_average(nbytes: int) -> None:
    sent = [all_reduce_bytes("tcp", 3, nbytes, rank) for rank in range(3)]
    assert sum(sent) == pytest.approx(4 * nbytes)
    assert (max(sent) > 1.4 * min(sent)) == (nbytes <= TCP_STAR_BYTES)
    assert SERVER_OVER_TCP_BYTES["all_reduce"] == TCP_STAR_BYTES


def test_a_world_of_one_sends_nothing() -> None:
    for algorithm in ALGORITHMS:
        assert [formula(algorithm, 1, 4096) for formula in FORMULAS.values()] == [0, 0, 0]
        assert all_reduce_rounds(algorithm, 1) == 0
        assert all_reduce_seconds(algorithm, 1, 4096, 1e-3, 1e9) == 0
    assert algorithmic_factor("all_reduce", 1) == 0


def test_busbw_factors_equal_nccl_tests() -> None:
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


NAMES = ("gloo", "ring", "direct", "tree", "server")


def framing_bytes(group: dist.ProcessGroup, length: int) -> dict[tuple[str, str], float]:
    """{(operation, algorithm): wire bytes of a call on `length` floats, less the formula's}"""
    size, rank, found = group.size(), group.rank(), {}
    whole, chunk = torch.ones(length), torch.ones(length // size)
    for name in NAMES:
        collective = Collective(group, "backend" if name == "gloo" else name)
        calls: dict[str, tuple[Callable[[], object], float]] = {
            "all_reduce": (partial(collective.all_reduce, whole), all_reduce_bytes(name, size, 4 * length, rank)),
            "reduce_scatter": (
                partial(collective.reduce_scatter, chunk, whole),
                reduce_scatter_bytes(name, size, 4 * length, rank),
            ),
            "all_gather": (
                partial(collective.all_gather, whole, chunk),
                all_gather_bytes(name, size, 4 * length, rank),
            ),
        }
        for op, (call, nbytes) in calls.items():
            with ledger_of(group).count(calls=False) as traffic:
                call()
            found[op, name] = traffic.wire_bytes - nbytes
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_gloo_adds_144_bytes_to_each_message(ranks: Ranks, world_size: int) -> None:
    length = 64 * 2 * world_size
    for rank, found in enumerate(ranks(world_size, framing_bytes, length)):
        for (op, name), added in found.items():
            counted = (
                all_reduce_messages(name, world_size, 4 * length, rank)
                if op == "all_reduce"
                else half_messages(name, op, world_size, 4 * length, rank)
            )
            # A rank with different numbers of sends and receives adds less, because both ends frame a message.
            assert added <= FRAMES_BYTES * counted, (op, name, rank)
            exact = name != "tree" and (op, name) != ("all_gather", "server")
            assert added == FRAMES_BYTES * counted or not exact, (op, name, rank)


def test_gloo_splits_a_long_all_reduce() -> None:
    assert gloo_all_reduce_messages(4, 1) == gloo_all_reduce_messages(4, 8 << 20) == 12
    assert gloo_all_reduce_messages(2, 8 << 20) == 8  # measured: 1152 B more than the tensor
    assert gloo_all_reduce_messages(3, 12 << 20) == 16
    assert gloo_all_reduce_messages(1, 12 << 20) == 0


def test_empty_chunks_send_no_message() -> None:
    assert half_messages("ring", "all_gather", 5, 4 * 2) == 2
    assert all_reduce_messages("direct", 2, 4) == 1


def test_tolerance_is_below_a_one_kilobyte_message() -> None:
    assert wire_tolerance(1e6, 2) == 1e4 + 320
    assert wire_tolerance(1024, 1) < 1024


def test_messages_default_to_a_short_all_reduce_per_call() -> None:
    assert Prediction("flat", "wire bytes", "B", "", (0.0,) * 3, 2).messages_of(1) == 2 * gloo_all_reduce_messages(3, 1)
    assert Prediction("flat", "wire bytes", "B", "", (0.0,) * 3, 2, messages=(5, 6, 7)).messages_of(1) == 6


def test_training_flops_equal_the_gpt3_paper() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOP for 174.6 billion parameters and 300 billion tokens, which is 6 FLOP
    per parameter and token."""
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=1e-3)
    # Narayanan et al. 2021, section 5.1: recomputed, at 140 TFLOP/s on each of 1024 GPUs, 34 days.
    assert round(training_flops(175e9, 300e9, "full") / (1024 * 140e12) / 86400) == 34
    assert training_flops(1, 1, "full") / training_flops(1, 1, "selective") == 8 / 6


def test_causal_attention_takes_half_the_flops() -> None:
    """Narayanan et al. 2021, appendix: 96·B·s·L·h²(1 + s/6h + V/16Lh) with recomputation, of which s/6h is
    attention's."""
    layers, width, seq = 96, 12288, 2048
    whole = 96 * seq * layers * width**2 * seq / (6 * width)
    assert attention_flops(layers, width, seq, seq, "full") == pytest.approx(whole / 2)
    assert attention_flops(1, 1, 1, 1) == 6


def test_message_time_agrees_with_all_reduce_time() -> None:
    ours = message_seconds(all_reduce_rounds("ring", 4), all_reduce_bytes("ring", 4, 4096), 1e-5, 1e9)
    assert ours == pytest.approx(all_reduce_seconds("ring", 4, 4096, 1e-5, 1e9), rel=1e-12)


def test_hidden_communication_costs_no_time() -> None:
    assert exposed_seconds(3.0, 2.0) == 1.0
    assert exposed_seconds(2.0, 3.0) == 0.0
