"""The process group over plain TCP: its connections, every call compared with gloo's at any length and layout, and
PyTorch's DDP and FSDP on top of it."""

import copy
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distlab
from distlab.lab.measure.traffic import Calls
from distlab.techniques.collectives.by_hand import ALGORITHMS, Collective
from distlab.techniques.collectives.point_to_point import split
from distlab.techniques.transport.process_group import TcpBackend
from distlab.techniques.transport.tcp import Channel, LinkError
from tests.techniques.transport.linked import on_threads
from tests.techniques.transport.strangers import FORGED, HERE, answer_to, silent

KEY = b"the key"


def connected(store: dist.Store, own: int, others: list[int], bound_s: float = 5.0) -> dict[int, socket.socket]:
    return TcpBackend(HERE, KEY).connect(store, own, others, bound_s)


def port_of(store: dist.Store, rank: int) -> int:
    store.wait([f"tcp/{rank}"])
    return int(store.get(f"tcp/{rank}").decode().split()[1])


def test_every_two_ranks_have_one_connection() -> None:
    assert on_threads(4, lambda channel: channel.transport.ranks) == [{0, 1, 2, 3} - {rank} for rank in range(4)]


def test_a_missing_rank_is_named_within_the_timeout() -> None:
    began = time.monotonic()
    with pytest.raises(LinkError, match="no connection from rank 1, 2 within the timeout"):
        connected(dist.HashStore(), 0, [1, 2], 0.3)
    with pytest.raises(LinkError, match="no connection to rank 0"):
        connected(dist.HashStore(), 1, [0], 0.3)
    assert time.monotonic() - began < 5


def test_200_silent_connections_do_not_delay_the_timeout() -> None:
    """Each once took a second: 12 s and 52 s after the start, with a timeout of 2 s, no rank was named."""
    store = dist.HashStore()

    def intrude() -> None:
        with silent(port_of(store, 0), 200):
            ended.wait(30)

    ended = threading.Event()
    stranger = threading.Thread(target=intrude)
    stranger.start()
    began = time.monotonic()
    with pytest.raises(LinkError, match="no connection from rank 1 within the timeout"):
        connected(store, 0, [1], 2.0)
    assert time.monotonic() - began < 4
    ended.set()
    stranger.join(5)


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_a_client_without_the_key_is_rejected(data: bytes) -> None:
    """Although it knows the addresses in the store, which was once enough to be accepted as rank 1."""
    store = dist.HashStore()

    def intrude() -> None:
        answer_to(port_of(store, 0), data)
        intruded.set()

    def be_rank() -> None:
        intruded.wait(20)
        found.update(connected(store, 1, [0]))

    intruded = threading.Event()
    found: dict[int, socket.socket] = {}
    threads = [threading.Thread(target=each) for each in (intrude, be_rank)]
    for each in threads:
        each.start()
    connections = connected(store, 0, [1])
    for each in threads:
        each.join(5)
    connections[1].sendall(b"it is you")
    assert found[0].recv(9, socket.MSG_WAITALL) == b"it is you"
    for connection in (connections[1], found[0]):
        connection.close()


def test_a_stranger_that_listens_in_place_of_a_rank_is_rejected() -> None:
    store = dist.HashStore()
    with socket.create_server((HERE, 0)) as listening:
        store.set("tcp/0", f"{HERE} {listening.getsockname()[1]}")

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"x" * 200)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LinkError, match="no connection to rank 0: it does not speak this protocol"):
            connected(store, 1, [0], 2.0)


def test_each_channel_and_tag_has_its_own_key() -> None:
    def run(channel: Channel) -> int:
        keys = [
            Channel(channel.transport, channel.ranks, channel.rank, name)._key(tag)
            for name in ("a", "b")
            for tag in (-5, 0, 5)
        ]
        return len(set(keys))

    assert on_threads(1, run) == [6]


LENGTHS = (0, 1, 5, 1000, 200_003)  # the last one goes straight, of three ranks
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def numbers(length: int, rank: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * length + rank), dtype=torch.float64)


@distlab.ranks(1, 2, 3, backend="tcp", timeout_s=60)
def test_sums_are_those_of_one_process(rank: int, world_size: int) -> None:
    for length in LENGTHS:
        everyone = torch.stack([numbers(length, each) for each in range(world_size)])
        folds = (everyone.sum(0), everyone.amax(0), everyone.amin(0), everyone.prod(0))
        for op, wanted in zip(OPS, folds, strict=True):
            own = numbers(length, rank)
            dist.all_reduce(own, op)
            torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
        mean, to_last = numbers(length, rank), numbers(length, rank)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, folds[0] / world_size, rtol=1e-12, atol=1e-12)
        dist.reduce(to_last, world_size - 1)
        torch.testing.assert_close(to_last, folds[0] if rank == world_size - 1 else numbers(length, rank))
        chunk, whole = torch.empty(length, dtype=torch.float64), everyone.roll(rank, 0).flatten()
        dist.reduce_scatter_tensor(chunk, whole)
        torch.testing.assert_close(chunk, folds[0], rtol=1e-12, atol=1e-12)


TYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


@distlab.ranks(2, 3, backend="tcp", timeout_s=60)
def test_sums_of_small_integers_are_exact_in_all_types(rank: int, world_size: int) -> None:
    for dtype in TYPES:
        everyone = torch.stack([(torch.arange(5) + 2 * each) % 3 + 1 for each in range(world_size)]).to(dtype)
        wanted, last = everyone.sum(0).to(dtype), world_size - 1
        summed, to_last, chunk = everyone[rank].clone(), everyone[rank].clone(), torch.zeros(5, dtype=dtype)
        dist.all_reduce(summed)
        dist.reduce(to_last, last)
        dist.reduce_scatter(chunk, list(everyone))
        passed = torch.zeros(5, dtype=dtype)
        sent = dist.isend(everyone[rank], (rank + 1) % world_size)
        dist.recv(passed, (rank - 1) % world_size)
        assert sent is not None
        sent.wait()
        assert torch.equal(summed, wanted), dtype
        assert torch.equal(to_last, wanted if rank == last else everyone[rank]), dtype
        assert torch.equal(chunk, world_size * everyone[rank]), dtype
        assert torch.equal(passed, everyone[rank - 1]), dtype


@distlab.ranks(2, 3, backend="tcp", timeout_s=20)
def test_some_ranks_wait_at_once_and_others_later(rank: int, world_size: int) -> None:
    for length in LENGTHS:
        own, copied = torch.full((length,), rank + 1.0), torch.full((length,), float(rank))
        places = [torch.empty(length) for _ in range(world_size)]
        works = [
            dist.all_reduce(own, async_op=rank > 0),
            dist.broadcast(copied, 1, async_op=rank > 0),
            dist.all_gather(places, torch.full((length,), float(rank)), async_op=rank > 0),
        ]
        for work in works:
            if work is not None:
                work.wait()
        assert torch.equal(own, torch.full((length,), world_size * (world_size + 1) / 2))
        assert torch.equal(copied, torch.ones(length))
        assert [place.tolist() for place in places] == [[float(peer)] * length for peer in range(world_size)]


@distlab.ranks(1, 2, 3, backend="tcp", timeout_s=60)
def test_copies_arrive_at_the_right_ranks(rank: int, world_size: int) -> None:
    last = world_size - 1
    for length in LENGTHS:
        everyone = [numbers(length, each) for each in range(world_size)]
        own = everyone[rank].clone()
        dist.broadcast(own, last)
        assert torch.equal(own, everyone[last])
        places = [torch.empty(length, dtype=torch.float64) for _ in everyone]
        dist.all_gather(places, everyone[rank])
        assert all(map(torch.equal, places, everyone))
        whole = torch.empty(world_size * length, dtype=torch.float64)
        dist.all_gather_into_tensor(whole, everyone[rank])
        assert torch.equal(whole, torch.cat(everyone))
        dist.gather(everyone[rank], places if rank == last else None, last)
        place = torch.empty(length, dtype=torch.float64)
        dist.scatter(place, everyone if rank == last else None, last)
        assert torch.equal(place, everyone[rank])
        dist.all_to_all_single(whole, torch.cat([each + rank for each in everyone]))
        assert torch.equal(whole, torch.cat([everyone[rank] + each for each in range(world_size)]))


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_parts_of_unequal_length(rank: int, world_size: int) -> None:
    sizes = [[(row + 2 * column) % 4 for column in range(world_size)] for row in range(world_size)]
    place = torch.empty(sum(sizes[other][rank] for other in range(world_size)))
    parts = torch.cat([torch.full((size,), float(10 * rank + peer)) for peer, size in enumerate(sizes[rank])])
    dist.all_to_all_single(place, parts, [sizes[other][rank] for other in range(world_size)], sizes[rank])
    assert torch.equal(
        place, torch.cat([torch.full((sizes[other][rank],), 10.0 * other + rank) for other in range(world_size)])
    )


