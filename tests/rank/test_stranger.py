"""Who knows no secret is not heard in the place of a rank; if one is, the run says so."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import distlab
from distlab.lab import RunHooks
from distlab.rank import store_self_test
from distlab.transport import handshake
from distlab.transport.handshake import WHO, Who

pytestmark = pytest.mark.timeout(120)


def lab_of(rank: int, name: str, bound_s: float = 8.0) -> Any:
    """What the check needs of a lab, and its checks."""
    seen: list[float] = []
    lab: Any = SimpleNamespace(
        rank=rank,
        hooks=RunHooks(secret=b"the key of the run"),
        at=lambda step, phase: None,
        config=SimpleNamespace(collective_timeout_s=bound_s),
        exchange=SimpleNamespace(store=dist.PrefixStore(name, dist.distributed_c10d._get_default_store())),
        seen=seen,
    )
    lab.check = lambda name, off, allowed, **_: seen.append(off)
    return lab


@distlab.ranks(2, timeout_s=60)
def test_a_stranger_is_not_heard(rank: int, world_size: int) -> None:  # noqa: ARG001
    lab = lab_of(rank, "kept out")
    store_self_test.check_stranger(lab)
    assert lab.seen == ([0] if rank == 0 else [])


@distlab.ranks(2, timeout_s=60)
def test_a_stranger_that_is_let_in_is_seen(rank: int, world_size: int) -> None:  # noqa: ARG001
    lab = lab_of(rank, "let in", bound_s=2.0)
    with pytest.MonkeyPatch.context() as patch:
        # The first who dials is believed, whatever is said.
        patch.setattr(handshake, "proven", lambda key, end, purpose, nonces, said: Who(*WHO.unpack_from(said)))
        store_self_test.check_stranger(lab)
    assert lab.seen == ([1] if rank == 0 else [])
    dist.barrier()  # rank 1 finds nobody who listens any more, and waits its bound


def test_what_this_process_listens_at_is_found() -> None:
    before = store_self_test.listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert store_self_test.listening() - before == {server.getsockname()[1]}
    assert store_self_test.listening() == before
