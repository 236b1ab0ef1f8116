"""The end of a run: its verdict and report, also after a broken cluster, and the sections of rank 0's log."""

import json
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.messages import Member, Verdict
from distlab.lab.lab import Lab
from distlab.lab.rank.finish import (
    REPORT_S,
    Sections,
    complete,
    everything_written,
    finish_run,
    let_leave,
    records_of_survivors,
    write_failure_report,
)
from distlab.lab.report.reading import read_records, read_run
from distlab.lab.report.records import Check, End, Failed, Left, Lost, Ranks, Skipped, Start, Steps, Unshared, select
from distlab.lab.report.run_folder import Journal, Outcome
from distlab.lab.report.verdict import exit_code, judge
from tests.lab.report.made_up import good_run
from tests.labs import failed
from tests.warm import Warm

LOST = Verdict(3, "rank 0 lost at step 5", (Lost(0, 5, "no heartbeat for 2.5 s"),))


def broken_rank(folder: Path, rank: int) -> Journal:
    journal = Journal()
    journal.open(folder, rank)
    (folder / ".run").write_text("token")
    journal.write(Start(rank, "run", "dp", 3, "host", {}, {}, {}))
    return journal


def survivor(rank: int, writes: bool, declared_dead: bool = False) -> Any:
    """Return a substitute for a Succession; `writes` is whether it is this rank's turn."""
    return SimpleNamespace(
        rank=rank, survivors=[1, 2], declared_dead=declared_dead, named_at=time.monotonic(), is_my_turn=lambda _written: writes,
    )  # fmt: skip


def test_the_lowest_survivor_writes_the_reports_of_all_survivors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = Outcome(folder, "token")
    journals = {rank: broken_rank(folder, rank) for rank in (0, 1, 2)}
    write_failure_report(LOST, survivor(2, writes=False), journals[2], outcome)
    assert not (folder / "run.json").exists(), "rank 2 is not the lowest"
    write_failure_report(LOST, survivor(1, writes=True), journals[1], outcome)
    assert (folder / "run.json").exists()
    complete(3, tmp_path / "run")  # draws the report that a busy machine had no time for
    assert (folder / "report.html").exists()
    words = records_of_survivors(folder, [1, 2])
    assert {rank for rank, _ in select(words, Failed)} == {1, 2}
    run = judge(words)
    assert run["verdict"] == "lost"
    assert [(lost["rank"], lost["step"]) for lost in run["lost"]] == [(0, 5)]


def test_a_verdict_names_the_ranks_whose_records_it_could_not_see(tmp_path: Path) -> None:
    outcome, journal = Outcome(tmp_path / "run", "token"), broken_rank(tmp_path / "run", 1)
    journal.write(Unshared(["node0", "node1", "node2"]))
    write_failure_report(LOST, survivor(1, writes=True), journal, outcome)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["unseen"] == [{"rank": 0, "host": "node0"}, {"rank": 2, "host": "node2"}]
    sentence = (
        "no records of rank 0 (on node0), rank 2 (on node2): their records are on that host, not here; this verdict"
        " has none of their measurements and checks"
    )
    assert (tmp_path / "run" / "rank1.log").read_text().splitlines()[0] == f"unseen     {sentence}"
    complete(3, tmp_path / "run")
    assert sentence in (tmp_path / "run" / "report.html").read_text()


def test_a_rank_that_was_declared_dead_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    journal, outcome = broken_rank(folder, 2), Outcome(folder, "token")
    outcome.prepare({"verdict": "pass"}, 0)
    outcome.page(0).write_text("the page")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    verdict = Verdict(3, "rank 2 was declared dead by the other ranks", (Lost(2, 5, "no heartbeat for 2.5 s"),))
    write_failure_report(verdict, survivor(2, writes=True, declared_dead=True), journal, outcome)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    outcome.publish(0)
    assert (folder / "run.json").exists() and (folder / "report.html").exists()


def test_a_report_that_takes_too_long_is_left_to_the_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    outcome, journal = Outcome(folder, "token"), broken_rank(folder, 1)
    late = survivor(1, writes=True)
    late.survivors, late.named_at = [1], late.named_at - REPORT_S + 0.1
    write_failure_report(LOST, late, journal, outcome)
    assert json.loads((folder / "run.json").read_text())["verdict"] == "lost"
    assert not list(folder.glob("*report*")), "an unfinished report is removed"
    assert "report     not drawn within 4.5 s of the loss: ./run report" in (folder / "rank1.log").read_text()
    capsys.readouterr()
    complete(1, tmp_path / "run")
    assert not (folder / "report.html").exists(), "only after a loss may a report be missing"
    complete(3, tmp_path / "run")
    assert (folder / "report.html").exists()
    assert capsys.readouterr().out == f"report     {folder}/report.html\n"


