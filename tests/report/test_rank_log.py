"""How a rank's log keeps to its lines; tests/experiments/test_rank_logs.py has whole logs."""

from distlab.report.rank_log import RankLog, checks_lines, fitted
from distlab.report.records import Check, Comparison
from distlab.report.table import WIDTH


def blocks() -> list[list[str]]:
    return [["sent 1", "sent 2", "sent 3"], ["waited"], ["memory 1", "m" * WIDTH]]


def test_what_fits_is_whole() -> None:
    assert fitted(blocks(), 6) == [line for block in blocks() for line in block]


def test_the_longest_is_cut_first_and_says_so() -> None:
    assert fitted(blocks(), 5) == ["sent 1", "sent 2 ...", "waited", "memory 1", "m" * WIDTH]
    assert fitted(blocks(), 4) == ["sent 1 ...", "waited", "memory 1", "m" * WIDTH]


def test_one_line_of_each_stays_however_little_room_there_is() -> None:
    assert fitted(blocks(), 0) == ["sent 1 ...", "waited", "memory 1 ..."]
    assert fitted([], 0) == []
    assert fitted([["m" * WIDTH, "n"]], 1) == ["m" * (WIDTH - 3) + "..."]


def test_the_checks_of_a_rank_have_no_number_beside_that_of_the_run() -> None:
    log = RankLog("normal")
    assert checks_lines(log) == ["checks     none was made on this rank"]
    log.lines(Comparison("", "shown", "s", 1, 9, 0, decides=False))
    log.lines(Check("", "shards", 0, 0))
    assert checks_lines(log) == ["checks     all passed on this rank"]
    for _ in range(2):
        log.lines(Check("flat", "weights", 1, 0))
    assert checks_lines(log) == ["checks     FAILED on this rank: flat weights"]
