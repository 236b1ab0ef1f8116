"""Called and wire bytes by peer, and the reason if wire bytes cannot be measured."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from distlab.lab.measure import traffic as module
from distlab.lab.measure.traffic import Connection, Ledger, NoDiagnostics, Traffic, connections
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.costs import TOLERATED_BYTES, all_reduce_bytes, all_reduce_messages, wire_tolerance
from distlab.techniques.collectives.point_to_point import Peers
from tests.warm_ranks import Ranks

MIB = 1 << 20


def ledger_of(group: dist.ProcessGroup, store_ports: Sequence[int] = ()) -> Ledger:
    def exchange(_: str, value: Any) -> list[Any]:
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    return Ledger(group.rank(), group.size(), exchange, store_ports)


def counted(group: dist.ProcessGroup, algorithm: str, repeats: int = 1) -> Traffic:
    """Return the traffic of `repeats` all_reduces of 1 MiB."""
    whole = torch.ones(MIB // 4)
    run: Callable[[], object] = (
        partial(dist.all_reduce, whole, group=group)
        if algorithm == "gloo"
        else partial(Collective(group, algorithm).all_reduce, whole)
    )
    with ledger_of(group).count() as traffic:
        for _ in range(repeats):
            run()
    return traffic


def amount(sender: int, receiver: int) -> int:
    """Return a number of bytes that identifies sender and receiver among three ranks."""
    return 2048 + 512 * ((sender + 3 * receiver) % 8)


def from_each_to_each(group: dist.ProcessGroup) -> Traffic:
    peers, rank = Peers(group), group.rank()
    others = [peer for peer in range(group.size()) if peer != rank]
    receives = [(peer, torch.empty(amount(peer, rank), dtype=torch.uint8)) for peer in others]
    sends = [(peer, torch.zeros(amount(rank, peer), dtype=torch.uint8)) for peer in others]
    with ledger_of(group).count() as traffic:
        for posted in peers.post(peers.new_tag(), receives, sends):
            for each in posted:
                each.wait()
    return traffic


def test_messages_between_all_ranks_are_counted_by_peer(ranks: Ranks) -> None:
    for rank, traffic in enumerate(ranks(3, from_each_to_each)):
        sent = {peer: amount(rank, peer) for peer in range(3) if peer != rank}
        assert traffic.called_bytes == sum(sent.values())
        assert {peer: traffic.wire[peer].sent for peer in sent} == pytest.approx(sent, abs=TOLERATED_BYTES)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["gloo", "ring", "server"])
def test_called_and_wire_bytes_equal_the_formula(ranks: Ranks, world_size: int, algorithm: str) -> None:
    for rank, traffic in enumerate(ranks(world_size, counted, algorithm, 3)):
        predicted = 3 * all_reduce_bytes(algorithm, world_size, MIB, rank)
        tolerance = wire_tolerance(predicted, 3 * all_reduce_messages(algorithm, world_size, MIB, rank))
        assert traffic.wire_error is None
        assert traffic.called_bytes == pytest.approx(predicted)
        assert predicted <= traffic.wire_bytes <= predicted + tolerance
        # The negative control: one call more or less is outside the tolerance.
        assert world_size == 1 or all_reduce_bytes(algorithm, world_size, MIB, rank) > tolerance


def test_a_ring_sends_only_to_its_neighbour(ranks: Ranks) -> None:
    for rank, traffic in enumerate(ranks(4, counted, "ring")):
        sent = {peer: wire.sent for peer, wire in traffic.wire.items()}
        successor = (rank + 1) % 4
        assert sent.pop(successor) == pytest.approx(1.5 * MIB, rel=0.01)
        assert max(sent.values()) < 4096  # gloo notifies the predecessor of a posted receive


def test_the_matrix_of_direct_is_full_and_of_server_a_cross(ranks: Ranks) -> None:
    for traffic in ranks(4, counted, "direct"):
        assert [wire.sent for wire in traffic.wire.values()] == [pytest.approx(0.5 * MIB, rel=0.01)] * 3
    for rank, traffic in enumerate(ranks(4, counted, "server")):
        expected = {peer: MIB if 0 in (rank, peer) else 0 for peer in range(4) if peer != rank}
        assert {peer: wire.sent for peer, wire in traffic.wire.items()} == pytest.approx(expected, rel=0.01, abs=4096)


def test_the_traffic_per_step(ranks: Ranks) -> None:
    one = ranks(2, counted, "gloo", 4)[0].per(4)
    assert [(seen.op, seen.calls, seen.raw_bytes, seen.called_bytes) for seen in one.called] == [
        ("all_reduce", 1, MIB, MIB)
    ]
    assert one.wire_bytes == one.wire[1].sent == pytest.approx(MIB, rel=0.01)
    assert one.calls == 1


def with_bystanders(group: dist.ProcessGroup) -> list[float]:
    """Send over a connection outside of the group, counted once as the store's and once as any other."""
    addresses: list[Any] = [None] * 2
    listener = socket.create_server(("127.0.0.1", 0)) if group.rank() == 0 else None
    dist.all_gather_object(addresses, listener and listener.getsockname(), group=group)
    end = listener.accept()[0] if listener else socket.create_connection(addresses[0])
    found = []
    for store_ports in ([1, addresses[0][1]], []):
        with ledger_of(group, store_ports).count() as traffic:
            end.sendall(b"x" * 10_000)
        found.append(traffic.wire_bytes)
    dist.barrier(group)
    end.close()
    if listener:
        listener.close()
    return found


def test_connections_of_the_store_are_left_out(ranks: Ranks) -> None:
    assert ranks(2, with_bystanders) == [[0, 10_000]] * 2


