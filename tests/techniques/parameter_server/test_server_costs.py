"""Bytes of servers, compared with sums by hand and with each other at their limits."""

import pytest

from distlab.experiments.server.predictions import averaging_bytes, server_bytes
from distlab.techniques.collectives.costs import all_reduce_bytes


def test_bytes_of_a_server_and_of_its_workers() -> None:
    for ranks in range(2, 65):
        sent = [server_bytes(ranks, 1000, rank) for rank in range(ranks)]
        assert (sent[0], set(sent[1:])) == (1000.0 * (ranks - 1), {1000.0})
        assert sum(sent) == all_reduce_bytes("server", ranks, 1000) + 1000 * (ranks - 1)
        assert averaging_bytes(ranks, 1000, 5) == pytest.approx(all_reduce_bytes("gloo", ranks, 1000) / 5)
    assert server_bytes(4, 1000, 0, local_steps=4) == 750.0
