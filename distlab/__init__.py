"""What users of the lab type and import; all of it is made in `workers`, which nobody need import.

The command `distlab` is `distlab/__main__.py`; a mode of one's own takes its classes from `distlab.contract`, a test of
one's own `distlab.ranks`. torch is not imported here, so that the command can answer before it has come in.
"""

from distlab.testing.decorators import ranks, same_as_one_process

__all__ = ["ranks", "same_as_one_process"]
