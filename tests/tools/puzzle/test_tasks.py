"""What all tasks have in common: texts, files, and short references."""

import ast
import re
from pathlib import Path

import pytest
import torch

from distlab.tools.puzzle.folder import stub_of, unfilled
from distlab.tools.puzzle.rank import names_in
from distlab.tools.puzzle.task import WORLD_SIZES, Task, functions_of, sizes_of
from distlab.tools.puzzle.tasks import TASKS
from tests.tools.puzzle.cases import ANSWERS, WRONG

EACH = pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.file)


def test_they_are_numbered_from_one_without_a_gap() -> None:
    assert sorted(TASKS) == list(range(1, len(TASKS) + 1))
    assert len({task.name for task in TASKS.values()}) == len(TASKS)


@EACH
def test_an_idea_has_three_to_eight_sentences_and_a_task_two_hints_or_more(task: Task) -> None:
    sentences = re.split(r"[.?!](?:\s|$)", re.sub(r"\([^)]*\)", "", task.idea).strip())
    assert 3 <= len([each for each in sentences if each]) <= 8
    assert len(task.hints) >= 2


@EACH
def test_a_stub_says_what_is_to_fill_in(task: Task) -> None:
    text = stub_of(task)
    assert unfilled(text) == task.functions == functions_of(text)
    assert all(ast.get_docstring(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    assert max(map(len, text.splitlines())) <= 120
    assert f"distlab puzzle {task.number} --hint" in text


@EACH
def test_a_reference_has_at_most_25_lines(task: Task) -> None:
    source = (ANSWERS / task.file).read_text()
    body = [node for node in ast.parse(source).body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    lines = source.splitlines()[body[0].lineno - 1 :]
    assert len([line for line in lines if line.strip()]) <= 25
    assert set(task.functions) <= set(functions_of(source))


@EACH
def test_there_are_three_wrong_answers_each_with_its_reason(task: Task) -> None:
    names = names_in(str(WRONG / task.file))
    assert set(names["REFUSED"]) == {1, 2, 3}
    for number in names["REFUSED"]:
        own = [
            name for name in names if name.removesuffix(f"_{number}") in task.functions and name not in task.functions
        ]
        assert own
        assert all(names[name].__doc__ or len(own) > 1 for name in own)


def test_no_file_of_an_answer_lacks_its_task() -> None:
    for folder in (ANSWERS, WRONG):
        assert {path.name for path in folder.glob("*.py")} == {task.file for task in TASKS.values()}


@EACH
@pytest.mark.parametrize("world_size", sorted(WORLD_SIZES))
def test_one_process_computes_a_result_for_each_rank(task: Task, world_size: int) -> None:
    expected = task.expected(world_size)
    assert len(expected) == world_size
    for words, tensors in task.suspects(world_size).items():
        assert words[0].islower() or words[0].isdigit()
        assert len(tensors) == world_size
        assert all(name in expected[0] for name in tensors[0])
    assert all(torch.isfinite(each.double()).all() for tensors in expected for each in tensors.values())


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_parts_are_uneven(world_size: int) -> None:
    sizes = sizes_of(997, world_size)
    assert sum(sizes) == 997
    assert len(set(sizes)) == world_size


def test_the_folders_of_answers_are_no_packages() -> None:
    """A learner cannot import them by mistake."""
    assert not [path for path in (ANSWERS, WRONG) if Path(path, "__init__.py").exists()]
