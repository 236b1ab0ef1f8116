"""Wrong lines, one at a time, each in a run of its own: which run says so, and by which check.

A file of this folder holds the mutants of one mode, or of a part that all modes share. A mutant that no check sees
passes for a claim that nobody tests: it is mended by a check, or argued here.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One line changed: `was`, which the file holds once, becomes `now`; `run` are the settings of the run that has to
    see it.

    `argued` says why no run can, where none can.
    """

    file: str
    was: str
    now: str
    run: str
    argued: str = ""