def test_the_launcher_completes_a_run_whose_ranks_were_all_stopped(tmp_path: Path) -> None:
    """Each rank leaves run.json to the survivors; an earlier attempt may have left files."""
    folder = tmp_path / "run"
    complete(143, folder)
    assert not folder.exists(), "no rank has made the folder"
    Outcome(folder, "before").folder.mkdir()
    (folder / "run.json").write_text("of before")
    (folder / "report.html").write_text("of before")
    for rank in range(3):
        own = Verdict(143, f"rank {rank} was stopped by SIGTERM at step 2 in flat")
        write_failure_report(own, survivor(rank, writes=False), broken_rank(folder, rank), Outcome(folder, "token"))
    complete(143, folder)
    run = json.loads((folder / "run.json").read_text())
    assert (run["verdict"], exit_code(run)) == ("lost", 143)
    assert [error["error"] for error in run["errors"]] == [
        f"rank {r} was stopped by SIGTERM at step 2 in flat" for r in range(3)
    ]
    assert "stopped by SIGTERM" in (folder / "report.html").read_text()
    assert (tmp_path / "latest").resolve() == folder.resolve()


DRAWS = """
import sys
from pathlib import Path
from distlab.lab.rank.finish import draw
draw(Path(sys.argv[1]), Path(sys.argv[1]) / "report.html", 60)
"""


def test_drawing_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    broken_rank(tmp_path, 0)

    def drawing() -> list[int]:
        """Return the live processes that draw this report."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes().split(b"\0")
                if b"distlab.cli.report" in command and os.fsencode(tmp_path) in command:
                    found.append(int(process.name))
        return found

    rank = Warm("-c", [DRAWS, str(tmp_path)], dict(os.environ))
    while not drawing():
        assert rank.poll() is None, "the rank ended before it drew"
    (child,) = drawing()
    os.kill(child, signal.SIGSTOP)
    rank.kill()
    rank.wait()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)
    while drawing():
        time.sleep(0.01)
    assert not (tmp_path / "report.html").exists()


def test_waiting_for_the_records_of_survivors_is_bounded(tmp_path: Path) -> None:
    broken_rank(tmp_path / "run", 1)
    assert set(records_of_survivors(tmp_path / "run", [1])) == {1}


def concluded(folder: Path, gradients: float, check: str = "gradients") -> dict[str, Any]:
    """Return the run of one rank with an injected bug: `gradients` is the difference of its only check, and `check` the
    one that has to catch the bug."""
    journal = Journal()
    journal.open(folder, 0)
    made = {"name": "lost_shard", "what": "a shard is lost", "check": check}
    journal.write(Start(0, "run", "dp", 1, "host", {}, {}, {}, mistake=made))
    journal.write(Check("flat", "gradients", gradients, 1e-12))
    journal.write(End(0, 0.0, 0.0, 1.0, 0.0))
    exchange: Any = SimpleNamespace(
        gather=lambda _key, lines: [lines], share=lambda _key, code: code, rank=0, world_size=1
    )
    lab: Any = SimpleNamespace(rank=0, exchange=exchange, journal=journal, say=lambda _line: None)
    lab.check, lab.mistake_for = partial(Lab.check, lab), lambda _check: ""
    assert finish_run(lab, Outcome(folder, "token"), Sections(exchange, journal), lambda publish: publish()) == 1
    run = json.loads((folder / "run.json").read_text())
    assert run == judge(read_run(folder)), "judging the records again gives the same verdict"
    return run  # type: ignore[no-any-return]


def test_an_injected_bug_fails_its_check(tmp_path: Path) -> None:
    assert failed(concluded(tmp_path, 1e-3)) == {"gradients"}


@pytest.mark.parametrize(
    ("check", "why"),
    [("gradients", "passed: nothing in this run detects it"), ("staleness", "did not run: nothing in this run could detect it")],
)  # fmt: skip
def test_an_injected_bug_that_no_check_catches_fails_the_run(tmp_path: Path, check: str, why: str) -> None:
    run = concluded(tmp_path, 1e-16, check)
    (failing,) = [each for each in run["checks"] if not each["passed"]]
    assert (failing["name"], failing["detail"]) == ("LAB_BUG", f"{check}, which catches lost_shard, {why}")


def test_ranks_that_leave_and_return_are_recorded(tmp_path: Path) -> None:
    journal, left = broken_rank(tmp_path, 0), list[int]()
    watch: Any = SimpleNamespace(let_leave=lambda on_loss: setattr(watch, "on_loss", on_loss))
    exchange: Any = SimpleNamespace(lost=set())
    let_leave(watch, exchange, journal, SimpleNamespace(may_leave=lambda: None), left.append)  # type: ignore[arg-type]
    watch.on_loss(Lost(2, 4, "its connection ended"))
    assert (exchange.lost, left) == ({2}, [2])
    watch.on_back(Member(2, "host", "127.0.0.2", 17))
    assert exchange.lost == set()
    life = Left(2, 4, "its connection ended; the remaining ranks continued")
    assert journal.records[1:] == [life, replace(life, back=True)]


# Sections of rank 0's log are printed once, when they are finished, from the records of all ranks so far.


def two_ranks() -> list[Sections]:
    """Return the sections of two ranks that exchange records within this process."""
    store = dist.HashStore()
    return [Sections(Exchange(store, rank, 2, timeout_s=1), Journal()) for rank in (0, 1)]


def write(ranks: list[Sections], records: Ranks, *kinds: type) -> None:
    """Write each rank's records of these kinds."""
    for rank, sections in enumerate(ranks):
        for record in records[rank]:
            if isinstance(record, kinds):
                sections.journal.write(record)


