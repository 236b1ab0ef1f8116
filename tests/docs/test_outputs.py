"""The blocks of the pages equal the output of their commands, which run again here.

A block follows a comment `<!-- output of: COMMAND -->`. What differs from run to run (times, dates, small differences,
the bars of a timeline) is compared only by its position; words, and with them every verdict, must be equal. A line
`...` stands for lines that a block leaves out; between them the order and the neighbours of lines are checked. A
command that must fail ends in `(exit code 1)`.

    python -m tests.docs.test_outputs        rewrites the blocks, and leaves out the same lines
"""

import re
import shlex
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from distlab.lab.report.table import INDENT, WIDTH
from tests.docs.pages import PAGES, TOP, page_id
from tests.launched import clean, ended, ended_warm

BLOCK = re.compile(r"<!-- output of: (?P<command>.*?) -->\n(?P<output>.*?)<!-- end -->\n", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")
PREFIX = re.compile(r"^rank \d+ \| ")
CUT = "..."
COMMANDS = sorted({block["command"] for page in PAGES for block in BLOCK.finditer(page.read_text())})


@cache
def output_of(command: str) -> str:
    """Return the output of a page's command: of several ranks only rank 0's lines, without lines of a slow start."""
    command, _, code = command.partition(" (exit code ")
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program = [sys.executable if word == "python" else word for word in words if not re.match(r"[A-Z_]+=", word)]
    environ = clean(**settings)
    environ.pop("CI", None)
    if program[1:2] == ["-m"] and program[2] in ("distlab", "distlab.experiments", "workers"):
        done = ended_warm(program[2], program[3:], cwd=TOP, environ=environ, timeout_s=110)
    else:
        done = ended(program, cwd=TOP, environ=environ, timeout_s=110)
    assert done.returncode == int(code.rstrip(")") or 0), done.stdout + done.stderr
    of_rank_0 = "".join(
        line for line in (done.stdout or done.stderr).splitlines(True) if not re.match(r"rank [1-9] \|", line)
    )
    untimed = re.sub(rf"^rank 0 \| times  .*\n(?:rank 0 \|[ ] {{{INDENT}}}\S.*\n)*", "", of_rank_0, flags=re.MULTILINE)
    return "".join(
        line + "\n"
        for line in untimed.splitlines()
        if not re.match(rf"rank 0 \| (?:waiting|working)|starting  |(?!rank 0 \|[ ] {{{INDENT}}}).*\d+ of \d+$", line)
    )


def entries(text: str) -> list[str]:
    """Return the lines of a text, with a wrapped line as one entry, because the numbers decide where it breaks."""
    found: list[str] = []
    for line in text.splitlines():
        last = PREFIX.sub("", found[-1].rpartition("\n")[2]) if found else ""
        goes_on = re.match(rf" {{{INDENT}}}(\S+)", PREFIX.sub("", line))
        if goes_on and len(last) <= WIDTH < len(f"{last} {goes_on[1]}"):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def shape(text: str) -> list[str]:
    """Return the lines without numbers, widths of columns, and timelines (between two bars)."""
    plain = (
        NUMBER.sub("#", re.sub(r"\|[-+.0-9A-Za-z]{32,}\|$", "|drawn|", re.sub(r"\n(rank \d+ \|)?", " ", entry)))
        for entry in entries(text)
    )
    # Two equal figures are printed as one: bytes at rest and at the peak.
    return [re.sub(r"# / #", "#", re.sub(r"\s+", " ", line)).strip() for line in plain]


def places(shown: str, printed: str) -> list[int] | None:
    """Return the number of each shown line in the printed text, -1 for a cut; None if a line is missing."""
    there, found, begin = shape(printed), [], 0
    runs = [(cut, list(lines)) for cut, lines in groupby(shape(shown), lambda line: line == CUT)]
    for number, (cut, lines) in enumerate(runs):
        if cut:
            found.append(-1)
            continue
        starts = set(range(begin, len(there) - len(lines) + 1))
        if number == 0:
            starts &= {0}
        if number == len(runs) - 1:
            starts &= {len(there) - len(lines)}
        start = next((start for start in sorted(starts) if there[start : start + len(lines)] == lines), None)
        if start is None:
            return None
        begin = start + len(lines)
        found += range(start, begin)
    return found


def within_fence(output: str) -> str:
    return output.removeprefix("```text\n").removesuffix("```\n")


def rewritten(shown: str, printed: str) -> str:
    """Return a page's block with the same lines as before, as they are printed now."""
    found = places(within_fence(shown), printed)
    if CUT not in within_fence(shown).splitlines() or found is None:
        text = printed
    else:
        printed_entries = entries(printed)
        text = "".join(f"{CUT if number < 0 else printed_entries[number]}\n" for number in found)
    return text if text.startswith("|") else f"```text\n{text}```\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_block_equals_the_output_of_its_command(command: str) -> None:
    blocks = [block for page in PAGES for block in BLOCK.finditer(page.read_text()) if block["command"] == command]
    for block in blocks:
        shown = within_fence(block["output"])
        if CUT not in shown.splitlines():
            assert shape(shown) == shape(output_of(command))  # checked first, because its difference is readable
        assert places(shown, output_of(command)) is not None, output_of(command)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_ends(page: Path) -> None:
    text = page.read_text()
    assert len(re.findall(r"^<!-- output of: ", text, re.MULTILINE)) == len(BLOCK.findall(text))


def test_a_changed_word_in_a_block_is_found() -> None:
    assert shape("PASS  32 checks passed") == shape("PASS 7 checks passed")
    assert shape("PASS 32 checks passed") != shape("FAIL 32 checks passed")
    assert shape(f"rank 0 |{'01..' * 16}|") == shape(f"rank 0 |{'0a.-' * 16}|") != shape(f"rank 0 {'01..' * 16}")


def test_a_wrapped_sentence_is_one_entry_wherever_it_breaks() -> None:
    begin, goes_on = f"rank 0 | FAILED     {'word ' * 9}and ", "rank 0 |            "
    early, late = f"{begin}9\n{goes_on}seconds\n", f"{begin}12345\n{goes_on}seconds\n"
    assert shape(early) == shape(late) == shape(f"{begin}9 seconds\n")
    table = f"rank 0 | timed      a 1\n{goes_on}b 2\n"
    assert len(shape(table)) == 2, "a row of a table is not a wrapped line"


PRINTED = "predict 3 MB\nproof\nnaive 1 passed\nflat 2 passed\nmemory 7\nPASS 36\n"


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (PRINTED, [0, 1, 2, 3, 4, 5]),
        ("predict 9 MB\n...\nPASS 1\n", [0, -1, 5]),
        ("...\nnaive 1 passed\nflat 2 passed\n...\nPASS 36\n", [-1, 2, 3, -1, 5]),
        ("predict 3 MB\nproof\n...\n", [0, 1, -1]),
        ("predict 3 MB\nproof\n", None),  # cut without `...`
        ("naive 1 passed\n...\nPASS 36\n", None),
        ("...\nnaive 1 passed\nPASS 36\n", None),
        ("...\nflat 2 passed\n...\nnaive 1 passed\n...\n", None),  # in another order
        ("predict 3 MB\n...\nnaive 1 FAILED\n...\n", None),
    ],
)
def test_a_cut_leaves_out_lines_and_changes_none(shown: str, found: list[int] | None) -> None:
    assert places(shown, PRINTED) == found


def test_a_rewritten_block_leaves_out_the_same_lines() -> None:
    printed = PRINTED.replace("36", "40")
    assert (
        rewritten("```text\n...\nflat 2 passed\n...\nPASS 36\n```\n", printed)
        == "```text\n...\nflat 2 passed\n...\nPASS 40\n```\n"
    )
    assert rewritten("```text\nold\n```\n", printed) == f"```text\n{printed}```\n"
    assert rewritten("| a |\n", "| b |\n") == "| b |\n"


def write() -> None:
    """Run the command of every block and write its output into the pages."""
    for page in PAGES:
        text = page.read_text()
        anew = BLOCK.sub(
            lambda block: (
                f"<!-- output of: {block['command']} -->\n{rewritten(block['output'], output_of(block['command']))}<!--"
                " end -->\n"
            ),
            text,
        )
        if anew != text:
            page.write_text(anew)


if __name__ == "__main__":
    write()
