"""The order of a step: passes, layers, gradients and memory, as they came; calls are seen in tests/experiments."""

import torch
from torch import nn

from distlab.collectives.phases import heard, phase
from distlab.measure.event_order import Order, key_of
from distlab.measure.memory import MemoryLedger


def recorded(net: nn.Sequential) -> Order:
    """A step of two layers."""
    order = Order(dict(enumerate(net)))
    with MemoryLedger() as memory, memory.step(order), heard(order.mark):
        with phase("forward", "0"):
            loss = net(torch.ones(2, 3)).sum()
        with phase("backward", "0"):
            loss.backward()
    return order


def test_passes_layers_and_gradients_come_in_their_order() -> None:
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


def test_gradients_are_known_by_the_memory_that_they_lie_in() -> None:
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


def test_weights_that_come_and_go_are_seen_and_other_memory_is_not() -> None:
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
