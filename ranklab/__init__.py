"""What users of the lab type and import; all of it is made in `workers`, which nobody need import.

The command `ranklab` is `ranklab/__main__.py`; a mode of one's own takes its classes from `ranklab.contract`. Nothing
is imported here, so that the command can answer before torch has come in.
"""
