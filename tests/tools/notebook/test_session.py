"""Cells on ranks: names persist between cells, and ranks that hang, raise, are interrupted or die are recovered."""

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.tools.notebook import output
from distlab.tools.notebook.session import Result, Session

pytestmark = pytest.mark.timeout(120)

SIZE = 3


class Notebook:
    """A notebook's cells, one after the other."""

    def __init__(self, session: Session) -> None:
        self.session, self.number = session, 0

    def cell(self, source: str, *only: int, measured: bool = False) -> Result:
        self.number += 1
        self.source = source
        return self.session.run_cell(self.number, source, only, measured=measured)

    def interrupted(self, source: str) -> Result:
        """Run a cell and interrupt it once it runs on all ranks."""

        def interrupt() -> None:
            while not all("it runs" in each.printed() for each in self.session._ranks):
                time.sleep(0.05)
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        return self.cell(f"print('it runs', flush=True)\n{source}")

    def lines(self, source: str, *only: int) -> list[str]:
        """The output of a cell that passes."""
        result = self.cell(source, *only)
        assert not result.outcome.is_bad, self.failure(result)
        return list(output.outputs(result))

    def failure(self, result: Result) -> str:
        text = "\n".join(output.failure(result, self.source).lines)
        for code in (output.RED, output.BOLD, output.PLAIN):
            text = text.replace(code, "")
        return text


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    session = Session()
    session.start(SIZE)
    yield Notebook(session)
    session.close()


def test_names_persist_and_equal_outputs_are_shown_once(notebook: Notebook) -> None:
    assert notebook.lines("x = 10 * rank\nprint('equal')\nprint('rank', rank)\nworld_size") == [
        "all 3 ranks | equal", "rank 0 | rank 0", "rank 1 | rank 1", "rank 2 | rank 2", "all 3 ranks | = 3",
    ]  # fmt: skip
    assert notebook.lines("x + 1") == ["rank 0 | = 1", "rank 1 | = 11", "rank 2 | = 21"]
    assert notebook.lines("x;") == []
    assert notebook.lines("None") == []


def test_a_cell_runs_on_some_ranks_only(notebook: Notebook) -> None:
    notebook.lines("y = 0")
    notebook.lines("y = 1", 0, 2)
    assert notebook.lines("y") == ["ranks 0 and 2 | = 1", "rank 1 | = 0"]


def test_a_collective_goes_over_all(notebook: Notebook) -> None:
    total = notebook.lines("t = torch.tensor([rank + 1.0])\ndist.all_reduce(t)\nt.item()")
    assert total == ["all 3 ranks | = 6.0"]


def test_a_deadlock_is_reported_with_both_lines_and_names_persist(notebook: Notebook) -> None:
    notebook.lines("kept = rank")
    result = notebook.cell(
        "import time\nif rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n    dist.barrier()\n"
    )
    text = notebook.failure(result)
    assert result.outcome.is_bad
    assert result.restarted == []
    number = notebook.number
    assert f"rank 0 waits in all_reduce #0 of all ranks at cell {number}, line 3" in text
    assert "rank 0 -->   3     dist.all_reduce(torch.ones(2))" in text
    assert "ranks 1 and 2 -->   5     dist.barrier()" in text
    assert "all ranks have kept the results of earlier cells" in text
    assert notebook.lines("kept") == ["rank 0 | = 0", "rank 1 | = 1", "rank 2 | = 2"]
    assert notebook.lines("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == ["all 3 ranks | = 3.0"]


def test_consecutive_deadlocks_are_each_reported(notebook: Notebook) -> None:
    """Reports of interrupted ranks belong to the previous cell."""
    for _ in range(3):
        text = notebook.failure(notebook.cell("large = torch.zeros(10_000_000)\ndist.send(large, (rank + 1) % 3)"))
        assert f"at cell {notebook.number}, line 2" in text.splitlines()[0]
        assert "Each sends first, and none receives" in text


def test_waiting_for_a_rank_outside_of_the_cell_names_that_rank(notebook: Notebook) -> None:
    text = notebook.failure(notebook.cell("dist.barrier()", 0, 1))
    assert "ranks 0 and 1 wait in barrier #0" in text.replace("rank 0 waits", "ranks 0 and 1 wait")
    assert "rank 2 has ended without it" in text


def test_an_exception_is_shown_once_with_its_ranks_and_its_line(notebook: Notebook) -> None:
    text = notebook.failure(notebook.cell("def f(x):\n    return 1 / x\n\nf(min(rank, 1))\n"))
    number = notebook.number
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert "ZeroDivisionError on rank 0" in text
    assert f"cell {number}, line 2, in f" in text
    assert "rank 0 -->   2     return 1 / x" in text
    text = notebook.failure(notebook.cell("raise ValueError('on all')"))
    assert text.splitlines()[0] == "ValueError on all 3 ranks"
    text = notebook.failure(notebook.cell("x = (\n"))
    assert f"cell {notebook.number}, line 1" in text
    assert "SyntaxError: '(' was never closed" in text


def test_the_rank_that_raises_is_blamed_and_not_those_that_wait_for_it(notebook: Notebook) -> None:
    text = notebook.failure(notebook.cell("if rank == 2:\n    raise KeyError('here')\ndist.barrier()"))
    assert text.splitlines()[0] == "KeyError on rank 2"
    assert "Connection" not in text


@pytest.mark.parametrize(
    "source", ["import time\ntime.sleep(60)", "while True:\n    pass", "dist.recv(torch.ones(1), (rank + 1) % 3)"]
)
def test_an_interrupt_returns_all_ranks(notebook: Notebook, source: str) -> None:
    notebook.lines("kept = rank")
    result = notebook.interrupted(source)
    assert result.interrupted
    assert "interrupted" in notebook.failure(result)
    assert result.restarted == []
    assert notebook.lines("kept") == ["rank 0 | = 0", "rank 1 | = 1", "rank 2 | = 2"]


def test_a_rank_that_dies_is_named_and_restarted(notebook: Notebook) -> None:
    notebook.lines("kept = rank")
    result = notebook.cell("import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    text = notebook.failure(result)
    assert text.splitlines()[0].startswith("rank 1 was killed by SIGKILL")
    assert "rank 1 restarted and lost the results of earlier cells; all other ranks have kept theirs" in text
    assert [notebook.session.names.get(rank, []).count("kept") for rank in range(3)] == [1, 0, 1]
    assert notebook.lines("'kept' in dir()") == ["ranks 0 and 2 | = True", "rank 1 | = False"]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(0)", "Exited: ended the process by os._exit(0) at cell_"),
        ("posix._exit(0)", "rank 1 called os._exit(0)"),
    ],
)
def test_a_cell_that_ends_its_rank_has_failed(notebook: Notebook, end: str, words: str) -> None:
    result = notebook.cell(f"import os, posix\nif rank == 1:\n    {end}")
    text = notebook.failure(result)
    assert words in text, text


