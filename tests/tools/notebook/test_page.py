"""docs/notebooks.md: each cell prints the output that the page shows below it."""

import re
from pathlib import Path

import pytest

from distlab.tools.notebook import output
from distlab.tools.notebook.session import Session

PAGE = Path(__file__).parents[3] / "docs" / "notebooks.md"
PAIR = re.compile(r"```python\n%%ranks ?(\d*)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(120)
def test_the_page_shows_the_output_of_its_cells() -> None:
    session = Session()
    cells = PAIR.findall(PAGE.read_text())
    assert len(cells) == 3
    try:
        session.start(int(cells[0][0]))
        for number, (_, source, expected) in enumerate(cells, 1):
            result = session.run_cell(number, source)
            lines = list(output.outputs(result))
            lines += output.failure(result, source).lines if result.outcome.is_bad else []
            text = re.sub(r"\x1b\[\d+m", "", "\n".join(lines))
            assert text.splitlines() == expected.splitlines()
    finally:
        session.close()
