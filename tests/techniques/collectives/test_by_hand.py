"""The hand-written collectives compared with plain sums, for any algorithm, world size, length and dtype."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlab.lab.measure.traffic import Calls
from distlab.techniques.collectives import by_hand, direct
from distlab.techniques.collectives.by_hand import ALGORITHMS, Collective, pick
from distlab.techniques.collectives.point_to_point import GroupMessage, Steps, split
from tests.warm_ranks import RankFailed, Ranks

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
NAMES = [*ALGORITHMS, "backend", "auto"]


def inputs(world_size: int, length: int, dtype: str) -> list[torch.Tensor]:
    """The inputs of all ranks, which every rank can compute. Sums of these floats round, so their order matters."""
    draws = [torch.Generator().manual_seed(1000 * length + rank) for rank in range(world_size)]
    if dtype == "int64":
        return [torch.randint(-1000, 1000, (length,), generator=draw) for draw in draws]
    return [torch.randn(length, generator=draw, dtype=torch.float64).to(DTYPES[dtype]) for draw in draws]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1, torch.int64: 0.0}[got.dtype]
    return got.shape == wanted.shape and torch.allclose(got.double(), wanted.double(), rtol=0, atol=tolerance)


def run_all(group: dist.ProcessGroup, name: str, length: int, dtype: str, in_place: bool) -> dict[str, object]:
    """Run all three operations twice; return the bits of the results and a list of faults."""
    rank, world_size = group.rank(), group.size()
    everyone = inputs(world_size, length, dtype)
    exact = torch.stack([tensor.double() for tensor in everyone]).sum(0).to(DTYPES[dtype])
    collective = Collective(group, name)
    faults: list[str] = []
    bits = []
    for turn in range(2):
        contribution = everyone[rank].clone()
        summed = contribution.clone() if in_place else torch.empty_like(contribution)
        collective.all_reduce(summed if in_place else contribution, None if in_place else summed)
        if not close(summed, exact):
            faults.append(f"all_reduce {turn}: {summed} is not {exact}")
        if not torch.equal(contribution, everyone[rank]):
            faults.append("all_reduce changed its input")
        whole = everyone[rank].clone()
        chunk = split(whole, world_size)[rank] if in_place else torch.empty_like(split(whole, world_size)[rank])
        collective.reduce_scatter(chunk, whole)
        if not close(chunk, split(exact, world_size)[rank]):
            faults.append(f"reduce_scatter {turn}: {chunk}")
        gathered = torch.full_like(whole, -1)
        mine = split(gathered, world_size)[rank].copy_(chunk) if in_place else chunk
        collective.all_gather(gathered, mine)
        if not close(gathered, exact):
            faults.append(f"all_gather {turn}: {gathered}")
        bits.append([tensor.view(torch.uint8).tolist() if tensor.numel() else [] for tensor in (summed, gathered)])
    if bits[0] != bits[1]:
        faults.append("the second run differs from the first")
    return {"bits": bits[0], "faults": faults}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_sums_at_any_length_dtype_and_world_size(ranks: Ranks, name: str, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    length = data.draw(st.one_of(st.sampled_from([0, 1, 2, 3, 5]), st.integers(6, 3000)))
    dtype, in_place = data.draw(st.sampled_from(sorted(DTYPES))), data.draw(st.booleans())
    if name == "backend" and (dtype == "bfloat16" or length == 0):
        dtype, length = "float32", max(length, 1)
    results = ranks(world_size, run_all, name, length, dtype, in_place)
    assert [result["faults"] for result in results] == [[]] * world_size
    assert all(result["bits"] == results[0]["bits"] for result in results), "ranks hold different bits"


@pytest.mark.parametrize("name", NAMES)
def test_tensors_longer_than_a_block(ranks: Ranks, name: str) -> None:
    """1.5 MiB per rank: a sum takes several blocks, of which the last is shorter."""
    results = ranks(3, run_all, name, 3 * 400_001 + 1, "float32", True, timeout_s=100)
    assert [result["faults"] for result in results] == [[]] * 3
    assert all(result["bits"] == results[0]["bits"] for result in results)


def three_calls_in_flight(group: dist.ProcessGroup, name: str) -> bool:
    """Start three all_reduces and wait for them in the order in which they began."""
    collective = Collective(group, name)
    tensors = [torch.full((1000 + index,), float(index + 1)) for index in range(3)]
    pending = [collective.all_reduce(tensor, async_op=True) for tensor in tensors]
    for one in pending:
        one.wait()
        one.wait()
    return all(bool((tensor == group.size() * (index + 1)).all()) for index, tensor in enumerate(tensors))


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_in_flight(ranks: Ranks, name: str) -> None:
    assert ranks(4, three_calls_in_flight, name) == [True] * 4


def calls_of(group: dist.ProcessGroup, name: str, length: int) -> list[tuple[str, float]]:
    with Calls() as calls:
        Collective(group, name).all_reduce(torch.ones(length))
    return [(entry.op, entry.calls) for entry in calls.ops()]


def test_number_of_calls(ranks: Ranks) -> None:
    assert ranks(4, calls_of, "ring", 100) == [[("send", 6)]] * 4
    assert ranks(4, calls_of, "direct", 100) == [[("send", 6)]] * 4
    assert ranks(2, calls_of, "direct", 101) == [[("send", 1)]] * 2
    assert ranks(4, calls_of, "tree", 100) == [[("send", 4)]] * 4
    assert ranks(4, calls_of, "backend", 100) == [[("all_reduce", 1)]] * 4
    assert ranks(4, calls_of, "auto", 100) == [[("send", 3)], *[[("send", 1)]] * 3]
    assert ranks(4, calls_of, "direct", 0) == [[]] * 4
    assert ranks(1, calls_of, "ring", 100) == [[]]


def errors_of_wrong_calls(group: dist.ProcessGroup) -> list[str]:
    collective, sentences = Collective(group), []
    whole = torch.zeros(9)
    wrong: list[Callable[[], object]] = [
        lambda: collective.reduce_scatter(torch.zeros(6), whole),
        lambda: collective.all_gather(whole, torch.zeros(5, dtype=torch.float64)),
        lambda: collective.all_reduce(torch.zeros(4, 4).t()[1:]),
        lambda: Collective(group, "rign"),
    ]
    for call in wrong:
        try:
            call()
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def test_errors_name_the_allowed_arguments(ranks: Ranks) -> None:
    first, second, third, fourth = ranks(2, errors_of_wrong_calls)[0]
    assert "output has 6 elements" in first
    assert "of 9 elements of torch.float32 has 5" in first
    assert "torch.float64" in second
    assert "not contiguous" in third
    assert "'rign' is not one of ring, direct" in fourth


class Forgetful:
    """An algorithm that never adds: each rank keeps its input."""

    @staticmethod
    def all_reduce(*_: object) -> Steps:
        yield from ()

    reduce_scatter = all_gather = all_reduce


def run_forgetful(group: dist.ProcessGroup) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "ring", Forgetful)
        return run_all(group, "ring", 12, "float32", True)


def test_negative_control_wrong_sum_is_detected(ranks: Ranks) -> None:
    for result in ranks(2, run_forgetful):
        assert {str(fault).split()[0] for fault in result["faults"]} == {"all_reduce", "reduce_scatter", "all_gather"}


def leave(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        raise RuntimeError("left")
    Collective(group, "ring").all_reduce(torch.ones(4))


def test_a_rank_that_leaves_fails_the_others(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank 1"):
        ranks(2, leave, timeout_s=5)


class Broken(dist.Work):
    """A message that never arrives."""

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - the signature is torch's
        raise RuntimeError("Timed out waiting 40000ms")


def test_a_failed_message_names_its_peer() -> None:
    with pytest.raises(RuntimeError, match="receive from rank 2 failed: Timed out"):
        GroupMessage(Broken(), "receive from", "rank 2").wait()


@pytest.mark.parametrize(
    ("op", "world_size", "picks"),
    [
        ("all_reduce", 4, {64 << 10: "server", 1 << 20: "server", 4 << 20: "backend", 64 << 20: "backend"}),
        ("all_reduce", 8, {256 << 10: "server", 1 << 20: "backend"}),
        ("all_reduce", 2, {1 << 20: "server", 2 << 20: "backend"}),
        ("reduce_scatter", 4, {64 << 10: "server", 1 << 20: "server", 4 << 20: "direct", 64 << 20: "direct"}),
        ("reduce_scatter", 2, {64 << 10: "backend", 4 << 20: "direct"}),
        ("all_gather", 3, {64 << 10: "server", 4 << 20: "direct"}),
        ("all_gather", 2, {4 << 20: "backend", 16 << 20: "direct"}),
    ],
)
def test_algorithm_picked_by_size(op: str, world_size: int, picks: dict[int, str]) -> None:
    assert {nbytes: pick(op, nbytes, world_size) for nbytes in picks} == picks


def rows_of(rank: int, num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows * 6, dtype=torch.float64).view(num_rows, 2, 3) * (rank + 1)


def scatter_and_gather_rows(group: dist.ProcessGroup, name: str, num_rows: int) -> list[bool]:
    """Check that a tensor is cut between rows: chunk r equals part r of torch's tensor_split, also at uneven sizes."""
    collective, rank, world_size = Collective(group, name), group.rank(), group.size()
    total = sum(rows_of(other, num_rows) for other in range(world_size))
    assert isinstance(total, torch.Tensor)
    wanted = total.tensor_split(world_size)[rank]
    chunk, whole = torch.empty_like(wanted), torch.empty_like(total)
    collective.reduce_scatter(chunk, rows_of(rank, num_rows))
    collective.all_gather(whole, chunk)
    return [torch.equal(chunk, wanted), torch.equal(whole, total)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [2, 5, 6])
