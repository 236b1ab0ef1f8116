"""The own log of rank 1 of three, of every mode: facts that stand in it are those of the records, and no line is long.

docs/modes.md shows these logs of ranks 1 and 2; what differs from run to run is compared by its place alone.

    WRITE_PAGE=1 python -m pytest tests/experiments/test_rank_logs.py -k page      writes them anew
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout

import pytest

from distlab.cli import report
from distlab.experiments.train import by_hand
from distlab.lab.config.settings import modes
from distlab.lab.report import records
from distlab.lab.report.rank_log import MOST_LINES
from distlab.lab.report.reading import write_atomically
from distlab.lab.report.table import INDENT
from distlab.lab.report.units import BYTE_UNITS, human_bytes, three_digits
from tests.docs.pages import TOP
from tests.labs import Ran, Runs
from tests.mistakes import WORLD_SIZE_SHOWN as WORLD_SIZE
from tests.mistakes import shown

pytestmark = pytest.mark.timeout(110)
RANK = 1
TRAINS = ("dp", "tp", "pp", "fsdp", "mesh", "cp", "moe", "compress", "precision", "server")


def run_of(runs: Runs, mode: str) -> Ran:
    return runs(WORLD_SIZE, **shown(mode))


def log_of(ran: Ran) -> str:
    """Its lines as one, however they were wrapped."""
    return " ".join((ran.folder / f"rank{RANK}.log").read_text().split())


def of(ran: Ran, kind: type[records.Kind]) -> list[records.Kind]:
    return [record for record in ran.records[RANK] if isinstance(record, kind)]


def of_a_training(ran: Ran) -> Iterator[str]:
    """What each mode that trains variants says: samples, bytes held, bytes sent to whom, checks."""
    (given,) = of(ran, records.Given)
    yield f"{len(given.samples)} of {given.batch} samples"
    yield " ".join(map(str, given.samples[:7]))
    held = of(ran, records.Holds)[0]
    yield f"{held.variant}: {human_bytes(sum(parameter[4] for parameter in held.parameters))} in"
    most = max(of(ran, records.Wire), key=lambda wire: wire.sent_bytes)
    unit = re.search(r"sent (\w+) a step to ", log_of(ran))
    assert unit is not None, log_of(ran)
    yield three_digits(most.sent_bytes / 1000 ** BYTE_UNITS.index(unit[1]))
    step = of(ran, records.FirstStep)[0]
    yield f"{step.variant}: "
    yield human_bytes(sum(call[2] for call in step.calls))
    yield "checks all passed on this rank"


def samples_of_train(ran: Ran) -> Iterator[str]:  # noqa: ARG001  as the others
    mine = by_hand(0, RANK, WORLD_SIZE)[:4]
    yield str(mine)
    yield str([sample * (RANK + 1) for sample in mine])
    yield "checks all passed on this rank"


def numbers_of_comm(ran: Ran) -> Iterator[str]:
    yield str([37, 38, 39, 40])  # from 36 + LAB_SEED on
    for message in of(ran, records.Messages):
        yield human_bytes(sum(call[3] for call in message.calls if call[0] == message.calls[0][0]))
    yield "checks all passed on this rank"


def members_of_elastic(ran: Ran) -> Iterator[str]:
    for view in of(ran, records.Changed):
        yield f"from step {view.step}: ranks {', '.join(map(str, view.members))} ({view.what}"
    yield "zero1: killed at step"
    yield "checks all passed on this rank"


def losses_of_largebatch(ran: Ran) -> Iterator[str]:  # noqa: ARG001
    yield "k=1: 32 steps"
    yield "k=32: 1 step,"
    yield "checks all passed on this rank"


FACTS: dict[str, Callable[[Ran], Iterator[str]]] = dict.fromkeys(TRAINS, of_a_training) | {
    "comm": numbers_of_comm, "train": samples_of_train, "elastic": members_of_elastic,
    "largebatch": losses_of_largebatch,
}  # fmt: skip
# What a mode says beside that, each from its own records or sizes.
PARTICULAR = {
    "tp": ["rows 86-170 of 256", "with ranks 0 and 2"], "pp": ["previous stage: rank 0, next stage: rank 2", "1f1b: |"],
    "fsdp": ["zero3: unshard +, reshard -: +0", "rows"], "mesh": ["at tp 0, cp 0, dp 1, pp 0"],
    "cp": ["in layer 0 of rank 0, 2 after ms: ring"], "moe": ["its own took: replicated 0-7:", "ep, ep_torch 3-5:"],
    "server": ["downpour: ", "staleness"],
}  # fmt: skip


def test_every_mode_has_facts() -> None:
    assert sorted(FACTS) == sorted(modes())


@pytest.mark.parametrize("mode", sorted(FACTS))
def test_the_log_of_rank_1_says_what_its_records_have(mode: str, runs: Runs) -> None:
    ran = run_of(runs, mode)
    log = log_of(ran)
    facts = [*FACTS[mode](ran), *PARTICULAR.get(mode, [])]
    assert len(facts) >= 3
    assert [fact for fact in facts if fact not in log] == [], log
    lines = (ran.folder / f"rank{RANK}.log").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert 10 <= len(lines) + 1 <= MOST_LINES == 25, log  # with the verdict


def test_a_log_of_many_axes_and_more_steps_keeps_to_its_lines(runs: Runs) -> None:
    """moe has most to say: five variants of four layouts, on four ranks."""
    ran = runs(4, **shown("moe") | {"LAB_STEPS": "20", "LAB_PROOF": "0", "LAB_MODEL": "mlp"})
    for rank in range(1, 4):  # rank 0's has the verdict of all, too
        own = (ran.folder / f"rank{rank}.log").read_text().splitlines()
        assert len(own) + 1 <= MOST_LINES, "\n".join(own)
        for word in ("sent", "predicted", "waited", "memory", "checks"):
            assert any(line.startswith(f"{word:<{INDENT}}") for line in own), word


@pytest.mark.parametrize("mode", ["dp", "pp", "elastic"])
def test_a_log_is_printed_again_from_the_records(mode: str, runs: Runs) -> None:
    ran = run_of(runs, mode)
    with redirect_stdout(io.StringIO()) as printed:
        assert report.main([str(ran.folder), "--rank", str(RANK)]) == 0
    *lines, verdict = printed.getvalue().splitlines()
    assert lines == (ran.folder / f"rank{RANK}.log").read_text().splitlines()
    assert verdict.startswith("PASS ")


def test_a_full_log_has_each_call(runs: Runs) -> None:
    ran = run_of(runs, "dp")
    with redirect_stdout(io.StringIO()) as printed:
        report.main([str(ran.folder), "--rank", str(RANK), "--log", "full"])
    step = next(step for step in of(ran, records.FirstStep) if step.variant != "ring")
    lines = [line for line in printed.getvalue().splitlines() if "all_reduce with ranks 0 and 2" in line]
    assert len(lines) >= len(step.calls) > 1
    assert any("gradient of layers." in line for line in lines), "each names what it carries"


def test_a_rank_that_is_not_there_is_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run_of(runs, "train").folder), "--rank", "3"]) == 2
    assert "--rank 3 has no records here, allowed: 0, 1, 2" in capsys.readouterr().err


PAGE = TOP / "docs" / "modes.md"
VARIES = (
    (r", waited [-+.\de]+ for rank \d", ""),
    (r"(?<=ms: )forward [.\d]+(, backward [.\d]+)?, ", ""),  # left out where a line has no room
    (r"(?<=ms: )backward [.\d]+, ", ""),
    (r"(sent [kMG]?B a step|predicted / measured) .*?(?=predicted|waited|memory|checks)", ""),  # who has equal bytes
    (r"waited in the first steps .*?(?=memory|checks)", ""),
    (r"changes until the next step: .*?(?=begins|view|predicted)", ""),  # who noticed what first is a matter of moments
    (r"\|[-+.0-9A-Za-z]{32,}\|", "|drawn|"),
    (r"(\d+>\d+, )+(\.\.\.|\d+>\d+)|\d+>\d+", "versions"),
    (r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#"),
    (r"# [kMG]?B\b", "bytes"),
    (r"(# |# to # )ms", "# ms"),
)


def shape(log: str) -> str:
    """The words of a log in one line, without the calls of a first step: which are largest of equal ones varies."""
    text = " ".join(" ".join(line for line in log.splitlines() if not line.startswith(" " * 13)).split())
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text)
    return text


def block_of(mode: str, rank: int) -> re.Pattern[str]:
    return re.compile(rf"(<!-- log of: {mode} {rank} -->\n\n```text\n)(.*?)(```\n)", re.DOTALL)


@pytest.mark.parametrize("mode", sorted(FACTS))
def test_the_page_shows_the_logs_of_two_ranks(mode: str, runs: Runs) -> None:
    ran, page = run_of(runs, mode), PAGE.read_text()
    for rank in (1, 2):
        log = (ran.folder / f"rank{rank}.log").read_text()
        if os.environ.get("WRITE_PAGE") and (old := block_of(mode, rank).search(page)):
            page = page[: old.start(2)] + log + page[old.end(2) :]
            write_atomically(PAGE, [page])
        found = block_of(mode, rank).search(page)
        assert found is not None, f"docs/modes.md has no log of {mode} {rank}"
        assert shape(found[2]) == shape(log)