def from_one_port(group: dist.ProcessGroup) -> dict[int, float]:
    """Connect ranks 1 and 2 from the same local port to rank 0, which sends only to rank 1."""
    addresses: list[Any] = [None] * 3
    mine = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)] if group.rank() == 0 else []
    dist.all_gather_object(addresses, [each.getsockname() for each in mine], group=group)
    ends: list[Any] = [None] * 3
    near = socket.socket()
    if group.rank() > 0:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if group.rank() == 1:
            near.bind(("127.0.0.1", 0))
    dist.all_gather_object(ends, near.getsockname() if group.rank() == 1 else None, group=group)
    if group.rank() == 2:
        near.bind(ends[1])
    if group.rank() > 0:
        near.connect(addresses[0][group.rank() - 1])
    accepted = [each.accept()[0] for each in mine]
    with ledger_of(group).count() as traffic:
        if accepted:
            accepted[0].sendall(b"x" * 10_000)
    dist.barrier(group)
    for each in [near, *mine, *accepted]:
        each.close()
    return {peer: wire.sent for peer, wire in traffic.wire.items()}


def test_two_connections_with_one_local_port_are_distinguished(ranks: Ranks) -> None:
    assert ranks(3, from_one_port)[0] == {1: 10_000, 2: 0}


def idle(group: dist.ProcessGroup) -> Traffic:
    dist.all_reduce(torch.ones(MIB), group=group)
    with ledger_of(group).count() as traffic:
        pass
    return traffic


def test_earlier_bytes_are_not_counted(ranks: Ranks) -> None:
    for rank, traffic in enumerate(ranks(3, idle)):
        assert (traffic.called, traffic.calls, traffic.wire_bytes) == ([], 0, 0)
        assert set(traffic.wire) == {0, 1, 2} - {rank}


def counted_with(group: dist.ProcessGroup, on_rank_1: Callable[[Any], dict[int, Connection]], sends: bool) -> Traffic:
    instead = on_rank_1 if group.rank() == 1 else module.connections
    with patch.object(module, "connections", instead), ledger_of(group).count() as traffic:
        if sends:
            dist.all_reduce(torch.ones(8), group=group)
    return traffic


def refuse(*_: int) -> dict[int, Connection]:
    raise NoDiagnostics("wire bytes are not measured: refused")


def test_diagnostics_refused_on_one_rank_are_reported_on_all(ranks: Ranks) -> None:
    for traffic in ranks(2, counted_with, refuse, True):
        assert traffic.wire_error == "wire bytes are not measured: refused on rank 1"
        assert traffic.wire == {}
        assert traffic.called_bytes == 32  # called bytes are still known


def translated(*store_ports: int) -> dict[int, Connection]:
    """Return rank 1's connections as after address translation: its peers see another address of its end."""
    found = connections(*store_ports)
    return {inode: replace(each, local=("10.1.2.3", each.local[1])) for inode, each in found.items()}


def test_a_connection_without_a_known_peer_is_reported(ranks: Ranks) -> None:
    for traffic in ranks(2, counted_with, translated, True):
        assert traffic.wire_error is not None and traffic.wire == {}
        assert re.match(
            r"wire bytes are not known: rank \d has a connection from .* of which no rank", traffic.wire_error
        )
    assert [traffic.wire_error for traffic in ranks(2, counted_with, translated, False)] == [
        None
    ] * 2  # nothing was sent


def test_an_error_inside_passes_through() -> None:
    def never(*_: object) -> list[Any]:
        raise AssertionError("no exchange after an error")

    with pytest.raises(KeyError), Ledger(0, 1, never).count():
        raise KeyError("inside")


# The kernel's counters: exact to the byte for IPv4 and IPv6, and a clear error if there are none.


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; in the last case an IPv4 client of an IPv6 listener, as gloo and the store make
    them."""
    family = socket.AF_INET if request.param == "127.0.0.1" else socket.AF_INET6
    mapped = request.param.startswith("::ffff")
    with socket.create_server(
        ("::", 0) if mapped else (request.param, 0), family=family, dualstack_ipv6=mapped
    ) as listener:
        client = socket.create_connection((request.param.removeprefix("::ffff:"), listener.getsockname()[1]))
        server, _ = listener.accept()
        with client, server:
            yield client, server


def connection_of(end: socket.socket) -> Connection:
    return module.connections()[os.fstat(end.fileno()).st_ino]


def test_each_end_counts_what_it_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    assert connection_of(client).sent_bytes == 0
    client.sendall(b"x" * 100_000)
    server.sendall(b"y" * 7)
    assert connection_of(client).sent_bytes == 100_000
    assert connection_of(server).sent_bytes == 7
    client.sendall(b"x")
    assert connection_of(client).sent_bytes == 100_001


def test_bytes_in_the_send_buffer_count(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    client.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += client.send(b"z" * 100_000)  # the peer does not read, so the buffers of both ends fill up
    assert connection_of(client).sent_bytes == sent


def test_both_ends_have_matching_addresses(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = (connection_of(end) for end in pair)
    assert client.remote == server.local
    assert server.remote == client.local
    assert client.local[0] in ("127.0.0.1", "::1")  # never ::ffff:127.0.0.1


def test_only_this_process_is_counted(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    inode = os.fstat(client.fileno()).st_ino
    assert inode in module.connections()
    client.close()
    assert inode not in module.connections()


def refused(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "send", refused)
    with pytest.raises(NoDiagnostics, match=r"wire bytes are not measured.*Operation not permitted"):
        module.connections()


def test_a_system_without_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_NETLINK")
    with pytest.raises(NoDiagnostics, match="no TCP socket diagnostics"):
        module.connections()
