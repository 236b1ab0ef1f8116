"""The order of events in a step: passes, layers, gradients and memory. tests/experiments has tests of calls."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.lab.measure.event_order import Message, Messages, Order, key_of
from distlab.lab.measure.memory import MemoryLedger
from distlab.techniques.collectives.phases import listening, phase
from distlab.techniques.collectives.point_to_point import Peers, Pending
from distlab.techniques.collectives.ring import all_reduce
from distlab.techniques.transport.process_group import TcpBackend
from tests.warm_ranks import Ranks


def recorded(net: nn.Sequential) -> Order:
    """Return the order of one step of two layers."""
    order = Order(dict(enumerate(net)))
    with MemoryLedger() as memory, memory.step(order), listening(order.mark):
        with phase("forward", "0"):
            loss = net(torch.ones(2, 3)).sum()
        with phase("backward", "0"):
            loss.backward()
    return order


def test_passes_layers_and_gradients_are_recorded_in_order() -> None:
    order = recorded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    assert [(event.what, event.name, event.label) for event in order.events][:6] == [
        ("begin", "forward", "0"), ("begin", "layer", "0"), ("end", "layer", "0"),
        ("begin", "layer", "1"), ("end", "layer", "1"), ("end", "forward", "0"),
    ]  # fmt: skip
    ((label, events),) = order.within("backward")
    assert label == "0"
    layers = [event.label.split(".")[0] for event in events if event.what == "gradient"]
    assert layers == ["1", "1", "0", "0"]
    assert order.events[-1] == ("end", "backward", "0", 0, frozenset())


def test_gradients_are_identified_by_their_storage() -> None:
    first = nn.Linear(3, 4)
    order = recorded(nn.Sequential(first, nn.Linear(4, 1)))
    assert set(order.gradients) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    grad = first.weight.grad
    assert grad is not None
    assert order.gradients["0.weight"] == key_of(grad)
    assert len(set(order.gradients.values())) == 4


def test_a_shared_weight_has_the_name_of_its_first_layer() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    order = recorded(net)
    assert [event.label for event in order.events if event.what == "gradient"] == ["0.weight"]


def test_resized_weights_are_recorded_and_other_memory_is_not() -> None:
    layer = nn.Linear(3, 4)
    order = Order({0: layer})
    other = torch.ones(5)
    with MemoryLedger() as memory, memory.step(order):
        storage = layer.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(48)
        other.untyped_storage().resize_(0)
    assert [event.nbytes for event in order.events if event.what == "held"] == [0, 48]
    assert {next(iter(event.storages)) for event in order.events} == {order.weights["0.weight"]}


# Every message of a step is recorded, from any sender, with its ranks, its bytes and its end.

pytestmark = pytest.mark.timeout(60)


def recorded_messages(group: dist.ProcessGroup) -> list[Message]:
    """Record torch's all_reduce, a send around the ring, an all_gather and a barrier; a later call is not recorded."""
    tensor, peers = torch.ones(3, dtype=torch.float64), Peers(group)
    messages = Messages()
    with messages.recorded():
        dist.all_reduce(tensor, group=group)
        received, sent = peers.post(5, receives=[(peers.after(-1), tensor.clone())], sends=[(peers.after(1), tensor)])
        time.sleep(0.02)
        for message in (*received, *sent):
            message.wait()
        messages.record_ends()
        dist.all_gather([torch.empty(3, dtype=torch.float64) for _ in range(group.size())], tensor, group=group)
        dist.barrier(group)
    dist.all_reduce(tensor, group=group)
    return messages.found


def test_each_call_has_its_ranks_its_bytes_and_its_end(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(3, recorded_messages)):
        by_op = {message.op: message for message in found}
        assert [message.op for message in found] == ["all_reduce", "recv", "send", "all_gather"]
        assert by_op["all_reduce"].ranks == by_op["all_gather"].ranks == (0, 1, 2)
        assert by_op["send"].ranks == (rank, (rank + 1) % 3) and by_op["recv"].ranks == ((rank - 1) % 3, rank)
        assert [round(message.sent_bytes) for message in found] == [32, 0, 24, 48]  # 2(N-1)/N of 24, 24, 2/3 of 72
        assert (by_op["send"].tag, by_op["recv"].nbytes, by_op["all_gather"].nbytes) == (5, 24, 72)
        assert all(message.start_s <= message.end_s for message in found)
        assert by_op["recv"].end_s - by_op["recv"].start_s >= 0.02  # its end is the end of its wait


def awaited_over_tcp(group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the recorded seconds of an all_reduce over plain TCP, and those until its wait has returned."""
    TcpBackend("127.0.0.1", b"the key").register()  # in place of an earlier test's, with a key that other ranks lack
    ranks, bound = dist.get_process_group_ranks(group), timedelta(seconds=20)
    over_tcp = dist.new_group(ranks, bound, "tcp")
    messages = Messages()
    with messages.recorded():
        began = time.perf_counter()
        dist.all_reduce(torch.ones(3), group=over_tcp, async_op=True).wait()
        waited = time.perf_counter() - began
        messages.record_ends()
        time.sleep(0.5)
    return messages.found[0].end_s - messages.found[0].start_s, waited


def test_a_call_over_tcp_ends_with_its_work_and_not_with_the_block(ranks: Ranks) -> None:
    for recorded_s, waited_s in ranks(2, awaited_over_tcp):
        assert recorded_s < waited_s + 0.25


def rings(group: dist.ProcessGroup) -> tuple[int, float]:
    """Return the number of messages of a hand-written ring, and their bytes."""
    tensor, messages = torch.ones(1000), Messages()
    with messages.recorded():
        Pending(all_reduce(Peers(group), tensor)).wait()
    return len(messages.found), sum(message.sent_bytes for message in messages.found)


def test_a_hand_written_ring_is_recorded_as_its_messages(ranks: Ranks) -> None:
    for number, nbytes in ranks(3, rings):
        assert number == 2 * 2 * 2  # a send and a receive in each of 2(N-1) rounds
        assert nbytes == pytest.approx(2 * 2 / 3 * 4000, rel=0.01)


def uneven(group: dist.ProcessGroup) -> list[Message]:
    """Send 1 + 2·o rows of 3 numbers from each rank to rank o."""
    rows_sent, rows_received = [1, 3, 5], [1 + 2 * group.rank()] * 3
    with Messages().recorded() as messages:
        dist.all_to_all_single(
            torch.empty(sum(rows_received), 3), torch.ones(9, 3), rows_received, rows_sent, group=group
        )
    return messages.found


def test_an_uneven_all_to_all_is_what_goes_to_the_others(ranks: Ranks) -> None:
    found = [[(each.op, each.nbytes, each.sent_bytes) for each in of_rank] for of_rank in ranks(3, uneven)]
    assert found == [[("all_to_all", 108, 12.0 * (9 - kept))] for kept in (1, 3, 5)]


def alone(group: dist.ProcessGroup) -> int:
    with Messages().recorded() as messages:
        dist.all_reduce(torch.ones(1), group=group)
    return len(messages.found)


def test_a_group_of_one_sends_nothing(ranks: Ranks) -> None:
    assert ranks(1, alone) == [0]
