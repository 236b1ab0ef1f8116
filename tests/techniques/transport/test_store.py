"""The store: what a process group asks of it from C++ comes there, and who has no key neither lists nor reads nor writes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.techniques.transport.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, Unproven, listen
from distlab.techniques.transport.store import HostedStore, KeyedStore, Prefixed
from distlab.techniques.transport.store_server import LENGTH, Set, StoreServer, framed, take_frames
from tests.techniques.transport.strangers import HERE, as_torch, silent, told_all
from tests.warm_ranks import Ranks

KEY = b"the key"


@pytest.fixture
def store() -> Iterator[HostedStore]:
    hosted = HostedStore(HERE, KEY, 5.0)
    yield hosted
    assert hosted.host._thread.is_alive(), "nothing that it read has ended it"
    hosted.close()


def another(store: HostedStore) -> KeyedStore:
    return KeyedStore(HERE, store.port, KEY, 5.0)


def test_it_does_what_a_store_does(store: HostedStore) -> None:
    """Under a prefix, by which torch calls it from C++."""
    one, other = Prefixed("a", store), Prefixed("a", another(store))
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert [other.add("count", 2), one.add("count", -5)] == [2, -3]
    assert other.check(["key", "count"]) and not other.check(["key", "none"])
    assert other.compare_set("key", "another", "new") == b"value"
    assert other.compare_set("key", "value", "new") == b"new"
    assert one.num_keys() == 2
    assert one.delete_key("key") and not one.delete_key("key")
    assert store.get("a/count") == b"-3"
    one.set("count", "no number")
    assert one.get("count") == b"no number"


def test_bytes_of_any_value_come_back(store: HostedStore) -> None:
    """As gloo writes them; torch's own store takes only text from Python."""
    store.set("bytes", bytes(range(256)) * 300)
    assert another(store).get("bytes") == bytes(range(256)) * 300


def test_a_wait_ends_with_the_value_or_with_its_bound(store: HostedStore) -> None:
    other = another(store)
    threading.Timer(0.2, store.set, ("late", "1")).start()
    began = time.monotonic()
    other.wait(["late"], timedelta(seconds=5))
    assert other.get("late") == b"1"
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.2 s, keys: late, never"):
        other.wait(["late", "never"], timedelta(seconds=0.2))
    assert time.monotonic() - began < 3
    other.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="keys: never"):
        other.get("never")


def test_a_host_that_is_gone_is_said_at_once() -> None:
    hosted = HostedStore(HERE, KEY, 5.0)
    other = KeyedStore(HERE, hosted.port, KEY, 5.0)
    hosted.close()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="is gone"):
            other.get("a")
    assert time.monotonic() - began < 2


def test_a_host_that_is_paused_is_a_wait_that_has_timed_out() -> None:
    """And no more: what it answers later belongs to the question that was given up."""
    port, pid = in_another_process()
    try:
        other = KeyedStore(HERE, port, KEY, 5.0)
        other.set("a", "1")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            other.wait(["b"], timedelta(seconds=0.2))
        os.kill(pid, signal.SIGCONT)
        assert other.get("a") == b"1"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_another_process() -> tuple[int, int]:
    """The port of a host, and its process."""
    listening = listen(HERE)
    pid = os.fork()
    if pid == 0:
        StoreServer(listening, KEY)._thread.join(50)
        os._exit(0)
    port = int(listening.getsockname()[1])
    listening.close()
    return port, pid


def test_a_stranger_neither_lists_nor_reads_nor_writes(store: HostedStore) -> None:
    """With torch's own client a stranger once listed all keys and wrote the verdict: the launcher returned 1 where
    run.json said pass."""
    other = another(store)
    other.set("verdict", "1")
    with pytest.raises(Unproven):
        KeyedStore(HERE, store.port, b"another", 2.0)
    answers = told_all(store.port)
    assert not any(
        b"verdict" in answer or len(answer) > len(MAGIC) + NONCE_BYTES + PROOF_BYTES for answer in answers.values()
    )
    assert as_torch(store.port) == ""
    assert store.get("verdict") == b"1"
    assert other.num_keys() == 1, "nothing was written beside it"


def test_silent_connections_hold_up_no_rank(store: HostedStore) -> None:
    with silent(store.port, 200):
        began = time.monotonic()
        another(store).set("a", "1")
        assert time.monotonic() - began < 5


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_no_bytes_of_who_has_the_key_end_the_host(said: bytes) -> None:
    hosted = HostedStore(HERE, KEY, 5.0)
    hosted._connection.sendall(said + framed(Set(1, said, said)))
    assert KeyedStore(HERE, hosted.port, KEY, 5.0).num_keys() in (0, 1)
    hosted.close()


@given(st.binary(max_size=300))
def test_frames_are_taken_from_the_beginning(said: bytes) -> None:
    received = bytearray(said)
    try:
        found = take_frames(received)
    except ValueError:
        return
    assert bytes(received) == said[sum(len(each) + LENGTH.size for each in found) :]


def test_gloo_calls_it_from_c(ranks: Ranks) -> None:
    """Groups of two, made over a store that keeps what it is asked: a subclass of Python's is called for each."""
    assert ranks(2, grouped) == [(["set", "wait", "get"], 2.0)] * 2


def grouped(group: dist.ProcessGroup) -> tuple[list[str], float]:
    port = torch.tensor([0])
    hosted = HostedStore(HERE, KEY, 20.0) if group.rank() == 0 else None
    if hosted is not None:
        port[0] = hosted.port
    dist.broadcast(port, 0, group=group)
    asked: list[str] = []

    class Told(KeyedStore):
        def set(self, key: str, value: str | bytes) -> None:
            asked.append("set")
            super().set(key, value)

        def get(self, key: str) -> bytes:
            asked.append("get")
            return super().get(key)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
            asked.append("wait")
            super().wait(keys, timeout)

    store = Told(HERE, int(port), KEY, 20.0)
    gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("pair", store), group.rank(), 2, timedelta(seconds=20))
    total = torch.ones(1)
    gloo.allreduce([total]).wait()
    dist.barrier(group)
    return sorted(set(asked), key=asked.index), float(total)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_calls_it_from_c_and_ends() -> None:
    """Its watchdog asks the store from a thread of its own, and needs the interpreter's lock for that."""
    hosted = HostedStore(HERE, KEY, 20.0)
    dist.init_process_group("nccl", store=Prefixed("group", hosted), rank=0, world_size=1)
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    dist.barrier()
    time.sleep(2)
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 20 and total.item() == 1
    hosted.close()
