"""The pytest plugin: the report of a test that fails on ranks has rank, line and reason; the test ends and cleans up."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import distlab
from distlab.tools.check.start.script_process import ScriptChannel
from tests.docs.pages import page
from tests.launched import ended_warm
from tests.tools.check.cases import line_of

FAILING = Path(__file__).parent / "failing.py"


LIGHT = "distlab_preload="  # like a user's project: imports nothing more on its ranks


def pytest_on(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in its own process, which forks its ranks from new fork servers as usual."""
    arguments = ["-p", "no:cacheprovider", "-o", "addopts=", *words]
    return ended_warm("pytest", arguments, environ=os.environ, timeout_s=110)


@pytest.fixture(scope="module")
def printed() -> str:
    """The output of pytest on failing.py, which runs once."""
    done = pytest_on("-v", "--ranks", "1,3", str(FAILING))
    assert done.returncode == 1, done.stdout
    return done.stdout


def report_of(printed: str, name: str, case: str = "") -> str:
    """The part of the output about one test."""
    return re.split(r"\n_{3,} ", printed.partition(f"_ {name}[{case}")[2])[0]


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    """docs/notebooks.md."""
    (example,) = re.findall(r"^```python\n(import torch.*?)^```$", page("notebooks"), re.DOTALL | re.MULTILINE)
    (tmp_path / "test_it.py").write_text(example)
    done = pytest_on("-o", LIGHT, str(tmp_path))
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_an_assert_is_shown_as_by_pytest_with_the_output_of_each_rank(printed: str) -> None:
    wrong = report_of(printed, "test_wrong")
    assert "rank 1 raised AssertionError" in wrong and "ranks 0 and 2 wait for it in barrier #0" in wrong
    assert ">           assert values == [1, 3]" in wrong and "At index 1 diff: 2 != 3" in wrong
    assert "output of rank 2" in wrong and "rank 2 was here" in wrong
    assert "testing/rank.py" not in wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_deadlock", f"rank 1 calls barrier at {line_of(FAILING, 'b').replace('failing', 'tests/tools/testing/failing')}"),
        ("test_message_never_arrives", "rank 0 waits in recv #0 from rank 1"),
        ("test_message_never_arrives_after_uneven_parts", "rank 0 raised LinkError: the connection to rank 1 has ended"),
        ("test_exits", f"rank 2 ended the process by os._exit(7) at {line_of(FAILING, 'c')}, before its checks"),
        ("test_exits_with_0", "ranks 0 and 1 ended the process by os._exit(0) at failing.py:"),
        ("test_killed", "rank 1 was killed by SIGKILL"),
        ("test_mismatched_shapes", "shape mismatch"),
        ("test_slow", "not done after 1 s"),
        ("test_argument_cannot_be_sent", "the argument 'capsys' cannot be sent to a rank"),
        ("test_differs_from_one_process", "own samples alone: never summed over the 2 ranks of dp"),
    ],
)  # fmt: skip
def test_each_failure_has_its_message(printed: str, name: str, words: str) -> None:
    assert words in report_of(printed, name)


def test_tests_after_a_failure_run_on_new_ranks_and_nothing_is_left(printed: str) -> None:
    assert re.search(r"test_after_a_failure\[2 ranks\] PASSED", printed)
    assert re.search(r"test_is_skipped\[2 ranks\] SKIPPED", printed)
    assert re.search(r"test_prints_after_closed_output\[2 ranks\] PASSED", printed)
    assert "13 failed, 3 passed, 1 skipped" in printed


def test_too_few_open_files_are_reported_in_one_sentence() -> None:
    words = f'ulimit -n 60; "$0" -m pytest -p no:cacheprovider -q -o addopts= -o {LIGHT} -k after_a_failure {FAILING}'
    done = subprocess.run(
        ["bash", "-c", words, sys.executable], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "a process may open 60 files here, and 2 local ranks need 72 each: set `ulimit -n 72` or more" in done.stdout


def test_it_runs_under_xdist_and_by_name() -> None:
    done = pytest_on(
        "-n", "1", "-q", "-o", LIGHT, "-k", "after_a_failure or slow", str(FAILING)
    )  # `make test` is two workers
    assert "1 failed, 1 passed" in done.stdout, done.stdout


def test_a_test_without_a_number_of_ranks_runs_on_those_of_the_command_line(printed: str) -> None:
    for world_size in (1, 3):
        assert f"RuntimeError: {world_size} requested" in report_of(
            printed, "test_number_of_ranks_from_the_option", f"{world_size} ranks"
        )
    done = pytest_on("--collect-only", "-q", "-k", "from_the_option", str(FAILING))
    assert "test_number_of_ranks_from_the_option[2 ranks]" in done.stdout and "1/" in done.stdout, (
        "and on two without the option"
    )
    done = pytest_on("--ranks", "0,two", "-q", str(FAILING))
    assert done.returncode == 4
    assert "'0,two' is not a list of numbers of ranks, expected such as 4 or 1,2,4" in done.stdout


LONG = """
import os
import time
from pathlib import Path

import distlab


@distlab.ranks(2, timeout_s=300)
def test_long(rank, group):
    written = Path(__file__).with_name(f"rank{rank}")
    written.with_suffix(".draft").write_text(f"{os.getpid()} {os.getppid()}")
    written.with_suffix(".draft").rename(written)
    time.sleep(250)
"""


def test_ranks_and_their_fork_servers_end_when_pytest_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "test_long.py"]
    killed = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    written = [tmp_path / "rank0", tmp_path / "rank1"]
    wait_until(lambda: all(each.exists() for each in written), 90)
    killed.kill()
    killed.wait()
    processes = {int(number) for each in written for number in each.read_text().split()}
    assert len(processes) == 4, "two ranks and the fork server of each"
    wait_until(lambda: not any(is_alive(each) for each in processes), 10)


