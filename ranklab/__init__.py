"""What users of the lab type and import; all of it is made in `workers`, which nobody need import.

The command `ranklab` is `ranklab/__main__.py`; a mode of one's own takes its classes from `ranklab.contract`, a test of
one's own `ranklab.ranks`. torch is not imported here, so that the command can answer before it has come in.
"""

from workers.testing.marks import ranks, same_as_one_process

__all__ = ["ranks", "same_as_one_process"]