def test_chunks_contain_whole_rows(ranks: Ranks, name: str, num_rows: int) -> None:
    assert ranks(3, scatter_and_gather_rows, name, num_rows) == [[True, True]] * 3


Call = tuple[str, float, float]


def compare_with_direct(group: dist.ProcessGroup, num_rows: int) -> tuple[list[bool], list[Call]]:
    """Whether both sums are equal, into a new tensor and into the chunk itself; and the calls of the all_to_all."""
    generator = torch.Generator().manual_seed(group.rank())
    rows = torch.randn(num_rows, 7, generator=generator)
    equal = []
    for inside in (False, True):
        outputs = []
        for algorithm in (direct, by_hand):
            whole = rows.clone()
            chunk = whole.tensor_split(group.size())[group.rank()]
            output = chunk if inside else torch.empty_like(chunk)
            with Calls() as calls:
                Collective(group, "it", {"it": algorithm}).reduce_scatter(output, whole)
            outputs.append(output.clone())
        equal.append(torch.equal(*outputs))
    return equal, [(entry.op, entry.calls, entry.called_bytes) for entry in calls.ops()]


@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 6), (2, 5), (3, 7), (3, 2), (4, 9)])
def test_all_to_all_sum_equals_direct_bitwise(ranks: Ranks, world_size: int, num_rows: int) -> None:
    sizes = [len(chunk) for chunk in torch.arange(num_rows).tensor_split(world_size)]
    for rank, (equal, called) in enumerate(ranks(world_size, compare_with_direct, num_rows)):
        assert equal == [True, True]
        assert called == [("all_to_all", 1, pytest.approx(28 * (num_rows - sizes[rank])))]
