"""Samples of messages: copies from before and after each call, and informative positions."""

import pytest
import torch
import torch.distributed as dist

from distlab.lab.measure.event_order import Messages
from distlab.lab.measure.samples import Samples, place_of
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("values", "window", "place"),
    [
        ([0.0, 0.0, 0.5, 0.25, 0.125], (0, None), 2),
        ([1.0, 1.0, 0.5, 0.25, 0.125], (0, None), 2),  # a norm's weights
        ([0.5, 0.25, 0.125, 4.0, 5.0, 6.0], (3, 3), 3),
        ([0.0, 0.0, 0.0, 0.0, 7.0], (0, None), 2),  # the three numbers include the informative one
        ([1e-9, 1e-9, 1e-9, 2.0, 3.0, 4.0], (0, None), 3),
        ([0.0, 0.0], (0, None), 0), ([], (0, None), 0),
        ([float("nan"), 0.5, 0.25, 0.125], (0, None), 1),
    ],
)  # fmt: skip
def test_the_first_informative_position(values: list[float], window: tuple[int, int | None], place: int) -> None:
    assert place_of(torch.tensor(values), *window) == place


def carried(group: dist.ProcessGroup) -> list[tuple[str, list[float], list[float], bool, str]]:
    """Sample a sum that is waited for immediately, and one inside a layer that is waited for later."""
    layer = torch.nn.Sequential(torch.nn.Identity())
    samples = Samples({3: layer}, 1 << 20)
    messages = Messages(samples)
    tensor = torch.full((3,), float(group.rank() + 1))
    with samples.watched(), messages.recorded():
        dist.all_reduce(tensor, group=group)
        tensor.mul_(10)  # the output was copied before
        handle = []
        layer[0].register_forward_hook(lambda *_: handle.append(dist.all_reduce(tensor, group=group, async_op=True)))
        layer(torch.ones(1))
        handle[0].wait()
    return [
        (each.op, each.inputs.at(0), each.outputs.at(0) if each.outputs else [], each.at_once, each.inside)
        for each in samples.found
    ]


def test_numbers_before_and_after(ranks: Ranks) -> None:
    for rank, (first, second) in enumerate(ranks(2, carried)):
        assert first == ("all_reduce", [rank + 1.0] * 3, [3.0] * 3, True, "")
        assert second == ("all_reduce", [30.0] * 3, [60.0] * 3, False, "3")


def beyond(group: dist.ProcessGroup) -> list[int]:
    samples = Samples({}, 40)
    messages = Messages(samples)
    with samples.watched(), messages.recorded():
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group)
    return [len(each.inputs.at(0)) for each in samples.found]


def test_no_more_bytes_are_copied_than_allowed(ranks: Ranks) -> None:
    assert ranks(2, beyond) == [[3, 3, 0]] * 2
