"""The list of wrong lines: each still applies to the code as it stands, at least four a mode, and any that no run can
see is argued."""

from collections import Counter

import pytest

from benchmarks.mutants import Mutant
from benchmarks.mutants.__main__ import TOP, files, of_file

MUTANTS = [mutant for name in files() for mutant in of_file(name)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.now.strip()}")
def test_it_changes_one_place(mutant: Mutant) -> None:
    assert (TOP / mutant.file).read_text(encoding="utf-8").count(mutant.was) == 1
    assert mutant.was != mutant.now
    assert mutant.file.startswith(("distlab/", "experiments/"))


def test_none_stands_twice() -> None:
    assert [each for each, times in Counter((m.file, m.was, m.now) for m in MUTANTS).items() if times > 1] == []
