"""What users of distlab import: a mode of their own takes its classes from `distlab.contract`, a test of their own
`distlab.ranks`.

torch is not imported here, so that the command `distlab` can answer before it has come in.
"""

from typing import Any

from distlab.tools.testing import ranks, same_as_one_process

__all__ = ["batch", "load_ipython_extension", "ranks", "same_as_one_process"]


def batch(*tensors: Any) -> Any:
    """A batch that a script makes itself, as it is; under `distlab prove` the reference is given those of all ranks."""
    return tensors[0] if len(tensors) == 1 else tensors


def load_ipython_extension(shell: object) -> None:
    """`%load_ext distlab` in a notebook: the magics `%%ranks` and `%ranks`."""
    from distlab.tools.notebook.magics import load

    load(shell)