def finished(ranks: list[Sections], name: str) -> None:
    for sections in reversed(ranks):  # rank 1 sends and continues, rank 0 waits for it
        sections.finished(name)


def test_rank_0_prints_a_section_when_all_ranks_have_finished_it(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "proof      float64, against the reference   gradients   weights   losses    (tolerance 1e-12)"
    assert [line.split()[0] for line in printed[1:]] == ["naive", "bucketed", "ddp"]
    write(ranks, records, Steps)
    finished(ranks, "measured")
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:2] == ["naive", "81.2"]  # the median of rank 1, which is the slower one
    finished(ranks, "proof")
    assert capsys.readouterr().out == ""


def proven(ranks: list[Sections], variant: str) -> None:
    """Write rank 0's checks of a variant, and finish its row on all ranks."""
    for name in ("losses", "gradients", "weights"):
        ranks[0].journal.write(Check(variant, name, 2.8e-17 if variant == "ring" else 0.0, 1e-12))
    for sections in reversed(ranks):
        sections.finished("proof", ["ring", "a variant of a file somewhere/else.py"])


def test_a_proven_variant_is_printed_aligned_with_later_ones(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, printed = two_ranks(), []
    write(ranks, good_run(2), Start)
    for variant in ("ring", "a variant of a file somewhere/else.py"):
        proven(ranks, variant)
        printed.append(capsys.readouterr().out.splitlines())
    assert [[line.split()[0] for line in lines] for lines in printed] == [["proof", "ring"], ["a"]]
    first, second = printed[0][1], printed[1][0]
    assert first.index("passed") == second.index("passed") == printed[0][0].index("(tolerance 1e-12)")


def test_a_heading_is_printed_again_after_another_section(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = two_ranks()
    write(ranks, good_run(2), Start)
    proven(ranks, "ring")
    ranks[0].journal.write(Skipped("zero3", "it is not there"))
    finished(ranks, "skipped")
    capsys.readouterr()
    proven(ranks, "direct")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["proof", "direct"]


def test_rows_printed_before_the_first_section_count_as_printed() -> None:
    store = dist.HashStore()
    sections = Sections(Exchange(store, 0, 1, timeout_s=1), Journal(), ["bug        LAB_BUG=late:  sums"])
    assert sections.printed == {"bug LAB_BUG=late: sums"}


def test_every_record_goes_to_rank_0_once() -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    write(ranks, records, Steps)
    assert [sections.collect("records") for sections in reversed(ranks)] == [False, True]
    assert ranks[0].by_rank == {rank: sections.journal.records for rank, sections in enumerate(ranks)}


def test_records_from_other_disks_are_written_to_files(tmp_path: Path) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check, Steps)
    finished(ranks, "proof")
    everything_written(ranks[0], tmp_path)
    assert read_records(tmp_path / "rank1.jsonl") == ranks[1].journal.records


def test_records_of_a_rank_that_left_are_those_it_wrote(tmp_path: Path) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    ranks[1].journal.open(tmp_path, 1)
    ranks[1].journal.write(Left(1, 3, "killed"))  # its last record, on a shared disk
    ranks[0].exchange.lost.add(1)
    assert ranks[0].collect("records")
    assert everything_written(ranks[0], tmp_path)[1] == [Left(1, 3, "killed")]
    (tmp_path / "rank1.jsonl").unlink()
    assert everything_written(ranks[0], tmp_path)[1] == [r for r in records[1] if isinstance(r, Start | Check)]
