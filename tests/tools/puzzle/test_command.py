"""`distlab puzzle` as a command: lists, writes once, gives hints, judges on real ranks, and writes JUnit."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distlab.cli import puzzle
from distlab.tools.puzzle import runner
from distlab.tools.puzzle.runner import Runner
from distlab.tools.puzzle.tasks import TASKS
from tests.tools.puzzle.cases import ANSWERS

ALL = len(TASKS)
Typed = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def warm() -> Iterator[Runner]:
    """Yield a runner with a fork server that has imported torch."""
    runner = Runner(Path())
    runner.ensure(1)
    yield runner
    runner.close()


@pytest.fixture
def typed(warm: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """`typed("7", "--hint")` in an empty folder returns the exit code and what is printed."""

    class Warm(Runner):
        """Its ranks come from a fork server that outlives them."""

        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self._servers = warm._servers

        def close(self) -> None:
            self.kill()
            self.close_store()

    monkeypatch.setattr(puzzle, "Runner", Warm)
    monkeypatch.chdir(tmp_path)

    def type_words(*words: str) -> tuple[int, str]:
        code = puzzle.main(words)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return type_words


def test_without_arguments_it_lists_the_tasks(typed: Typed) -> None:
    code, printed = typed()
    assert code == 0
    rows = printed.splitlines()
    assert rows[0] == f" 1  -           {TASKS[1].title}"
    assert rows[ALL + 1] == f"0 of {ALL} passed; `distlab puzzle 1` writes puzzles/01_broadcast.py"
    assert not Path("puzzles").exists()


def test_a_low_limit_of_open_files_is_refused(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    typed("1")
    shutil.copy(ANSWERS / TASKS[1].file, "puzzles")
    monkeypatch.setattr("resource.getrlimit", lambda _: (30, 4096))
    code, printed = typed("1")
    assert code == 2 and printed.startswith(
        "refused    a process may open 30 files here, and 4 local ranks need 88 each"
    )


def test_a_file_is_written_once_and_never_again(typed: Typed) -> None:
    code, printed = typed("5")
    assert code == 0
    assert printed == (
        "wrote puzzles/05_average_gradients.py: Average gradients of uneven shards\n"
        "fill in average_gradients, then: distlab puzzle 5\n"
    )
    file = Path("puzzles/05_average_gradients.py")
    file.write_text(file.read_text() + "# mine\n")
    code, printed = typed("5")
    assert code == 1
    assert "to fill in, there is still `...` in puzzles/05_average_gradients.py" in " ".join(printed.split())
    assert file.read_text().endswith("# mine\n")
    assert " 5  to fill in  Average" in typed()[1]


def test_hints_come_one_by_one_and_stay_at_the_last(typed: Typed) -> None:
    hints = TASKS[5].hints
    printed = [typed("5", "--hint") for _ in range(len(hints) + 1)]
    numbers = [*range(1, len(hints) + 1), len(hints)]
    lines = [(code, " ".join(text.split())) for code, text in printed]
    assert lines == [(0, f"hint {number} of {len(hints)}: {hints[number - 1]}") for number in numbers]
    assert max(len(line) for _, text in printed for line in text.splitlines()) <= 80
    assert typed("6", "--hint")[1].startswith("hint 1 of ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["0"], f"there is no puzzle 0, allowed: 1 to {ALL}"),
        (["99"], f"there is no puzzle 99, allowed: 1 to {ALL}"),
        (["--hint"], "--hint needs the number of a puzzle: distlab puzzle 7 --hint"),
        (["3", "--all"], "--all judges all puzzles, and 3 names one: give only one of the two"),
        (["--hint", "--all"], "--hint needs the number of a puzzle: distlab puzzle 7 --hint"),
        (["--junit", "x.xml"], "--junit needs answers to judge"),
    ],
)
def test_invalid_arguments_are_refused(typed: Typed, words: list[str], sentence: str) -> None:
    code, printed = typed(*words)
    assert code == 2
    assert printed.startswith(f"refused    {sentence}")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def average_gradients(:\n", "puzzles/05_average_gradients.py:1: "),
        ("x = 1\n", "puzzles/05_average_gradients.py has no function average_gradients, which puzzle 5 needs"),
    ],
)
def test_a_file_that_cannot_be_run_is_wrong(typed: Typed, source: str, sentence: str) -> None:
    Path("puzzles").mkdir()
    Path("puzzles/05_average_gradients.py").write_text(source)
    code, printed = typed("5")
    assert code == 1
    assert sentence in " ".join(printed.split())
    assert " 5  wrong " in typed()[1]


@pytest.mark.timeout(180)
def test_a_class_is_judged_and_summed_up(typed: Typed) -> None:
    """One file is right, one raises, one is not filled in, and the others do not exist."""
    Path("puzzles").mkdir()
    shutil.copyfile(ANSWERS / "05_average_gradients.py", "puzzles/05_average_gradients.py")
    wrong = "def average_in_one_call(gradients, group):\n    return gradients[9]\n"
    Path("puzzles/06_one_bucket.py").write_text(wrong)
    typed("1")
    code, printed = typed("--all", "--junit", "reports/puzzles.xml")
    assert code == 1
    assert "puzzle 5, Average gradients of uneven shards: passed in " in printed
    assert "puzzle 6, One flat bucket: WRONG with 2 ranks\n" in printed
    assert "    ranks 0 and 1 raised IndexError: list index out of range at\n    06_one_bucket.py:2\n" in printed
    assert f"1 of 3 files in puzzles/ passed, of {ALL} puzzles\n" in printed
    suite = ElementTree.parse("reports/puzzles.xml").getroot()
    assert dict(suite.attrib) == {
        "name": "distlab puzzle", "tests": "3", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    found = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert found == {"01_broadcast": ["skipped"], "05_average_gradients": [], "06_one_bucket": ["failure"]}
    listed = typed()[1]
    assert " 5  passed " in listed
    assert " 6  wrong " in listed
    assert f"1 of {ALL} passed" in listed
    Path("puzzles/05_average_gradients.py").write_text("# changed since\n")
    assert " 5  not run " in typed()[1]


@pytest.mark.timeout(180)
def test_a_hang_is_explained_and_the_exit_code_is_1(typed: Typed) -> None:
    Path("puzzles").mkdir()
    Path("puzzles/01_broadcast.py").write_text(
        "import torch.distributed as dist\n\n\ndef broadcast(tensor, root, group):\n"
        "    dist.recv(tensor, group_src=1 - group.rank(), group=group)\n"
    )
    code, printed = typed("1")
    assert code == 1
    assert "rank 0 waits in recv #0 from rank 1 at 01_broadcast.py:5 for rank 1" in printed


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "import os; os._exit(9)",
            "ranks 0 and 1 ended the process by os._exit(9) at 06_one_bucket.py:2",
        ),
        ("import posix; posix._exit(0)", "rank 0 called os._exit(0) before its first call"),
        ("exec('while True: pass')", "not done after 2 s"),
    ],
)
def test_an_answer_that_does_not_return_is_wrong(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    monkeypatch.setattr(runner, "TRY_S", 2.0)  # of 10: two ranks that keep two cores busy
    Path("puzzles").mkdir()
    Path("puzzles/06_one_bucket.py").write_text(f"def average_in_one_call(gradients, group):\n    {body}\n")
    code, printed = typed("6")
    assert code == 1
    assert words in " ".join(printed.split())


@pytest.mark.timeout(180)
def test_the_output_of_a_wrong_answer_is_shown(typed: Typed) -> None:
    Path("puzzles").mkdir()
    Path("puzzles/06_one_bucket.py").write_text(
        "def average_in_one_call(gradients, group):\n    print('I am', group.rank())\n    raise SystemExit(3)\n"
    )
    code, printed = typed("6")
    assert code == 1
    assert "rank 1 printed: I am 1" in printed
