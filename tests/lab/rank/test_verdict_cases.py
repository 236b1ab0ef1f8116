"""The judge is right about every made-up run, and each error in the judge shows in at least one of them."""

from typing import Any

import pytest

from distlab.lab.rank import finish
from distlab.lab.report import verdict
from tests.lab.rank.verdict_cases import cases, misjudged


def test_every_made_up_run_is_judged_correctly() -> None:
    tried = list(cases())
    assert len(tried) > 80
    assert [fault for case in tried if (fault := misjudged(case))] == []


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (verdict, "_badness", lambda claim: (False, 0.0)),
        (verdict, "_error_size", lambda claim: 0.0),
        (verdict, "passes", lambda claim: True),
        (verdict, "passes", lambda claim: not verdict._error_size(claim) > claim.tolerance),  # as if NaN held
        (verdict, "missing", lambda records: []),
        (verdict, "_lost", lambda records, world_size, errors, left: []),
        (verdict, "EXIT_CODES", {"pass": 0, "fail": 0, "refused": 2, "lost": 3}),
        (finish, "missed", lambda run: ""),
    ],
)
def test_every_error_in_the_judge_shows_in_a_case(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert [fault for case in cases() if (fault := misjudged(case))]
