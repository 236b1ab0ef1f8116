"""The magics as a user types them, and the notebooks of notebooks/, executed as Jupyter does."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import pytest
from IPython.core.error import UsageError
from IPython.testing.globalipapp import get_ipython

from distlab.tools.notebook.magics import RanksMagics
from distlab.tools.notebook.output import CellFailed

TOP = Path(__file__).parents[3]
NOTEBOOKS = sorted((TOP / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def magics() -> Iterator[RanksMagics]:
    """The magics in an IPython shell."""
    shell = get_ipython()  # type: ignore[no-untyped-call]
    shell.run_line_magic("load_ext", "distlab")
    found: RanksMagics = shell.magics_manager.registry["RanksMagics"]
    yield found
    found.session.close()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("0", "'0' is not a number of ranks, allowed: 1 to 64"),
        ("four", "'four' is not a number of ranks, allowed: 1 to 64"),
        ("65", "'65' is not a number of ranks, allowed: 1 to 64"),
        ("2 --only x", "'x' is not a list of ranks, expected such as 0 or 0,2"),
        ("2 --only 1,2", "--only has rank 2, but the ranks are 0 to 1"),
        ("2 --show wires", "'wires' cannot be shown, allowed: wire, timeline, memory"),
        ("2 --hide", "unrecognized arguments: --hide"),
        ("2 '", "No closing quotation"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(magics: RanksMagics, line: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        magics.ranks(line, "1")


def test_ranks_are_started_listed_and_stopped(magics: RanksMagics, capsys: pytest.CaptureFixture[str]) -> None:
    magics.ranks("")
    assert capsys.readouterr().out == "no ranks: %ranks 4 starts four\n"
    magics.ranks("2")
    assert re.fullmatch(r"2 ranks in \d+\.\d s\n", capsys.readouterr().out)
    magics.ranks("", "x = rank\nx")
    assert capsys.readouterr().out == "rank 0 | = 0\nrank 1 | = 1\n"
    magics.ranks("--show wire", "dist.barrier()")
    assert "bytes sent by" in capsys.readouterr().out
    magics.ranks("")
    assert re.fullmatch(r"(rank \d   process \d+   [\d.]+ MB   1 name: x\n){2}", capsys.readouterr().out)
    with pytest.raises(CellFailed, match="ValueError on rank 1"):
        magics.ranks("2", "if rank:\n    raise ValueError(1)")
    capsys.readouterr()
    magics.ranks("3", "'x' in dir()")
    assert capsys.readouterr().out.endswith("all 3 ranks | = False\n"), "another number starts new ranks"
    magics.ranks("--stop")
    assert capsys.readouterr().out == "no ranks\n"


def texts(notebook: nbformat.NotebookNode) -> str:
    """The output and tracebacks of all cells, without colours."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found += [output.get("text", ""), *output.get("traceback", [])]
    return re.sub(r"\x1b\[\d+m", "", "\n".join(found))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(path.parent)}}).execute()
    found = texts(notebook)
    for sentence in SENTENCES[path.stem]:
        assert sentence in found, found
    failing = [cell for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", [])]
    assert all(any(output.output_type == "error" for output in cell.outputs) for cell in failing)


# Sentences that each notebook's output contains on any machine.
SENTENCES = {
    "1_talk": ["all 4 ranks | the same on all", "all 4 ranks | = True", "bytes sent by", "rank 0 | = tensor([10.])"],
    "2_data_parallel": ["all 3 ranks | = 'proven'", "gradients", "['4.bias', '4.weight', '2.bias', '2.weight', '0.bias', '0.weight']"],
    "3_tensor_parallel": ["all 3 ranks | = 'proven'", "gradients of before.bias on rank 0 are only a part"],
    "4_pipeline": ["by the formula 43%", "rank 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5   keeps 1"],
    "5_zero": ["all 4 ranks | = 8.4", "7 billion parameters on 8 ranks, stage 3:   14.0 GB each"],
    "6_break_it": [
        "rank 0 waits in all_reduce #0 of all ranks at cell 3, line 2",
        "Each sends first, and none receives",
        "rank 3 was killed by SIGKILL",
        "rank 3 restarted",
        "model(1) differs on ranks 1, 2 and 3 from rank 0",
    ],
}  # fmt: skip


def test_every_notebook_has_expected_sentences() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(SENTENCES)
