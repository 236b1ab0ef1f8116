"""What users of distlab import: a mode of their own takes its classes from `distlab.contract`, a test of their own
`distlab.ranks`.

torch is not imported here, so that the command `distlab` can answer before it has come in.
"""

from distlab.testing import ranks, same_as_one_process

__all__ = ["ranks", "same_as_one_process"]
