"""Sections of rank 0's log are told when they are finished, from what all ranks have written until then, and once."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distlab.cluster.control_plane import Exchange
from distlab.rank.finish import Sections, everything_written
from distlab.report.reading import read_records
from distlab.report.records import Check, Left, Ranks, Skipped, Start, Steps
from distlab.report.run_folder import Journal
from tests.report.made_up import good_run


def two_ranks() -> list[Sections]:
    """The sections of both ranks of a run, whose exchange is in this process."""
    store = dist.HashStore()
    return [Sections(Exchange(store, rank, 2, timeout_s=1), Journal()) for rank in (0, 1)]


def write(ranks: list[Sections], records: Ranks, *kinds: type) -> None:
    """What these ranks write down next."""
    for rank, sections in enumerate(ranks):
        for record in records[rank]:
            if isinstance(record, kinds):
                sections.journal.write(record)


def finished(ranks: list[Sections], name: str) -> None:
    for sections in reversed(ranks):  # rank 1 gives and goes on, rank 0 waits for it
        sections.finished(name)


def test_a_section_is_told_when_it_is_finished_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "proof      float64, against the reference   gradients   weights   losses    (tolerance 1e-12)"
    assert [line.split()[0] for line in said[1:]] == ["naive", "bucketed", "ddp"]
    write(ranks, records, Steps)
    finished(ranks, "measured")
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:2] == ["naive", "81.2"]  # the median of rank 1, which is the slower one
    finished(ranks, "proof")
    assert capsys.readouterr().out == ""


def proven(ranks: list[Sections], variant: str) -> None:
    """Rank 0 has checked a variant, and all ranks say that it is proven."""
    for name in ("losses", "gradients", "weights"):
        ranks[0].journal.write(Check(variant, name, 2.8e-17 if variant == "ring" else 0.0, 1e-12))
    for sections in reversed(ranks):
        sections.finished("proof", ["ring", "a variant of a file somewhere/else.py"])


def test_a_variant_is_told_when_it_is_proven_in_line_with_those_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    ranks, said = two_ranks(), []
    write(ranks, good_run(2), Start)
    for variant in ("ring", "a variant of a file somewhere/else.py"):
        proven(ranks, variant)
        said.append(capsys.readouterr().out.splitlines())
    assert [[line.split()[0] for line in lines] for lines in said] == [["proof", "ring"], ["a"]]
    first, second = said[0][1], said[1][0]
    assert first.index("passed") == second.index("passed") == said[0][0].index("(tolerance 1e-12)")


def test_a_heading_is_told_again_once_another_section_stands_between(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = two_ranks()
    write(ranks, good_run(2), Start)
    proven(ranks, "ring")
    ranks[0].journal.write(Skipped("zero3", "it is not there"))
    finished(ranks, "skipped")
    capsys.readouterr()
    proven(ranks, "direct")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["proof", "direct"]


def test_what_was_said_before_there_were_sections_is_told() -> None:
    store = dist.HashStore()
    sections = Sections(Exchange(store, 0, 1, timeout_s=1), Journal(), ["bug        LAB_BUG=late:  sums"])
    assert sections.told == {"bug LAB_BUG=late: sums"}


def test_every_record_goes_to_rank_0_once() -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    write(ranks, records, Steps)
    assert [sections.bring("records") for sections in reversed(ranks)] == [False, True]
    assert ranks[0].by_rank == {rank: sections.journal.records for rank, sections in enumerate(ranks)}


def test_all_records_are_in_files_that_another_disk_does_not_have(tmp_path: Path) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check, Steps)
    finished(ranks, "proof")
    everything_written(ranks[0], tmp_path)
    assert read_records(tmp_path / "rank1.jsonl") == ranks[1].journal.records


def test_of_a_rank_that_left_what_it_wrote_has_to_do(tmp_path: Path) -> None:
    ranks, records = two_ranks(), good_run(2)
    write(ranks, records, Start, Check)
    finished(ranks, "proof")
    ranks[1].journal.open(tmp_path, 1)
    ranks[1].journal.write(Left(1, 3, "killed"))  # its last word, on a disk that both see
    ranks[0].exchange.gone.add(1)
    assert ranks[0].bring("records")
    assert everything_written(ranks[0], tmp_path)[1] == [Left(1, 3, "killed")]
    (tmp_path / "rank1.jsonl").unlink()
    assert everything_written(ranks[0], tmp_path)[1] == [r for r in records[1] if isinstance(r, Start | Check)]
