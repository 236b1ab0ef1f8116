"""docs/practice.md has every puzzle."""

from distlab.tools.puzzle.tasks import TASKS
from tests.docs.pages import page


def test_the_table_has_all_puzzles_in_their_order() -> None:
    rows = [line for line in page("practice").splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert rows == [f"| {task.number} | {task.title} |" for task in TASKS.values()]