def test_names_are_those_that_cells_defined_on_each_rank(notebook: Notebook) -> None:
    notebook.lines("import math\n_hidden = own = 1\nif rank:\n    later = 2\ndist.barrier()")
    notebook.cell("stuck = 3\nif rank == 1:\n    dist.barrier()")  # an interrupted rank reports its names too
    made = [notebook.session.names[rank][-4:] for rank in range(3)]
    assert [names[-3:] for names in made] == [["math", "own", "stuck"], *[["own", "later", "stuck"]] * 2]
    assert output.names([]) == "no names yet"
    assert output.names([*"abcdefghij"]) == "10 names: ..., c, d, e, f, g, h, i, j"


def test_a_rank_that_dies_between_two_cells_is_restarted(notebook: Notebook) -> None:
    pid, nbytes = notebook.session.memory_bytes()[2]
    assert nbytes > 0
    os.kill(pid, signal.SIGKILL)
    while notebook.session.memory_bytes()[2][1]:
        time.sleep(0.02)
    result = notebook.cell("dist.barrier()")
    assert not result.outcome.is_bad
    assert result.restarted == [2]


def test_a_rank_that_does_not_return_is_restarted(notebook: Notebook) -> None:
    blocking = "import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).sleep(60)\ndist.barrier()"  # it holds the GIL
    result = notebook.interrupted(blocking)
    assert result.interrupted
    assert result.restarted == [1]


def test_measurements_cover_this_cell_only(notebook: Notebook) -> None:
    notebook.lines("dist.all_reduce(torch.ones(1_000_000))")
    result = notebook.cell("t = torch.ones(250_000)\ndist.all_reduce(t)", measured=True)
    table = output.wire_table(result).splitlines()
    assert table[1].split()[:3] == ["bytes", "sent", "by"]
    sent = [int(row.split()[-2]) for row in table[2:]]
    assert all(1_333_332 <= each < 1_400_000 for each in sent), table  # 2(N-1)/N of 1 MB, and gloo's own framing
    assert "at the peak" in output.memory_table(result)
    assert output.timeline(result).startswith("<svg")
    quiet = notebook.cell("1", measured=True)
    assert output.wire_table(quiet) == "nothing was sent: no rank communicated"
    assert output.timeline(quiet) == ""


def test_a_proof_in_a_cell_fails_and_passes(notebook: Notebook) -> None:
    right = (
        "from torch import nn\n"
        "def model(seed):\n    torch.manual_seed(seed)\n    return nn.Linear(3, 2).double()\n"
        "def batch(seed, step):\n    g = torch.Generator().manual_seed(10 * seed + step)\n"
        "    x = torch.randn(7, 3, generator=g, dtype=torch.float64)\n    return x, x[:, :2]\n"
        "distlab.same_as_one_process(model=model, batch=batch)\n"
    )
    assert notebook.lines(right) == []
    text = notebook.failure(notebook.cell(right.replace("manual_seed(seed)", "manual_seed(seed + rank)")))
    assert "model(1) differs on ranks 1 and 2 from rank 0" in text


def test_ranks_end_with_the_process_that_owns_them(tmp_path: Path) -> None:
    kernel = (
        "import sys, time\nfrom distlab.tools.notebook.session import Session\n"
        "if __name__ == '__main__':\n    one = Session()\n    one.start(2)\n"
        "    print(*(pid for pid, _ in one.memory_bytes()), flush=True)\n    time.sleep(60)\n"
    )
    script = tmp_path / "kernel.py"
    script.write_text(kernel)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(each) for each in process.stdout.readline().split()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