@distlab.ranks(2, backend="tcp")
def test_a_tensor_that_is_not_contiguous_is_summed_in_place() -> None:
    across = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(across)
    assert torch.equal(across, 2 * torch.arange(6.0).view(2, 3).t())


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_asynchronous_calls_end_in_any_order(rank: int) -> None:
    for length in (5, 200_003):
        tensors = [torch.full((length,), float(turn)) for turn in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        order = range(4) if rank else reversed(range(4))
        for turn in order:
            work = works[turn]
            assert work is not None
            work.wait()
        assert [float(tensor[-1]) for tensor in tensors] == [0.0, 3.0, 6.0, 9.0]


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_some_ranks_wait_at_once_for_a_sum_that_others_run_asynchronously(rank: int) -> None:
    for waits in range(3):
        tensor = torch.ones(5)
        work = dist.all_reduce(tensor, async_op=rank != waits)
        if work is not None:
            work.wait()
        assert tensor.tolist() == [3.0] * 5


@distlab.ranks(2, backend="tcp", timeout_s=60)
def test_an_asynchronous_call_continues_during_another_wait(rank: int) -> None:
    large, token = torch.full((3_000_000,), 1.0), torch.zeros(1)
    work = dist.all_reduce(large, async_op=True)
    assert work is not None
    if rank == 0:
        work.wait()
        dist.send(token, 1)
    else:
        dist.recv(token, 0)  # it arrives after the sum, for which rank 0 needs this rank
        work.wait()
    assert float(large[-1]) == 2


@distlab.ranks(2, backend="tcp")
def test_an_unknown_operation_is_refused() -> None:
    premultiplied = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(ValueError, match="the backend tcp has no operation PREMUL_SUM, allowed: SUM, AVG, PRODUCT"):
        dist.all_reduce(torch.ones(3), premultiplied)
    whole, chunk = torch.ones(4), torch.ones(2)
    with pytest.raises(ValueError, match="the backend tcp has no operation PREMUL_SUM"):
        dist.reduce_scatter_tensor(chunk, whole, premultiplied)
    dist.all_reduce(whole)
    assert whole.tolist() == [2.0] * 4


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_all_send_before_they_receive(rank: int, world_size: int) -> None:
    own, place = torch.full((2_000_000,), float(rank)), torch.empty(2_000_000)
    sent = dist.isend(own, (rank + 1) % world_size)
    dist.recv(place, (rank - 1) % world_size)
    assert sent is not None
    sent.wait()
    assert float(place[-1]) == (rank - 1) % world_size


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_sends_do_not_change_the_number_of_collectives(rank: int) -> None:
    word = torch.full((1,), float(rank))
    if rank == 0:
        dist.send(word, 1)
    elif rank == 1:
        dist.recv(word, 0)
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.full((1,), float(rank)))
    assert [each.item() for each in gathered] == [0, 1, 2]


@contextmanager
def counted_calls() -> Iterator[dict[str, float]]:
    """Calls by operation."""
    found: dict[str, float] = {}
    with Calls() as calls:
        yield found
    found.update({entry.op: entry.calls for entry in calls.ops()})


@distlab.ranks(2, backend="tcp")
def test_call_counters_see_the_calls(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(4)
    with counted_calls() as found:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(torch.empty(8), tensor)
        Collective(group, "server").all_reduce(tensor)
        dist.barrier()
    assert found == {"all_reduce": 1, "broadcast": 1, "all_gather": 1, "send": 1}


@distlab.ranks(2, backend="tcp", timeout_s=60)
def test_ddp_computes_what_one_process_does(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 200).double()
    one, inputs = copy.deepcopy(model), torch.randn(2, 5, 300, dtype=torch.float64)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(inputs[rank]).square().sum().backward()
    one(inputs.flatten(0, 1)).square().sum().div(2).backward()
    torch.testing.assert_close(model.weight.grad, one.weight.grad, rtol=1e-12, atol=1e-12)


@distlab.ranks(4, backend="tcp", timeout_s=90, mesh={"dp": 2, "tp": 2})
def test_fully_shard_over_dtensor_computes_what_one_process_does(mesh: dist.DeviceMesh) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()

    one, model = made(), made()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    inputs = torch.randn(3, 6, dtype=torch.float64)
    for each in (model, one):
        each(inputs).square().sum().backward()
    for sharded, whole in zip(model.parameters(), one.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)


def named(op: str, collective: Collective, own: Tensor) -> Tensor:
    """Return the result of a hand-written operation on this rank."""
    peers = collective.peers
    chunk = split(own, peers.world_size)[peers.rank].clone()
    if op == "all_reduce":
        collective.all_reduce(own)
    elif op == "reduce_scatter":
        collective.reduce_scatter(chunk, own)
        return chunk
    else:
        collective.all_gather(own, chunk)
    return own


@distlab.ranks(1, 2, 3, timeout_s=60)
def test_hand_written_collectives_over_a_channel_equal_those_over_gloo(group: dist.ProcessGroup, rank: int) -> None:
    store = dist.PrefixStore("channel", dist.distributed_c10d._get_default_store())
    channel = TcpBackend("127.0.0.1", b"the key").channel(store, range(group.size()), rank, "by hand", 20)
    channel.transport.groups += 1
    for name, length, op in product([*ALGORITHMS, "auto"], LENGTHS, ("all_reduce", "reduce_scatter", "all_gather")):
        over_gloo = named(op, Collective(group, "ring"), numbers(length, rank))
        over_tcp = named(op, Collective(group, name, carrier=channel), numbers(length, rank))
        torch.testing.assert_close(over_tcp, over_gloo, rtol=1e-12, atol=1e-12, msg=f"{name} {op} {length}")
    channel.transport.leave()
