"""On real ranks: each reference passes, and each typical wrong answer is refused for its reason."""

from collections.abc import Iterator

import pytest

from distlab.tools.puzzle.runner import TRY_S, Verdict
from distlab.tools.puzzle.task import WORLD_SIZES
from distlab.tools.puzzle.tasks import TASKS
from tests.tools.puzzle.cases import Case, Verifier, cases, is_as_expected

CASES = cases(list(TASKS.values()))
REFERENCES = [case for case in CASES if not case.number]
WRONG = [case for case in CASES if case.number]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.close()


def name_of(case: Case) -> str:
    return f"{case.task.number}-{case.number}" if case.number else str(case.task.number)


@pytest.mark.parametrize("case", REFERENCES, ids=name_of)
def test_a_reference_passes_with_each_number_of_ranks(verifier: Verifier, case: Case) -> None:
    verdict = verifier.judge(case)
    assert verdict.passed, verdict.lines
    assert [figures.world_size for figures in verdict.figures] == list(WORLD_SIZES)


@pytest.mark.parametrize("case", WRONG, ids=name_of)
def test_a_wrong_answer_is_refused_for_its_reason(verifier: Verifier, case: Case) -> None:
    verdict = verifier.judge(case)
    assert is_as_expected(case, verdict), verdict.lines
    assert verdict.duration_s < TRY_S + 5


@pytest.mark.parametrize(
    ("number", "reason", "verdict", "expected"),
    [
        (0, "", Verdict(True, 1, 1.0), True),
        (0, "", Verdict(False, 1, 1.0, ["no"]), False),
        (1, "twice", Verdict(False, 1, 1.0, ["it is sent twice"]), True),
        (1, "twice", Verdict(False, 1, 1.0, ["it hangs"]), False),
        (1, "twice", Verdict(True, 1, 1.0), False),
    ],
)
def test_another_outcome_is_not_as_expected(number: int, reason: str, verdict: Verdict, expected: bool) -> None:
    assert is_as_expected(Case(TASKS[1], number, reason), verdict) == expected
