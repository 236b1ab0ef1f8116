"""A judge that errs is found before it judges."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.lab import Lab
from distlab.rank import finish, verdict_self_test
from distlab.rank.verdict_self_test import Misjudged, cases, check_verdicts, misjudged
from distlab.report import verdict
from distlab.report.records import Check, Start


def lab_of(*, says_claims: bool = True) -> Any:
    """A lab whose records begin as a run's do."""
    journal = SimpleNamespace(records=[Start(0, "r", "dp", 1, "h", {}, {}, {}, says_claims=says_claims)])
    journal.write = journal.records.append
    lab: Any = SimpleNamespace(rank=0, journal=journal, mistake_for=lambda _: "")
    lab.control_of = lambda _, otherwise: otherwise
    lab.check = partial(Lab.check, lab)
    return lab


def test_the_judge_of_this_lab_is_right() -> None:
    assert [fault for case in cases() if (fault := misjudged(case))] == []
    lab = lab_of()
    check_verdicts(lab)
    check = lab.journal.records[-1]
    assert isinstance(check, Check)
    assert (check.name, check.max_abs_diff) == ("verdicts", 0)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (verdict, "_excess", lambda check: (False, 0.0)),
        (verdict, "_within", lambda difference, tolerance: True),
        (verdict, "_within", lambda difference, tolerance: not difference > tolerance),
        (verdict, "passes", lambda claim: True),
        (verdict, "_farness", lambda entry: (False, 0.0)),
        (verdict, "missing", lambda records: []),
        (verdict, "_lost", lambda records, world_size, errors, left: []),
        (verdict, "EXIT_CODES", {"pass": 0, "fail": 0, "refused": 2, "lost": 3}),
        (finish, "missed", lambda run: ""),
    ],
)
def test_a_judge_that_errs_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    lab = lab_of()
    with pytest.raises(Misjudged, match="verdicts: "):
        check_verdicts(lab)
    assert lab.journal.records[-1].max_abs_diff > 0


def test_a_run_that_does_not_say_what_it_needs_is_not_begun() -> None:
    with pytest.raises(Misjudged, match="does not say which claims"):
        check_verdicts(lab_of(says_claims=False))


def test_every_case_is_told_apart() -> None:
    names = [case.what for case in verdict_self_test.cases()]
    assert len(names) > 80
