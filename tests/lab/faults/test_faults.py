"""Each fault by its mechanism: bits, files, links, messages and processes."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.lab import faults
from distlab.lab.faults import WORDS, Flip, Messages, bits_of, flip, flipping, received
from distlab.lab.report.records import Said
from distlab.lab.report.run_folder import Journal, Unwritable
from distlab.tools.testing.warm_ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sign", "exponent", "mantissa"])
def test_one_bit_of_that_kind_changes(dtype: torch.dtype, kind: str) -> None:
    for seed in range(20):
        tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        before = tensor.clone().view(-1).view(WORDS[dtype.itemsize])
        done = flip(tensor, kind, random.Random(seed))
        changed = before ^ tensor.view(-1).view(WORDS[dtype.itemsize])
        assert changed.nonzero().flatten().tolist() == [done.index]
        bits = int(changed[done.index]) & (1 << 8 * dtype.itemsize) - 1
        assert bits == 1 << done.bit
        assert done.bit in bits_of(dtype, kind)


def test_a_sign_turns_and_an_exponent_multiplies() -> None:
    tensor = torch.tensor([1.5])
    assert flip(tensor, "sign", random.Random(1)).after == -1.5
    done = flip(tensor, "exponent", random.Random(1))
    assert abs(done.after / done.before) in {2.0**power for power in (*range(-128, 0), *range(1, 129))}


def test_bits_lie_where_the_formats_have_them() -> None:
    assert list(bits_of(torch.float32, "sign")) == [31]
    assert bits_of(torch.float32, "exponent") == range(23, 31)
    assert bits_of(torch.float32, "mantissa") == range(20, 23)
    assert bits_of(torch.float64, "exponent") == range(52, 63)
    assert bits_of(torch.bfloat16, "exponent") == range(7, 15)
    assert bits_of(torch.float32, "highest") == range(30, 31)


def test_the_highest_bit_of_a_packed_float_is_that_of_the_float() -> None:
    packed = torch.tensor([1.0]).view(torch.uint8)
    flip(packed, "sign", random.Random(1))
    assert packed.view(torch.float32).item() == float("inf")


def test_a_number_that_matters_is_taken_and_zeros_too_where_there_is_nothing_else() -> None:
    tensor = torch.zeros(100)
    tensor[42] = 1.0
    assert flip(tensor, "mantissa", random.Random(3)).index == 42
    assert flip(torch.zeros(4), "sign", random.Random(3)).bit == 31


def test_what_is_no_view_is_refused() -> None:
    with pytest.raises(AssertionError, match="its copy would be changed"):
        flip(torch.ones(3, 5).t(), "sign", random.Random(1))


def test_a_journal_meets_the_full_disk_in_its_own_sentence(tmp_path: Path) -> None:
    journal = Journal()
    assert journal.open_files == []
    journal.open(tmp_path, 0)
    journal.write(Said("a", "before"))
    faults.fill(journal.open_files)
    with pytest.raises(Unwritable, match=r"cannot be written any more \(No space left on device\)"):
        journal.say("after")
    with pytest.raises(Unwritable):
        journal.write(Said("a", "after"))
    assert "before" in (tmp_path / "rank0.jsonl").read_text()
    assert "after" not in (tmp_path / "rank0.jsonl").read_text()


def test_one_bit_of_one_file_changes(tmp_path: Path) -> None:
    before = {name: bytes(range(100)) for name in ("a", "b", "manifest.json")}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    damaged = faults.damage(tmp_path, ["a", "b"], random.Random(5))
    assert damaged in ("a", "b")
    for name, content in before.items():
        now = (tmp_path / name).read_bytes()
        bits = sum((one ^ other).bit_count() for one, other in zip(content, now, strict=True))
        assert bits == (1 if name == damaged else 0)


WAIT_S = 0.3
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connected() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(WAIT_S)
            near.settimeout(WAIT_S)
            yield near, far


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets that count as this process's, and not those of the pool of ranks."""
    found: list[socket.socket] = []
    monkeypatch.setattr(faults, "_own", lambda: iter(found))
    return found


def test_the_connections_to_other_processes_are_found(connected: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen(
            [sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()}).recv(1)"]
        )
        link, _ = server.accept()
        with link:
            found = {each.getsockname() for each in faults._own() if each.getpeername() == link.getpeername()}
            own = {each.getsockname() for each in faults._own()} & {each.getsockname() for each in connected}
            assert (found, own) == ({link.getsockname()}, set()), "both ends of the other one are here"
        assert other.wait(30) == 0


