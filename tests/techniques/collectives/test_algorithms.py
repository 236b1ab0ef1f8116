"""The algorithms on up to 8 ranks of one process: results, bytes compared with the formula, sends, and no deadlock."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distlab.techniques.collectives import costs
from distlab.techniques.collectives import costs as formulas
from distlab.techniques.collectives.by_hand import ALGORITHMS, pick_over_tcp
from distlab.techniques.collectives.point_to_point import Peers, Steps, split
from tests.techniques.collectives.fabric import Deadlock, Fabric

BYTES: dict[str, Callable[..., float]] = {
    "all_reduce": formulas.all_reduce_bytes,
    "reduce_scatter": formulas.reduce_scatter_bytes,
    "all_gather": formulas.all_gather_bytes,
}


def inputs_of(world_size: int, length: int) -> list[Tensor]:
    return [torch.arange(length) + 100 * rank for rank in range(world_size)]


def run(algorithm: str, op: str, world_size: int, length: int, late: bool) -> tuple[Fabric, list[Tensor], list[Tensor]]:
    """Run an operation and return the fabric, every rank's tensor afterwards, and every rank's output."""
    fabric, module = Fabric(world_size, late), ALGORITHMS[algorithm]
    tensors = inputs_of(world_size, length)
    if op == "all_gather":
        for rank, tensor in enumerate(tensors):
            kept = split(tensor, world_size)[rank].clone()
            split(tensor.fill_(-1), world_size)[rank].copy_(kept)
    outputs = [torch.empty_like(split(tensor, world_size)[rank]) for rank, tensor in enumerate(tensors)]

    def steps(peers: Peers) -> Steps:
        arguments = [tensors[peers.rank], *([outputs[peers.rank]] if op == "reduce_scatter" else [])]
        yield from getattr(module, op)(peers, *arguments)

    fabric.run(steps)
    return fabric, tensors, outputs


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(ALGORITHMS)), st.sampled_from(sorted(BYTES)), st.integers(2, 8), st.integers(0, 40), st.booleans()
)  # fmt: skip
def test_results_and_bytes(algorithm: str, op: str, world_size: int, length: int, late: bool) -> None:
    fabric, tensors, outputs = run(algorithm, op, world_size, length, late)
    everyone = inputs_of(world_size, length)
    total = torch.stack(everyone).sum(0)
    if op == "all_reduce":
        assert all(torch.equal(tensor, total) for tensor in tensors)
    elif op == "reduce_scatter":
        assert all(torch.equal(output, split(total, world_size)[rank]) for rank, output in enumerate(outputs))
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, everyone, strict=True)), (
            "the input changed"
        )
    else:
        whole = torch.cat([split(tensor, world_size)[rank] for rank, tensor in enumerate(everyone)])
        assert all(torch.equal(tensor, whole) for tensor in tensors)
    predicted = [BYTES[op](algorithm, world_size, 8 * length, rank, itemsize=8) for rank in range(world_size)]
    assert fabric.sent_bytes == predicted


@pytest.mark.parametrize(
    ("algorithm", "world_size", "num_sends"),
    [
        ("ring", 5, [8] * 5),  # 2(N-1)
        ("direct", 5, [8] * 5),
        ("tree", 4, [4] * 4),  # 2·log2 N
        ("tree", 5, [5, 4, 4, 4, 1]),  # rank 4 folds into rank 0
        ("server", 5, [4, 1, 1, 1, 1]),
        ("ring", 2, [2, 2]),
    ],
)
def test_number_of_sends_of_an_all_reduce(algorithm: str, world_size: int, num_sends: list[int]) -> None:
    fabric, _, _ = run(algorithm, "all_reduce", world_size, 40, late=False)
    assert fabric.num_sends == num_sends


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("nbytes", [64 << 10, 3 << 20, 6 << 20])
def test_number_of_sends_over_plain_tcp(world_size: int, nbytes: int) -> None:
    fabric, name = Fabric(world_size, late=False), pick_over_tcp("all_reduce", nbytes, world_size)
    fabric.run(lambda peers: ALGORITHMS[name].all_reduce(peers, torch.ones(nbytes // 8, dtype=torch.int64)))
    predicted = [costs.all_reduce_messages("tcp", world_size, nbytes, rank) for rank in range(world_size)]
    assert fabric.num_sends == predicted


def test_scratch_memory_is_reused() -> None:
    fabric = Fabric(3, late=False)
    for _ in range(4):
        fabric.run(lambda peers: ALGORITHMS["ring"].all_reduce(peers, torch.ones(30)))
    assert [len(peers.memory._free) for peers in fabric.peers] == [2, 2, 2]
    before = [buffer.data_ptr() for buffer, _ in fabric.peers[0].memory._free]
    fabric.run(lambda peers: ALGORITHMS["ring"].all_reduce(peers, torch.ones(30)))
    assert sorted(buffer.data_ptr() for buffer, _ in fabric.peers[0].memory._free) == sorted(before)


def sends_before_it_receives(peers: Peers) -> Steps:
    tensor = torch.ones(1)
    _, sent = peers.post(1, sends=[(peers.after(1), tensor)])
    yield from sent
    received, _ = peers.post(1, receives=[(peers.after(-1), tensor)])
    yield from received


def overwrites_a_tensor_in_flight(peers: Peers) -> Steps:
    outgoing, incoming = torch.ones(1), torch.zeros(1)
    received, sent = peers.post(1, [(peers.after(-1), incoming)], [(peers.after(1), outgoing)])
    outgoing.zero_()
    yield from (*received, *sent)
    assert incoming.item() == 1, "changed on the way"


def test_fabric_detects_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"ranks \[0, 1, 2\] wait"):
        Fabric(3, late=False).run(sends_before_it_receives)


def test_fabric_detects_a_tensor_changed_in_flight() -> None:
    with pytest.raises(AssertionError, match="changed on the way"):
        Fabric(2, late=True).run(overwrites_a_tensor_in_flight)


def test_fabric_detects_a_send_without_receive() -> None:
    def steps(peers: Peers) -> Steps:
        peers.post(1, sends=[(peers.after(1), torch.ones(1))])
        return
        yield

    with pytest.raises(AssertionError, match="nobody receives"):
        Fabric(2, late=False).run(steps)