LATE = """
import os
import time

import pytest

import distlab
from distlab.techniques.transport.store import KeyedStore

wait = KeyedStore.wait


def wait_late(self, keys, timeout=None):
    time.sleep(0.3 * (os.environ.get("RANK") == "0"))
    wait(self, keys, timeout)


KeyedStore.wait = wait_late


@pytest.mark.parametrize("number", range(5))  # the order of ports decides which rank is done first
@distlab.ranks(3)
def test_without_a_call(number):
    pass


@distlab.ranks(mesh={"dp": 2, "tp": 2})
def test_on_a_mesh_without_a_call(mesh):
    pass


def test_with_the_removed_fixture(ranks):
    pass
"""


def test_a_rank_that_is_done_at_once_waits_for_ranks_that_still_connect(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(LATE)
    done = pytest_on("-q", "-o", "addopts=", str(tmp_path / "test_late.py"))
    assert "6 passed, 1 error" in done.stdout, done.stdout
    assert "the fixture `ranks` was removed: use @distlab.ranks(3)" in done.stdout


# The time that the bound excludes is set here, whatever the load of this machine is.
STARVED = """
import pytest

from distlab.tools.ranks.pool import WarmRank


@pytest.fixture(autouse=True, params=[60.0, 0.0], ids=["starved", "slow"])
def starved_s(request, monkeypatch):
    monkeypatch.setattr(WarmRank, "starved_s", lambda self: request.param)
"""
SLOW = """
import time

import distlab


@distlab.ranks(2, timeout_s=1)
def test_slow(rank):
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass
"""


def test_the_bound_does_not_count_the_time_in_which_a_rank_has_no_core(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(STARVED)
    (tmp_path / "test_slow.py").write_text(SLOW)
    done = pytest_on("-v", "--rootdir", str(tmp_path), str(tmp_path))
    assert re.search(r"test_slow\[.*starved.*\] PASSED", done.stdout), done.stdout
    assert re.search(r"test_slow\[.*slow.*\] FAILED", done.stdout), done.stdout
    assert "not done after 1 s" in done.stdout


def test_a_process_that_shares_a_core_is_starved_half_of_the_time() -> None:
    core = min(os.sched_getaffinity(0))
    busy = f"import os, time; os.sched_setaffinity(0, [{core}]); end = time.time() + 2\nwhile time.time() < end: pass"
    both = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(2)]
    channel = object.__new__(ScriptChannel)
    channel.process = cast(Any, both[0])
    most = 0.0
    while both[0].poll() is None:
        most = max(most, channel.starved_s())
        time.sleep(0.05)
    both[1].wait()
    assert most > 0.3
    assert channel.starved_s() == 0.0, "its process has ended"


def wait_until(is_true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {timeout_s:g} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@distlab.ranks(1, 2, 3)
@pytest.mark.parametrize("value", [1.0, 5.0])
def test_ranks_have_their_own_group(
    rank: int, world_size: int, group: dist.ProcessGroup, value: float, tmp_path: Path
) -> None:
    tensor = torch.full((3,), value + rank)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == value * world_size + sum(range(world_size))
    assert (group.rank(), group.size()) == (rank, world_size)
    (tmp_path / str(rank)).touch()


@distlab.ranks(mesh={"dp": 2, "tp": 2})
def test_a_mesh_has_the_requested_axes(mesh: DeviceMesh, rank: int) -> None:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert tensor.item() == (1 if rank < 2 else 5)


class TestInAClass:
    """Methods run like functions."""

    @distlab.ranks(2)
    def test_a_method_runs(self, rank: int) -> None:
        assert rank in (0, 1)


def summed_step(model, optimizer, microbatches, group):  # type: ignore[no-untyped-def]
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (model(inputs, targets) * share).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    optimizer.step()


@distlab.ranks(2)
def test_ranks_are_compared_with_one_process() -> None:
    distlab.same_as_one_process(train_step=summed_step)
    with pytest.raises(TypeError, match="has no trainstep"):
        distlab.same_as_one_process(trainstep=summed_step)
    with pytest.raises(ValueError, match="is smaller than its 2 shards"):
        distlab.same_as_one_process(train_step=summed_step, batch=lambda seed, step: (torch.zeros(1, 3).long(),) * 2)


def test_a_decorator_stores_its_arguments() -> None:
    mark = distlab.ranks(2, 3, timeout_s=[1, 5], backend=["gloo"]).mark
    assert mark.kwargs == {"world_sizes": [2, 3], "timeouts_s": [1, 5], "backends": ["gloo"], "mesh": {}}


@pytest.mark.parametrize(("sizes", "mesh", "words"), [
    ((2, 0), None, "ranks got 0, allowed: numbers of ranks from 1"), (("4",), None, "ranks got '4'"),
    ((4, 3), {"dp": 2, "tp": 2}, "a mesh of dp 2 x tp 2 has 4 ranks, not 3"),
])  # fmt: skip
def test_a_decorator_refuses_invalid_numbers_of_ranks(sizes: Any, mesh: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        distlab.ranks(*sizes, mesh=mesh)