def test_what_comes_is_dropped_and_comes_again_once_the_cut_ends(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(far)
    whole = faults.hear_nobody()
    near.sendall(b"word")
    if whole:  # as root, or before Linux 6.15
        with pytest.raises(TimeoutError):
            far.recv(4)
    faults.hear_again()
    far.settimeout(10)
    assert far.recv(4) == b"word"


def test_where_a_filter_takes_a_privilege_nothing_is_dropped_and_that_is_told(
    connected: Pair, own: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(each: socket.socket, instructions: faults.Instructions) -> None:  # noqa: ARG001
        raise PermissionError

    monkeypatch.setattr(faults, "attach", refused)
    own.append(connected[1])
    assert faults.hear_nobody() is False
    connected[0].sendall(b"word")
    assert connected[1].recv(4) == b"word"


def test_a_slow_link_takes_its_time(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(near)
    faults.set_pace(1_000_000)
    near.settimeout(30)
    far.settimeout(30)
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(1_500_000),))
    sender.start()
    left = 1_500_000
    while left:
        left -= len(far.recv(1 << 20))
    sender.join()
    assert time.monotonic() - began > 0.7  # 1.5 s at that rate, less what TCP begins with; else some milliseconds


def test_taking_away_what_is_not_there_does_nothing(connected: Pair) -> None:
    faults._detach(connected[0])


def exchanged(group: dist.ProcessGroup, number: int) -> tuple[list[float], list[str], int]:
    """A sum, a gather and a message to the right; rank 1 flips the sign in one of them, from 1."""
    rank, told = dist.get_rank(group), []

    def note(op: str, done: Flip) -> None:
        told.append(f"{op} {done.before:g} {done.after:g}")

    change = flipping("sign", random.Random(1), note) if rank == 1 and number else None
    messages = Messages(number, change)
    total, parts, passed, sent = torch.ones(1), [torch.zeros(1), torch.zeros(1)], torch.zeros(1), torch.tensor([5.0])
    dist.all_reduce(total, group=group)
    dist.all_gather(parts, torch.tensor([float(rank + 3)]), group=group)
    work = dist.irecv(passed, group_src=1 - rank, group=group)
    assert work is not None
    dist.send(sent, group_dst=1 - rank, group=group)
    work.wait()
    messages.close()
    dist.all_reduce(total.clone(), group=group)  # unseen again
    return [float(total), *map(float, parts), float(passed), float(sent)], told, messages.count


RIGHT = [2.0, 3.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("number", "of_0", "of_1", "told"),
    [
        (0, RIGHT, RIGHT, []),
        (1, RIGHT, [-2.0, *RIGHT[1:]], ["all_reduce 2 -2"]),
        (2, RIGHT, [2.0, -3.0, *RIGHT[2:]], ["all_gather 3 -3"]),  # what came from rank 0
        (3, [*RIGHT[:3], -5.0, 5.0], RIGHT, ["send 5 -5"]),  # the sender keeps its own
    ],
)
def test_one_message_is_changed(
    ranks: Ranks, number: int, of_0: list[float], of_1: list[float], told: list[str]
) -> None:
    (numbers_0, told_0, count_0), (numbers_1, told_1, count_1) = ranks(2, exchanged, number)
    assert (numbers_0, numbers_1) == (of_0, of_1)
    assert (told_0, told_1) == ([], told)
    assert count_0 == count_1 == 3


def test_of_a_flat_gather_the_next_rank_s_part_is_meant() -> None:
    whole = torch.arange(6.0)
    assert received("all_gather", [whole], 2, 3).tolist() == [0.0, 1.0]
    assert received("all_gather", [whole], 0, 3).data_ptr() == whole[2:].data_ptr()
    assert received("all_reduce", [whole], 0, 3) is whole


CONTEXT = multiprocessing.get_context("fork")


def in_child(act: Callable[[], None]) -> tuple[int | None, float]:
    """The exit code of a process that does this, and how long it took."""
    began = time.monotonic()
    child = CONTEXT.Process(target=act)
    child.start()
    child.join(30)
    return child.exitcode, time.monotonic() - began


def paused() -> None:
    faults.pause(0.5)
    os._exit(7)


def slowed() -> None:
    """0.3 s of the core, for a tenth of the time."""
    faults.slow_down(0.1)
    while time.process_time() < 0.3:
        pass
    os._exit(7)


def test_a_killed_process_says_nothing() -> None:
    assert in_child(faults.kill)[0] == -signal.SIGKILL


def test_a_pause_ends_by_itself() -> None:
    code, took_s = in_child(paused)
    assert code == 7
    assert took_s > 0.45


def test_a_slow_process_takes_longer_for_the_same() -> None:
    code, took_s = in_child(slowed)
    assert code == 7
    assert took_s > 0.9
