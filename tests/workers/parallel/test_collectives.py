"""The hand-written collectives against plain sums: any algorithm, world size, length and dtype, to the bit."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import RankFailed, Ranks
from workers.parallel.collectives import ALGORITHMS, Collective, pick
from workers.parallel.peers import Peers, split

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
NAMES = [*ALGORITHMS, "backend", "auto"]


def inputs(world_size: int, length: int, dtype: str) -> list[torch.Tensor]:
    """What each rank contributes: every rank can compute it for all. Floats that round, so that the order shows."""
    draws = [torch.Generator().manual_seed(1000 * length + rank) for rank in range(world_size)]
    if dtype == "int64":
        return [torch.randint(-1000, 1000, (length,), generator=draw) for draw in draws]
    return [torch.randn(length, generator=draw, dtype=torch.float64).to(DTYPES[dtype]) for draw in draws]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1, torch.int64: 0.0}[got.dtype]
    return got.shape == wanted.shape and torch.allclose(got.double(), wanted.double(), rtol=0, atol=tolerance)


def run_all(group, name: str, length: int, dtype: str, in_place: bool) -> dict[str, object]:
    """All three operations, twice; returns the bits of the results and what went wrong."""
    rank, world_size = group.rank(), group.size()
    everyone = inputs(world_size, length, dtype)
    exact = torch.stack([tensor.double() for tensor in everyone]).sum(0).to(DTYPES[dtype])
    collective, faults, bits = Collective(group, name), [], []
    for turn in range(2):
        given_ = everyone[rank].clone()
        summed = given_.clone() if in_place else torch.empty_like(given_)
        collective.all_reduce(summed if in_place else given_, None if in_place else summed)
        if not close(summed, exact):
            faults.append(f"all_reduce {turn}: {summed} is not {exact}")
        if not torch.equal(given_, everyone[rank]):
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
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_length_dtype_and_world_size(ranks: Ranks, name: str, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    length = data.draw(st.one_of(st.sampled_from([0, 1, 2, 3, 5]), st.integers(6, 3000)))
    dtype, in_place = data.draw(st.sampled_from(sorted(DTYPES))), data.draw(st.booleans())
    if name == "backend" and (dtype == "bfloat16" or length == 0):
        dtype, length = "float32", max(length, 1)
    results = ranks(world_size, run_all, name, length, dtype, in_place)
    assert [result["faults"] for result in results] == [[]] * world_size
    assert all(result["bits"] == results[0]["bits"] for result in results), "ranks hold different bits"
