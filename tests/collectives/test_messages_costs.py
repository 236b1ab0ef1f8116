"""The numbers of messages against what the sockets sent beside the tensors: 144 B a message, to the byte."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from distlab.collectives.by_hand import Collective
from distlab.collectives.costs import (
    FRAMES_BYTES,
    all_gather_bytes,
    all_reduce_bytes,
    all_reduce_messages,
    gloo_all_reduce_messages,
    half_messages,
    reduce_scatter_bytes,
    wire_tolerance,
)
from distlab.measure.prediction import Prediction
from distlab.testing.warm_ranks import Ranks
from tests.measure.test_ledger import ledger_of

NAMES = ("gloo", "ring", "direct", "tree", "server")


def beside_the_tensors(group: dist.ProcessGroup, length: int) -> dict[tuple[str, str], float]:
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
    for rank, found in enumerate(ranks(world_size, beside_the_tensors, length)):
        for (op, name), added in found.items():
            counted = (
                all_reduce_messages(name, world_size, 4 * length, rank)
                if op == "all_reduce"
                else half_messages(name, op, world_size, 4 * length, rank)
            )
            # Who receives more than it sends, or sends more, adds less: both ends frame a message.
            assert added <= FRAMES_BYTES * counted, (op, name, rank)
            exact = name != "tree" and (op, name) != ("all_gather", "server")
            assert added == FRAMES_BYTES * counted or not exact, (op, name, rank)


def test_a_long_all_reduce_of_gloo_is_cut_into_more_messages() -> None:
    assert gloo_all_reduce_messages(4, 1) == gloo_all_reduce_messages(4, 8 << 20) == 12
    assert gloo_all_reduce_messages(2, 8 << 20) == 8  # measured: 1152 B beside the tensor
    assert gloo_all_reduce_messages(3, 12 << 20) == 16
    assert gloo_all_reduce_messages(1, 12 << 20) == 0


def test_an_empty_chunk_is_no_message() -> None:
    assert half_messages("ring", "all_gather", 5, 4 * 2) == 2
    assert all_reduce_messages("direct", 2, 4) == 1


def test_the_tolerance_is_below_one_message_of_a_kilobyte() -> None:
    assert wire_tolerance(1e6, 2) == 1e4 + 320
    assert wire_tolerance(1024, 1) < 1024


def test_a_prediction_without_messages_counts_each_call_as_a_short_all_reduce() -> None:
    assert Prediction("flat", "wire bytes", "B", "", (0.0,) * 3, 2).messages_of(1) == 2 * gloo_all_reduce_messages(3, 1)
    assert Prediction("flat", "wire bytes", "B", "", (0.0,) * 3, 2, messages=(5, 6, 7)).messages_of(1) == 6
